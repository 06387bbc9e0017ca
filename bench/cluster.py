"""Do: measure the operator on a real API server with played nodes: idle cost, edits, restart, memory, at 200 objects.

    python -m bench.cluster [--objects 200]
    python -m bench.cluster --node

Requests are counted by the operator's own metrics, writes by the server's audit log. Nodes are played as in the tests of
the plane, with a real Control service in every pod. `--node` types README's commands on a real node instead, and counts
commands and seconds to the first image. Either keeps what the other has measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from bench import report
from bench.report import Spread

TESTS = Path(__file__).resolve().parent.parent / "tests" / "cluster"
CHART = Path(__file__).resolve().parent.parent / "charts" / "mammoth-operator"
IDLE_S = 60.0
EDITS = 40
KEPT = ("commands_to_first_image", "seconds_to_first_image", "first_image_with")


def main() -> None:
    """Run it and write bench/results/cluster.json."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster")
    parser.add_argument("--objects", type=int, default=200)
    parser.add_argument("--node", action="store_true")
    given = parser.parse_args()
    sys.path.append(str(TESTS))
    from harness.cluster import Cluster

    if given.node:
        add(newcomer())
        return
    cluster = Cluster.obtain("plane")
    try:
        with tempfile.TemporaryDirectory(prefix="mammoth-bench-") as folder:
            measure(cluster, given.objects, Path(folder))
    finally:
        cluster.stop()


def newcomer() -> dict[str, float | str]:
    """Type README's commands on a node of its own, which has the images; return what they took."""
    from harness.cluster import Cluster
    from harness.images import load_images
    from playing.newcomer import Shell, first_picture, readme_commands

    cluster = Cluster.obtain("node")
    try:
        images = load_images(cluster)
        with tempfile.TemporaryDirectory(prefix="mammoth-bench-") as folder:
            load = os.getloadavg()[0]
            _, took = first_picture(Shell(cluster, Path(folder)))
    finally:
        cluster.stop()
    for command, seconds in took.items():
        print(f"{seconds:6.1f} s  {command}")
    return {
        "commands_to_first_image": len(readme_commands()),
        "seconds_to_first_image": sum(took.values()),
        "first_image_with": f"{images.kind} images on the node; pip install not timed; load average {load:.1f}",
    }


def add(figures: Mapping[str, float | str]) -> None:
    """Put figures of the node beside those of the plane, under whose heading they stand."""
    path = report.RESULTS / "cluster.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, **figures}, indent=2, allow_nan=False) + "\n")
    print(f"written to {path}")


def measure(cluster: object, num_objects: int, folder: Path) -> None:
    """Measure with `num_objects` deployments of one AR and one DiT pod each."""
    import yaml
    from playing.api import APPLY, Api, eventually, where
    from playing.kubelet import Kubelet, add_node
    from playing.operating import Operator
    from playing.pipeline import SPEC, Pipeline, merged

    kubeconfig: Path = cluster.kubeconfig  # type: ignore[attr-defined]
    api = Api(kubeconfig)
    crd = yaml.safe_load((CHART / "files" / "crd.yaml").read_text())
    name = crd["metadata"]["name"]
    api.call("PATCH", f"{where('CustomResourceDefinition', '', name)}?fieldManager=bench&force=true", crd, APPLY)
    eventually(lambda: api.call("GET", where("MammothDeployment", "default")))
    for number in range(-(-num_objects * 2 // 1000)):
        add_node(api, f"gpu-{number}", gpus=1000)
    cpu = {"accelerator": {"count": 0}}
    pipelines = [Pipeline(api, "default", f"p{number:03}") for number in range(num_objects)]
    with Kubelet(api, poll_s=1.0) as kubelet:
        operator = Operator(kubeconfig, folder / "operator.log", lease_s=60.0).start()
        try:
            for pipeline in pipelines:
                spec = merged(SPEC, {"ar": cpu, "dit": cpu, "rollout": {"progressDeadlineSeconds": 3600}})
                api.create("MammothDeployment", "default", {"metadata": {"name": pipeline.name}, "spec": spec})
            eventually(lambda: _all_ready(api, num_objects), within_s=600, what="all are ready")
            time.sleep(15)
            before, start = operator.metrics(), time.monotonic()
            time.sleep(IDLE_S)
            elapsed_min = (time.monotonic() - start) / 60
            after = operator.metrics()
            requests, writes = _requests(after) - _requests(before), _writes(after) - _writes(before)
            rss_mib = operator.rss_mib()
            edits = [_edit_s(pipelines[number * 7 % num_objects], number) for number in range(EDITS)]
            eventually(lambda: _all_ready(api, num_objects), within_s=120)
            time.sleep(15)
            assert operator.stop() == 0
            versions = _versions(api)
            start = time.monotonic()
            operator.start()
            eventually(
                lambda: operator.metrics().get('mammoth_operator_reconcile_total{result="done"}', 0) >= num_objects,
                within_s=120,
            )
            restart_s = time.monotonic() - start
            time.sleep(5)
            restart_writes = _writes(operator.metrics())
            assert _versions(api) == versions, "a restart changed children"
            rss_mib = max(rss_mib, operator.rss_mib())
        finally:
            if operator.process is not None:
                operator.stop()
        del kubelet
    api.close()
    figures = {
        **_kept(),
        "objects": num_objects,
        "idle_requests_per_min": requests / elapsed_min / num_objects,
        "idle_requests_per_min_operator": requests / elapsed_min,
        "unchanged_writes": writes,
        "edit_p95_s": Spread.of(edits).p95,
        "edit_p50_s": median(edits),
        "rss_mib": rss_mib,
        "restart_converged_s": restart_s,
        "restart_writes": restart_writes,
    }
    report.write(
        "cluster",
        workload={"objects": num_objects, "pods": 2 * num_objects, "idle_s": IDLE_S, "edits": EDITS, "nodes": "played"},
        warm_up=0,
        repeats=EDITS,
        spread={"edit_p95_s": Spread.of(edits)},
        figures=figures,
    )


def _edit_s(pipeline: object, number: int) -> float:
    """Return the seconds from an edit of the replicas to the child that has them."""
    wanted = 2 + number % 2
    start = time.monotonic()
    pipeline.edit(dit={"replicas": wanted})  # type: ignore[attr-defined]
    while True:
        children = pipeline.children("Deployment").values()  # type: ignore[attr-defined]
        if any(child["spec"]["replicas"] == wanted for child in children if "-dit-" in child["metadata"]["name"]):
            return time.monotonic() - start
        time.sleep(0.02)


def _all_ready(api: object, number: int) -> bool:
    items = api.list("MammothDeployment", "default")  # type: ignore[attr-defined]
    ready = sum(
        any(c["type"] == "Ready" and c["status"] == "True" for c in item.get("status", {}).get("conditions", ()))
        for item in items
    )
    return ready == number


def _versions(api: object) -> dict[str, str]:
    selector = "mammoth.dev/deployment"
    return {
        f"{kind}/{item['metadata']['name']}": item["metadata"]["resourceVersion"]
        for kind in ("Deployment", "Service", "ConfigMap", "ControllerRevision")
        for item in api.list(kind, "default", selector=selector)  # type: ignore[attr-defined]
    }


def _requests(metrics: dict[str, float]) -> float:
    return sum(value for key, value in metrics.items() if key.startswith("mammoth_operator_api_request_seconds_count"))


def _writes(metrics: dict[str, float]) -> float:
    """Return writes of objects; the lease is renewed by PUT alone."""
    verbs = ('verb="PATCH"', 'verb="POST"', 'verb="DELETE"')
    counts = {key: value for key, value in metrics.items() if "api_request_seconds_count" in key}
    return sum(value for key, value in counts.items() if any(verb in key for verb in verbs))


def _kept() -> dict[str, float | str]:
    path = report.RESULTS / "cluster.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    return {key: known[key] for key in KEPT if key in known}


if __name__ == "__main__":
    main()
