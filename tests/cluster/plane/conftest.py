"""The operator on a real API server: it runs as the chart's ServiceAccount, with the chart's Role and nothing more."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from playing.api import APPLY, Api, eventually, where
from playing.kubelet import Fate, Kubelet, add_node
from playing.operating import Operator
from playing.pipeline import Pipeline
from playing.proxy import Proxy

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "mammoth-operator"
RELEASE = "mammoth-operator"
NUMBERS = itertools.count()


def apply(api: Api, document: dict) -> None:
    meta = document["metadata"]
    kinds = {
        "ClusterRole": "clusterroles",
        "ClusterRoleBinding": "clusterrolebindings",
        "Role": "roles",
        "RoleBinding": "rolebindings",
    }
    if document["kind"] in kinds:
        space = f"namespaces/{meta['namespace']}/" if "namespace" in meta else ""
        path = f"apis/rbac.authorization.k8s.io/v1/{space}{kinds[document['kind']]}/{meta['name']}"
    else:
        path = where(document["kind"], meta.get("namespace", ""), meta["name"])
    api.call("PATCH", f"{path}?fieldManager=test&force=true", document, APPLY)


@pytest.fixture(scope="session")
def render(plane_cluster) -> Callable[..., list[dict]]:
    """Return what the chart renders for a namespace and some `--set` values."""

    def rendered(namespace: str, *values: str) -> list[dict]:
        sets = [word for value in values for word in ("--set", value)]
        command = [
            plane_cluster.helm,
            "template",
            RELEASE,
            CHART,
            "--namespace",
            namespace,
            "--kube-version",
            "1.37.0",
            *sets,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return rendered


@pytest.fixture(scope="session")
def api(plane_cluster, render) -> Iterator[Api]:
    """An administrator, on a server that knows the CRD and has a node with GPUs."""
    found = Api(plane_cluster.kubeconfig)
    [crd] = [document for document in render("default") if document["kind"] == "CustomResourceDefinition"]
    apply(found, crd)
    name = crd["metadata"]["name"]
    eventually(
        lambda: any(
            item["type"] == "Established" and item["status"] == "True"
            for item in found.get("CustomResourceDefinition", "", name).get("status", {}).get("conditions") or ()
        )
    )
    add_node(found)
    yield found
    found.close()


@pytest.fixture(scope="session")
def kubelet(api, worker_id) -> Iterator[Kubelet]:
    with Kubelet(api, block=int(worker_id.removeprefix("gw")) if worker_id != "master" else 0) as played:
        yield played


@pytest.fixture
def space(api, kubelet) -> Iterator[str]:
    """A namespace of its own."""
    yield from new_space(api)


def new_space(api: Api) -> Iterator[str]:
    name = f"test-{os.getpid()}-{next(NUMBERS)}"
    api.create("Namespace", "", {"metadata": {"name": name}})
    yield name
    for item in api.list("MammothDeployment", name):
        api.merge("MammothDeployment", name, item["metadata"]["name"], {"metadata": {"finalizers": None}})
    api.delete("Namespace", "", name)


@pytest.fixture
def account_of(api, render, plane_cluster, space, tmp_path) -> Callable[..., Path]:
    """Return a maker of kubeconfigs of the chart's ServiceAccount, as rendered with some values."""

    def make(*values: str) -> Path:
        return account(api, render, plane_cluster.kubeconfig, space, tmp_path, *values)

    return make


@pytest.fixture
def credentials(account_of, space) -> Path:
    """A kubeconfig of the chart's ServiceAccount, whose Role covers this namespace alone."""
    return account_of(f"watchNamespaces={{{space}}}")


def account(api: Api, render, admin: Path, home: str, folder: Path, *values: str) -> Path:
    for document in render(home, *values):
        if document["kind"] in (
            "ServiceAccount",
            "Role",
            "RoleBinding",
            "ClusterRole",
            "ClusterRoleBinding",
        ) and "helm.sh/hook" not in document["metadata"].get("annotations", {}):
            apply(api, document)
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 7200}}
    token = api.call("POST", f"api/v1/namespaces/{home}/serviceaccounts/{RELEASE}/token", request)["status"]["token"]
    document = yaml.safe_load(admin.read_text())
    document["users"] = [{"name": "operator", "user": {"token": token}}]
    document["contexts"] = [
        {"name": "test", "context": {"cluster": document["clusters"][0]["name"], "user": "operator"}}
    ]
    document["current-context"] = "test"
    path = folder / "operator.kubeconfig"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def make_operator(request, credentials, space, tmp_path) -> Iterator[Callable[..., Operator]]:
    """Return a maker of operators of this namespace; all are stopped in the end."""
    if "proxy" in request.fixturenames:
        request.getfixturevalue("proxy")  # it must outlive them
    made: list[Operator] = []

    def make(identity: str = "one", *, config: Path = credentials, flags: tuple[str, ...] = ()) -> Operator:
        made.append(Operator(config, tmp_path / f"{identity}.log", identity, namespaces=space, home=space, flags=flags))
        return made[-1]

    yield make
    for operator in made:
        if operator.process is not None:
            operator.stop()


@pytest.fixture
def operator(make_operator) -> Operator:
    """A running operator of this namespace."""
    return make_operator().start()


@pytest.fixture
def proxy(credentials, tmp_path) -> Iterator[Proxy]:
    with Proxy(credentials, tmp_path) as passing:
        yield passing


@pytest.fixture
def pipeline(api, space) -> Pipeline:
    """A deployment that has yet to be created."""
    return Pipeline(api, space)


@pytest.fixture
def fate(kubelet, space) -> Iterator[Callable[..., None]]:
    """Return a setter of what becomes of pods: by `image`, or of all of them."""
    rules: dict[str, Fate] = {}
    kubelet.fates[space] = lambda pod: rules.get(pod["spec"]["containers"][0]["image"], rules.get("", Fate()))

    def set_fate(end: str = "ready", *, image: str = "", **times: float) -> None:
        rules[image] = Fate(end, **times)

    yield set_fate
    del kubelet.fates[space]
