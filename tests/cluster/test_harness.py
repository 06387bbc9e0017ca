"""The cluster of the tests is a real one, obeys, runs the project's images, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness.cluster import Cluster
from harness.errors import ClusterError
from harness.isolation import GROUPS, remove_groups
from harness.kubectl import Kubectl
from harness.node import GPUS, PAUSE_IMAGE

TINY = "/tmp/tiny"
UNBOUND = {"schedulerName": "nobody"}  # a pod on a node that a test plays ends when that test says so
SECURE = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}


def pod(name: str, image: str, **container: Any) -> dict[str, Any]:
    """A pod as the operator makes them: not root, nothing writable but /tmp."""
    mounts = [{"name": "tmp", "mountPath": "/tmp"}]
    main = {"name": "main", "image": image, "securityContext": SECURE, "volumeMounts": mounts, **container}
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "containers": [main],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def with_tiny(dit: dict[str, Any], image: str) -> dict[str, Any]:
    """Let an init container of the AR image make half of the tiny checkpoint, and one of the DiT image the other half."""
    mounts = dit["spec"]["containers"][0]["volumeMounts"]
    dit["spec"]["initContainers"] = [
        {
            "name": stage,
            "image": image.replace("-dit:", f"-{stage}:"),
            "command": ["python3", "-m", f"mammoth_{stage}.tiny", TINY, *more],
            "securityContext": SECURE,
            "volumeMounts": mounts,
        }
        for stage, more in (("ar", ["--family", "preview"]), ("dit", []))
    ]
    return dit


def said(kubectl: Kubectl, name: str) -> str:
    """Wait until the pod `name` has run to its end, delete it, and return its log. Its exit code must be 0."""
    exit_code = "{.status.containerStatuses[0].state.terminated.exitCode}"
    kubectl("wait", f"--for=jsonpath={exit_code}", f"pod/{name}", "--timeout=120s")
    log = kubectl("logs", name)
    code = kubectl("get", "pod", name, "-o", f"jsonpath={exit_code}")
    kubectl("delete", "pod", name, "--wait=true")
    assert code == "0", log
    return log


class TestPlane:
    def test_is_the_kubernetes_that_the_modules_pin(self, plane_kubectl):
        version = json.loads(plane_kubectl("version", "-o", "json"))
        assert version["serverVersion"]["gitVersion"] == version["clientVersion"]["gitVersion"]

    def test_has_controllers_that_act(self, plane_kubectl):
        with plane_kubectl.namespace("controllers"):
            labels = {"app": "nothing"}
            template = {
                "metadata": {"labels": labels},
                "spec": {**UNBOUND, "containers": [{"name": "main", "image": "none"}]},
            }
            plane_kubectl.apply(
                {
                    "apiVersion": "apps/v1",
                    "kind": "Deployment",
                    "metadata": {"name": "two", "namespace": "controllers"},
                    "spec": {"replicas": 2, "selector": {"matchLabels": labels}, "template": template},
                }
            )
            plane_kubectl("wait", "--for=jsonpath={.status.replicas}=2", "deployment/two", "-n", "controllers")

    def test_lets_a_test_play_the_node(self, plane_kubectl):
        with plane_kubectl.namespace("played"):
            one = pod("one", "none") | {"metadata": {"name": "one", "namespace": "played"}}
            one["spec"] |= UNBOUND
            plane_kubectl.apply(one)
            ready = {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
            plane_kubectl("patch", "pod/one", "-n", "played", "--subresource=status", "-p", json.dumps(ready))
            plane_kubectl("wait", "--for=condition=Ready", "pod/one", "-n", "played", "--timeout=5s")

    def test_records_who_asked_for_what(self, plane_kubectl, plane_cluster):
        plane_kubectl("get", "configmaps", "-n", "default", "--as=somebody", "--as-group=system:masters")
        entries = map(json.loads, plane_cluster.audit_log.read_text().splitlines())
        assert any(entry.get("impersonatedUser", {}).get("username") == "somebody" for entry in entries)

    def test_comes_back_when_its_api_server_is_killed(self, plane_kubectl, plane_cluster):
        plane_cluster.halt("kube-apiserver")
        assert "refused" in plane_kubectl.fails("get", "--raw", "/readyz")
        plane_cluster.resume("kube-apiserver")
        assert answers(plane_kubectl, within_s=60)


@pytest.mark.skipif(os.geteuid() != 0, reason="takes a capability away, which only root has")
def test_a_machine_without_namespaces_says_so_before_anything_is_built():
    code = "from harness.isolation import require_namespaces; require_namespaces()"
    done = subprocess.run(
        ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Unavailable: a node needs namespaces and network devices of its own" in done.stderr


class TestNode:
    def test_counts_gpus_and_refuses_one_too_many(self, node_kubectl):
        with node_kubectl.namespace("gpus"):
            for name, count in (("fits", GPUS), ("waits", 1)):
                limits = {"limits": {"nvidia.com/gpu": count}}
                node_kubectl.apply(
                    pod(name, PAUSE_IMAGE, resources=limits) | {"metadata": {"name": name, "namespace": "gpus"}}
                )
                condition = "True" if name == "fits" else "False"
                node_kubectl("wait", f"--for=condition=PodScheduled={condition}", f"pod/{name}", "-n", "gpus")
            waiting = node_kubectl.get("pod/waits", "-n", "gpus")["status"]["conditions"]
            assert "Insufficient nvidia.com/gpu" in str(waiting)

    @pytest.mark.parametrize("stage", ["ar", "dit"])
    def test_runs_a_stage_that_explains_itself(self, node_kubectl, images, stage):
        name = f"help-{stage}"
        node_kubectl.apply(pod(name, getattr(images, stage), args=["--help"]))
        assert f"usage: mammoth-{stage}" in said(node_kubectl, name)

    def test_serves_the_tiny_checkpoint_behind_a_grpc_probe_and_drains(self, node_kubectl, images):
        probe = {"grpc": {"port": 50053}, "periodSeconds": 1}
        served = pod(
            "tiny",
            images.dit,
            args=["--model", TINY, "--drain-seconds", "5", "--warm-sizes", "32x32"],
            startupProbe={**probe, "failureThreshold": 60},
            readinessProbe=probe,
        )
        start = time.monotonic()
        node_kubectl.apply(with_tiny(served, images.dit))
        node_kubectl("wait", "--for=condition=Ready", "pod/tiny", "--timeout=120s")
        print(f"{images.kind} DiT pod ready in {time.monotonic() - start:.1f} s")
        start = time.monotonic()
        node_kubectl("delete", "pod", "tiny", "--wait=true", "--timeout=60s")
        assert time.monotonic() - start < 25, "the first process of the pod handles SIGTERM"

    def test_gives_pods_names_for_services(self, node_kubectl, images):
        lookup = "import socket; print(socket.gethostbyname('kubernetes.default.svc.cluster.local'))"
        node_kubectl.apply(pod("lookup", images.dit, command=["python3", "-c", lookup]))
        assert said(node_kubectl, "lookup").strip() == "10.96.0.1"


def answers(kubectl: Kubectl, *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        with suppress(ClusterError):
            kubectl("get", "--raw", "/readyz")
            return True
    return False


def traces(word: str) -> list[str]:
    """What has `word` in its name: mounts, command lines of processes, control groups, folders of work."""
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if word in line]
    commands = [text for entry in Path("/proc").glob("[0-9]*/cmdline") if word in (text := read(entry))]
    return (
        mounts + commands + [str(found) for place in (GROUPS, *GROUPS.iterdir()) for found in place.glob(f"*{word}*")]
    )


def read(entry: Path) -> str:
    with suppress(OSError):
        return entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def shared_state() -> dict[str, Any]:
    """What a node could have touched outside its namespaces and names."""
    links = sorted(path.name for path in Path("/sys/class/net").iterdir())
    var = sorted(
        str(path) for pattern in ("lib/cni*", "lib/kubelet*", "log/pods*") for path in Path("/var").glob(pattern)
    )
    return {
        "links": links,
        "run": sorted(Path("/run").iterdir()),
        "var": var,
        "mounts": Path("/proc/mounts").read_text(),
    }


@pytest.mark.cluster
@pytest.mark.parametrize("tier", ["plane", pytest.param("node", marks=pytest.mark.node)])
def test_a_cluster_leaves_nothing_behind(request, tier):
    if not request.getfixturevalue(f"{tier}_cluster").own:
        pytest.skip("a named cluster is left as it is")
    before = shared_state()
    cluster = Cluster.obtain(tier)
    word = cluster.work.name
    kubectl = Kubectl(cluster.kubectl, cluster.kubeconfig)
    if tier == "node":
        kubectl.apply(pod("left", PAUSE_IMAGE))
        kubectl("wait", "--for=condition=Ready", "pod/left", "--timeout=60s")
    assert traces(word)
    cluster.stop()
    assert not traces(word)
    assert not list(Path(tempfile.gettempdir()).glob(f"{word}*"))
    assert shared_state() == before


@pytest.mark.cluster
@pytest.mark.parametrize("tier", ["plane", pytest.param("node", marks=pytest.mark.node)])
def test_no_process_outlives_the_session_that_started_it(request, tier):
    if not request.getfixturevalue(f"{tier}_cluster").own:
        pytest.skip("a named cluster is left as it is")
    session = subprocess.Popen(
        [sys.executable, "-m", "harness", tier],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    word = next(filter(None, map(work_folder, session.stdout)))
    session.kill()
    session.wait()
    session.stdin.close()
    session.stdout.close()
    try:
        gone_by = time.monotonic() + 20
        while any(word in read(entry) for entry in Path("/proc").glob("[0-9]*/cmdline")):
            assert time.monotonic() < gone_by, traces(word)
    finally:
        shutil.rmtree(Path(tempfile.gettempdir()) / word)
        if tier == "node":
            remove_groups(word)


def work_folder(line: str) -> str | None:
    """Return the name of the work folder, if `line` of the harness tells it."""
    found = re.search(r"KUBECONFIG=\S*/(mammoth-\w+-\w+)/", line)
    return found and found.group(1)
