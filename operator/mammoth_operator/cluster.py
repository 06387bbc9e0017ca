"""Do: own the connection to the API server. The only module with a Kubernetes client; every write asks the fence first.

The client blocks, so calls run in a bounded executor, with timeouts. Failures come out typed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import kubernetes.client
import kubernetes.config
import urllib3.exceptions

from mammoth_operator.errors import ApiError, Missing, TransientError, error_of
from mammoth_operator.names import API_VERSION, KIND, MANAGER, PLURAL
from mammoth_operator.observed import Parent

__all__ = ["Cluster", "connect"]

Raw = dict[str, Any]
NUM_THREADS = 16
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5, 30
APPLY, MERGE, JSON = "application/apply-patch+yaml", "application/merge-patch+json", "application/json"
PATHS = {
    "ConfigMap": ("api/v1", "configmaps"),
    "ControllerRevision": ("apis/apps/v1", "controllerrevisions"),
    "Deployment": ("apis/apps/v1", "deployments"),
    "Event": ("api/v1", "events"),
    "Lease": ("apis/coordination.k8s.io/v1", "leases"),
    KIND: (f"apis/{API_VERSION}", PLURAL),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "Pod": ("api/v1", "pods"),
    "PodDisruptionBudget": ("apis/policy/v1", "poddisruptionbudgets"),
    "PodMonitor": ("apis/monitoring.coreos.com/v1", "podmonitors"),
    "Secret": ("api/v1", "secrets"),
    "Service": ("api/v1", "services"),
    "ServiceAccount": ("api/v1", "serviceaccounts"),
    "ServiceMonitor": ("apis/monitoring.coreos.com/v1", "servicemonitors"),
}


@dataclass(frozen=True, slots=True)
class Request:
    """One call, as a value."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    content_type: str = JSON
    query: tuple[tuple[str, str], ...] = ()


def connect() -> kubernetes.client.ApiClient:
    """Return a client with the pod's service account, or else the kubeconfig that KUBECONFIG names."""
    configuration = kubernetes.client.Configuration()
    try:
        kubernetes.config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except kubernetes.config.ConfigException:
        kubernetes.config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    configuration.connection_pool_maxsize = NUM_THREADS
    configuration.retries = False
    return kubernetes.client.ApiClient(configuration)


class Cluster:
    """Reads and writes objects. `fence` raises NotLeader when this process may not write."""

    def __init__(
        self,
        client: kubernetes.client.ApiClient,
        *,
        fence: Callable[[], None],
        timed: Callable[[str, str, float], None] = lambda verb, code, elapsed_s: None,
    ) -> None:
        self._client, self._fence, self._timed = client, fence, timed
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kubernetes")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def get(self, kind: str, namespace: str, name: str) -> Raw | None:
        """Return an object, or None when there is none of that name (or no such kind)."""
        try:
            return await self._send(Request("GET", path(kind, namespace, name)))
        except Missing:
            return None

    async def apply(self, manifest: Mapping[str, Any], *, uid: str = "") -> Raw:
        """Apply server-side and return the object. With `uid`, only to that very object, and by force.

        Without it the object is believed to be new: fields that somebody else holds in one of that name are a Conflict.
        """
        meta = manifest["metadata"]
        body = {**manifest, "metadata": {**meta, "uid": uid}} if uid else manifest
        query = (("fieldManager", MANAGER), ("force", "true" if uid else "false"), ("fieldValidation", "Strict"))
        return await self._write(Request("PATCH", path(manifest["kind"], meta["namespace"], meta["name"]), body, APPLY, query))  # fmt: skip

    async def apply_status(self, parent: Parent, status: Mapping[str, Any]) -> Raw:
        """Apply `status` whole: what it leaves out is removed. Returns the object."""
        body = self._parent_body(parent) | {"status": status}
        return await self._write(Request("PATCH", self._parent_path(parent) + "/status", body, APPLY, FORCED))

    async def apply_finalizers(self, parent: Parent, finalizers: tuple[str, ...]) -> Raw:
        """Make `finalizers` ours, and all of ours."""
        body = self._parent_body(parent)
        if finalizers:
            body["metadata"]["finalizers"] = list(finalizers)
        return await self._write(Request("PATCH", self._parent_path(parent), body, APPLY, FORCED))

    async def merge(self, kind: str, namespace: str, name: str, patch: Mapping[str, Any], *, uid: str) -> Raw:
        """Merge `patch` into the object of that very `uid` and return it."""
        body = {**patch, "metadata": {**patch.get("metadata", {}), "uid": uid}}
        return await self._write(Request("PATCH", path(kind, namespace, name), body, MERGE, (("fieldManager", MANAGER),)))  # fmt: skip

    async def delete(self, kind: str, namespace: str, name: str, *, uid: str) -> None:
        """Delete the object of that very `uid` and, in the background, what it owns; nothing happens when it is gone."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._write(Request("DELETE", path(kind, namespace, name), body))
        except Missing:
            return

    async def create(self, manifest: Mapping[str, Any]) -> Raw:
        """Create an object that must be new."""
        return await self._write(Request("POST", path(manifest["kind"], manifest["metadata"]["namespace"]), manifest))

    async def put_unfenced(self, manifest: Mapping[str, Any], *, new: bool) -> Raw:
        """Create or replace an object without asking the fence: how the fence itself is put up."""
        where = path(manifest["kind"], manifest["metadata"]["namespace"], "" if new else manifest["metadata"]["name"])
        return await self._send(Request("POST" if new else "PUT", where, manifest))

    async def _write(self, request: Request) -> Raw:
        self._fence()
        return await self._send(request)

    async def _send(self, request: Request) -> Raw:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, request)

    def _call(self, request: Request) -> Raw:
        start, code = time.monotonic(), "none"
        headers = {"Accept": JSON, "Content-Type": request.content_type}
        try:
            prepared = self._client.param_serialize(
                request.method, f"/{request.path}", query_params=list(request.query), header_params=headers,
                body=request.body, auth_settings=["BearerToken"],
            )  # fmt: skip
            response = self._client.call_api(*prepared, _request_timeout=(CONNECT_TIMEOUT_S, READ_TIMEOUT_S))
            data: bytes = response.read()  # type: ignore[no-untyped-call]
            code = str(response.status)
        except (urllib3.exceptions.HTTPError, kubernetes.client.ApiException, OSError) as err:
            raise TransientError(f"{request.method} /{request.path}: no answer: {err}") from err
        finally:
            self._timed(request.method, code, time.monotonic() - start)
        answer = _parsed(data)
        if response.status >= 300:
            raise error_of(response.status, answer, response.headers.get("Retry-After"))
        return answer

    @staticmethod
    def _parent_path(parent: Parent) -> str:
        return path(KIND, parent.key.namespace, parent.key.name)

    @staticmethod
    def _parent_body(parent: Parent) -> Raw:
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": parent.key.name, "namespace": parent.key.namespace, "uid": parent.uid}}  # fmt: skip


FORCED = (("fieldManager", MANAGER), ("force", "true"))


def path(kind: str, namespace: str, name: str = "") -> str:
    """Return the path of an object, or of the collection it belongs to."""
    prefix, plural = PATHS[kind]
    return f"{prefix}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")


def _parsed(data: bytes) -> Raw:
    try:
        answer = json.loads(data or b"{}")
    except ValueError as err:
        raise TransientError(f"the API server answered with something that is not JSON: {data[:100]!r}") from err
    if not isinstance(answer, dict):
        raise ApiError(f"the API server answered with {type(answer).__name__}")
    return answer
