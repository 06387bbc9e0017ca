"""The chart's life on a real node: its own test, an upgrade that restarts no pod of a user, an uninstall that leaves the CRD."""

from __future__ import annotations

from pathlib import Path

import pytest
from playing.api import eventually

pytestmark = pytest.mark.node

CHART = Path(__file__).resolve().parents[3] / "charts" / "mammoth-operator"
HOME = "mammoth-system"
SLOW_S = 600


def everything(shell) -> set[str]:
    """Return the names of all objects of the cluster that bear the release's label, Events aside."""
    kinds = set(shell("kubectl api-resources --verbs=list -o name").split()) - {"events", "events.events.k8s.io"}
    listed = f"kubectl get {','.join(sorted(kinds))} --all-namespaces -l app.kubernetes.io/instance=mammoth -o name --ignore-not-found 2>/dev/null"  # fmt: skip
    return set(shell(listed).split())


def test_the_chart_s_own_test_draws_a_picture(release, shell):
    said = shell(f"helm test {release} --namespace {HOME} --timeout 10m")
    assert "Succeeded" in said
    assert "mammoth-mammoth-operator-smoke" not in shell("kubectl get mmd --all-namespaces -o name")


def staying(demo) -> dict[str, int]:
    """Return how often the containers of each pod were restarted, but for pods that an earlier test sent away."""
    return {
        pod["metadata"]["uid"]: sum(status["restartCount"] for status in pod["status"]["containerStatuses"])
        for pod in demo.pods()
        if "deletionTimestamp" not in pod["metadata"]
    }


def test_an_upgrade_restarts_no_pod_of_a_deployment(demo, release, shell, values):
    eventually(lambda: len(staying(demo)) == 2, within_s=SLOW_S, what="what earlier tests changed has settled")
    before = staying(demo)
    [operator] = shell(f"kubectl get pods -n {HOME} -l app.kubernetes.io/component=operator -o name").split()
    shell(f"helm upgrade {release} {CHART} --namespace {HOME} --set logLevel=debug {' '.join(values)}")
    shell(f"kubectl rollout status -n {HOME} deployment/mammoth-mammoth-operator --timeout=5m")
    assert operator not in shell(f"kubectl get pods -n {HOME} -l app.kubernetes.io/component=operator -o name").split()
    shell("""kubectl patch mmd demo --type=merge -p '{"spec": {"dit": {"maxNumSeqs": 3}}}'""")
    eventually(lambda: demo.status["tuning"]["applied"]["ditMaxNumSeqs"] == 3 and demo.status["tuning"]["acked"] == "2/2",
               within_s=SLOW_S, what="the new operator is at work")  # fmt: skip
    assert staying(demo) == before
    shell('mammoth generate --deployment default/demo "a red apple" -o after-upgrade.png --quiet')


def test_an_uninstall_leaves_the_definition_alone(demo, release, shell):
    shell("kubectl delete mmd --all --all-namespaces --timeout=5m")
    shell(f"helm uninstall {release} --namespace {HOME} --wait --timeout 5m")
    crd = "customresourcedefinition.apiextensions.k8s.io/mammothdeployments.mammoth.dev"
    left: set[str] = set()

    def alone() -> bool:
        left.clear()
        left.update(everything(shell) - {crd})
        return not left

    try:
        eventually(alone, within_s=120)
    except AssertionError:
        raise AssertionError(f"an uninstall leaves {sorted(left)}") from None
    assert shell("kubectl get crd -o name").split() == [crd]
    home = shell(f"kubectl get all,leases,configmaps,secrets,serviceaccounts -n {HOME} -o name").split()
    assert set(home) == {"configmap/kube-root-ca.crt", "serviceaccount/default"}
