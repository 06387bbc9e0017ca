"""A new user's shell on a real node, the operator installed by its chart, and the sample's deployment; each made where it is missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.cluster import Cluster
from harness.errors import ClusterError
from harness.images import Images
from harness.kubectl import Kubectl
from playing.api import Api, eventually
from playing.newcomer import Shell
from playing.pipeline import Pipeline

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "mammoth-operator"
SAMPLE = CHART / "samples" / "cpu-demo.yaml"
RELEASE, HOME = "mammoth", "mammoth-system"
NAMESPACE = "default"
SLOW_S = 600  # a pod of two busy cores needs its time


@pytest.fixture(scope="session")
def shell(node_cluster: Cluster, images: Images, tmp_path_factory) -> Shell:
    return Shell(node_cluster, tmp_path_factory.mktemp("newcomer"))


@pytest.fixture(scope="session")
def api(node_cluster: Cluster) -> Iterator[Api]:
    found = Api(node_cluster.kubeconfig)
    yield found
    found.close()


@pytest.fixture(scope="session")
def values(images: Images) -> list[str]:
    """The flags that name the images, where they are not those that the chart names."""
    if images.published:
        return []
    repository, _, tag = images.operator.rpartition(":")
    named = {"image.repository": repository, "image.tag": tag, "test.arImage": images.ar, "test.ditImage": images.dit}
    return [f"--set={key}={value}" for key, value in named.items()]


@pytest.fixture
def release(shell: Shell, values: list[str]) -> str:
    """The installed release; its operator's pod is ready."""
    if RELEASE not in shell(f"helm list --namespace {HOME} --short").split():
        shell(f"helm install {RELEASE} {CHART} --namespace {HOME} --create-namespace {' '.join(values)}")
    shell(f"kubectl rollout status -n {HOME} deployment/mammoth-mammoth-operator --timeout=5m")
    return RELEASE


@pytest.fixture
def demo(release: str, shell: Shell, images: Images, api: Api) -> Pipeline:
    """The CPU sample's deployment, with what the sample says, ready."""
    document = yaml.safe_load(SAMPLE.read_text())
    if not images.published:
        document["spec"]["ar"]["image"], document["spec"]["dit"]["image"] = images.ar, images.dit
    pipeline = Pipeline(api, NAMESPACE, document["metadata"]["name"])
    shell("kubectl apply --server-side --force-conflicts -f -", given=json.dumps(document))
    return pipeline.ready(within_s=SLOW_S)


@dataclass(slots=True)
class Load:
    """A pod that asks for pictures. `lines` are what it has said so far."""

    kubectl: Kubectl
    name: str
    seen: list[dict[str, Any]] = field(default_factory=list)

    def lines(self) -> list[dict[str, Any]]:
        self.seen = [json.loads(line) for line in self.kubectl("logs", self.name, "-n", NAMESPACE).splitlines()]
        return self.seen

    def drawn(self) -> int:
        return sum("sha256" in line or "error" in line for line in self.lines())

    def underway(self) -> int:
        """Return how many pictures are accepted and have not ended."""
        return sum("accepted" in line for line in self.lines()) - self.drawn()

    def until(self, look: Callable[[], Any], what: str) -> None:
        def told() -> Any:
            try:
                return look()
            except ClusterError:
                return None  # the container has not started yet

        eventually(told, within_s=SLOW_S, what=f"{what}; {self.seen[-3:]}")

    def finish(self) -> list[dict[str, Any]]:
        """Let it end what it has begun, and return what it said of each picture. Every one must have come."""
        self.kubectl("exec", self.name, "-n", NAMESPACE, "--", "touch", "/tmp/stop")
        return self.result()

    def result(self) -> list[dict[str, Any]]:
        self.until(lambda: "failures" in self.lines()[-1], f"{self.name} ends")
        counts = self.seen[-1]
        assert counts["failures"] == 0, [line for line in self.seen if "error" in line]
        pictures = [line for line in self.seen if "sha256" in line]
        assert len(pictures) == counts["pictures"] > 0
        assert len({(line["seed"], line["sha256"]) for line in pictures}) == len({line["seed"] for line in pictures}), (
            "a seed draws one picture, whoever draws it"
        )
        return pictures


@pytest.fixture
def start_load(node_kubectl: Kubectl, images: Images, request) -> Iterator[Callable[..., Load]]:
    """Return a starter of load pods for a deployment."""
    made: list[str] = []
    script = {"load.py": (Path(__file__).parent / "load.py").read_text()}

    def start(pipeline: Pipeline, **flags: int) -> Load:
        name = f"load-{len(made)}-{abs(hash(request.node.name)) % 10**6}"
        metadata = {"name": name, "namespace": NAMESPACE}
        arguments = [f"--{key}={value}" for key, value in flags.items()]
        address = f"{pipeline.name}.{pipeline.namespace}:50051"
        container = {
            "name": "load", "image": images.ar, "imagePullPolicy": "IfNotPresent",
            "command": ["python3", "/load/load.py", address, *arguments],
            "volumeMounts": [{"name": "load", "mountPath": "/load"}],
        }  # fmt: skip
        spec = {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container],
            "volumes": [{"name": "load", "configMap": {"name": name}}],
        }  # fmt: skip
        node_kubectl.apply(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": script},
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec},
        )
        made.append(name)
        return Load(node_kubectl, name)

    yield start
    for name in made:
        node_kubectl("delete", f"pod/{name}", f"configmap/{name}", "-n", NAMESPACE, "--wait=false")
