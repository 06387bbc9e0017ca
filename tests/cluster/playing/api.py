"""Do: an administrator's view of the API server for the tests: plain objects in, plain objects out, waiting with a limit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import kubernetes.client
import kubernetes.config
import urllib3

Raw = dict[str, Any]
T = TypeVar("T")
APPLY, MERGE, JSON_PATCH = "application/apply-patch+yaml", "application/merge-patch+json", "application/json-patch+json"
PLURALS = {
    "ConfigMap": "api/v1/{}/configmaps", "ControllerRevision": "apis/apps/v1/{}/controllerrevisions",
    "CustomResourceDefinition": "apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "Deployment": "apis/apps/v1/{}/deployments", "Event": "api/v1/{}/events", "Lease": "apis/coordination.k8s.io/v1/{}/leases",
    "MammothDeployment": "apis/mammoth.dev/v1alpha1/{}/mammothdeployments", "Namespace": "api/v1/namespaces",
    "NetworkPolicy": "apis/networking.k8s.io/v1/{}/networkpolicies", "Node": "api/v1/nodes", "Pod": "api/v1/{}/pods",
    "PodDisruptionBudget": "apis/policy/v1/{}/poddisruptionbudgets", "ResourceQuota": "api/v1/{}/resourcequotas",
    "Secret": "api/v1/{}/secrets", "Service": "api/v1/{}/services", "ServiceAccount": "api/v1/{}/serviceaccounts",
}  # fmt: skip
PATIENCE_S = 60.0  # far above what anything takes: a machine that is busy is no failure
API_VERSIONS = {
    kind: path.replace("/{}", "").rpartition("/")[0].removeprefix("apis/").removeprefix("api/")
    for kind, path in PLURALS.items()
}


class Refused(Exception):
    """The API server said no: `status` is the HTTP status, the text its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """Calls the API server as an administrator."""

    def __init__(self, kubeconfig: Path) -> None:
        configuration = kubernetes.client.Configuration()
        kubernetes.config.load_kube_config(str(kubeconfig), client_configuration=configuration)
        self._client = kubernetes.client.ApiClient(configuration)
        self._client.rest_client.pool_manager.connection_pool_kw["maxsize"] = 8

    def close(self) -> None:
        self._client.rest_client.close()

    def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Raw:
        """Return the answer. Raises Refused."""
        headers = {"Accept": "application/json", "Content-Type": content_type}
        response = self._client.call_api(method, f"{self._client.configuration.host}/{path}", headers, body, _request_timeout=(5, 30))  # fmt: skip
        data = response.read() or b"{}"
        if response.status >= 300:
            raise Refused(response.status, json.loads(data)["message"] if data.startswith(b"{") else data.decode())
        return json.loads(data)

    def get(self, kind: str, namespace: str, name: str) -> Raw | None:
        try:
            return self.call("GET", where(kind, namespace, name))
        except Refused as err:
            if err.status == 404:
                return None
            raise

    def list(self, kind: str, namespace: str = "", *, selector: str = "") -> list[Raw]:
        query = f"?labelSelector={selector}" if selector else ""
        return self.call("GET", where(kind, namespace) + query).get("items", [])

    def create(self, kind: str, namespace: str, body: Mapping[str, Any]) -> Raw:
        return self.call("POST", where(kind, namespace), {"apiVersion": API_VERSIONS[kind], "kind": kind, **body})

    def merge(self, kind: str, namespace: str, name: str, patch: Mapping[str, Any], *, sub: str = "") -> Raw:
        return self.call("PATCH", where(kind, namespace, name) + sub, patch, MERGE)

    def delete(self, kind: str, namespace: str, name: str, *, grace_s: int | None = None) -> None:
        query = "" if grace_s is None else f"?gracePeriodSeconds={grace_s}"
        try:
            self.call("DELETE", where(kind, namespace, name) + query)
        except Refused as err:
            if err.status not in (404, 409):
                raise


def where(kind: str, namespace: str = "", name: str = "") -> str:
    """Return the path of an object, of a collection in a namespace, or of a whole collection."""
    path = PLURALS[kind]
    path = path.format(f"namespaces/{namespace}") if namespace else path.replace("/{}", "")
    return f"{path}/{name}" if name else path


def eventually(look: Callable[[], T], *, within_s: float = PATIENCE_S, what: str = "") -> T:
    """Return the first true value of `look`. It is tried until the time is over; then the test fails with its last value."""
    limit = time.monotonic() + within_s
    last: Any = None
    while time.monotonic() < limit:
        try:
            last = look()
        except (Refused, urllib3.exceptions.HTTPError, OSError) as err:
            last = err
        if last and not isinstance(last, Exception):
            return last
        time.sleep(0.1)
    raise AssertionError(f"not within {within_s:.0f} s: {what or look}: {last!r}")


def always(look: Callable[[], Any], *, for_s: float, what: str = "") -> None:
    """Fail as soon as `look` is false within the time."""
    limit = time.monotonic() + for_s
    while time.monotonic() < limit:
        value = look()
        assert value, f"{what or look}: {value!r}"
        time.sleep(0.1)
