"""Decisions as tables: what is wrong with a pod, whom a shrinking pool loses, when a change back is a fight, overrides, quantities."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from mammoth_operator.ceilings import Ceiling, learned, stored, within
from mammoth_operator.drift import fight
from mammoth_operator.errors import Conflict, Forbidden, Leaving, Missing, PermanentError, TransientError, error_of
from mammoth_operator.limits import Caps, epoch_of, from_data
from mammoth_operator.observed import Child, owned_digest, sent_digest
from mammoth_operator.overrides import override_faults
from mammoth_operator.podfacts import Failure, PodFacts, pod_facts, why_refused
from mammoth_operator.quantities import canonical, cores
from mammoth_operator.reports import Load
from mammoth_operator.scaling import Shrink, shrink

NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)


def pod(name, *, ready=True, draining_s=None):
    since = "" if draining_s is None else (NOW - timedelta(seconds=draining_s)).isoformat()
    return Child("Pod", "s", name, name, 1, {}, pod=PodFacts("dit", "r", "ip", ready, False, "n", since, None, None))


def load(work):
    return Load(work, 0, 1, 8, 20.0, True)


@pytest.mark.parametrize(
    ("current", "wanted", "pods", "loads", "step"),
    [
        pytest.param(2, 2, [pod("a"), pod("b")], {}, Shrink(2), id="nothing-to-do"),
        pytest.param(1, 3, [pod("a")], {}, Shrink(3), id="growing-is-at-once"),
        pytest.param(2, 1, [pod("a"), pod("b")], {"a": load(3), "b": load(0)}, Shrink(2, ("b",), waiting=True), id="the-idle-one"),
        pytest.param(2, 1, [pod("a"), pod("b")], {"a": load(3), "b": load(2)}, Shrink(2, ("b",), waiting=True), id="the-least-loaded"),
        pytest.param(2, 1, [pod("a"), pod("b", ready=False)], {"a": load(0)}, Shrink(1), id="one-that-serves-nobody-goes-at-once"),
        pytest.param(2, 1, [pod("a"), pod("b", draining_s=5)], {"b": load(1)}, Shrink(2, waiting=True), id="still-at-work"),
        pytest.param(2, 1, [pod("a"), pod("b", draining_s=5)], {"b": load(0)}, Shrink(1), id="done"),
        pytest.param(2, 1, [pod("a"), pod("b", draining_s=89)], {"b": load(1)}, Shrink(2, waiting=True), id="all-of-its-time"),
        pytest.param(2, 1, [pod("a"), pod("b", draining_s=90)], {"b": load(1)}, Shrink(1), id="the-rest-is-sigterms"),
        pytest.param(2, 1, [pod("a"), pod("b", draining_s=5)], {}, Shrink(1), id="no-answer-no-wait"),
        pytest.param(3, 1, [pod("a"), pod("b"), pod("c", draining_s=1)], {"a": load(0), "b": load(9), "c": load(1)},
                     Shrink(3, ("a",), waiting=True), id="one-more"),
        pytest.param(2, 2, [pod("a"), pod("b", draining_s=5)], {"b": load(0)}, Shrink(2, delete=("b",)), id="kept-after-all-is-replaced"),
        pytest.param(2, 0, [pod("a"), pod("b")], {}, Shrink(2, ("a", "b"), waiting=True), id="to-zero"),
    ],
)  # fmt: skip
def test_whom_a_pool_loses(current, wanted, pods, loads, step):
    assert shrink(current, wanted, pods, loads, NOW, 90) == step


def killed(ago_s, *, reason="OOMKilled", revision="r"):
    time = (NOW - timedelta(seconds=ago_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    facts = PodFacts("dit", revision, "ip", True, False, "n", "", None, Failure(time, reason, "exit code 137"))
    return Child("Pod", "s", "p", "p", 1, {}, pod=facts)


def ceiling(limit, ago_s, *, asked=8, revision="r"):
    return Ceiling("dit", limit, asked, revision, (NOW - timedelta(seconds=ago_s)).strftime("%Y-%m-%dT%H:%M:%SZ"), "p")


@pytest.mark.parametrize(
    ("known", "pods", "limit"),
    [
        pytest.param(None, [pod("a")], None, id="peace"),
        pytest.param(None, [killed(100)], 4, id="halved"),
        pytest.param(ceiling(4, 100), [killed(100)], 4, id="the-same-kill-counts-once"),
        pytest.param(ceiling(4, 100), [killed(80)], 4, id="one-burst-counts-once"),
        pytest.param(ceiling(4, 100), [killed(60)], 2, id="again-halves-again"),
        pytest.param(ceiling(1, 100), [killed(60)], 1, id="never-below-one"),
        pytest.param(None, [killed(100, reason="Error")], None, id="another-end"),
        pytest.param(None, [killed(100, revision="old")], None, id="another-revision"),
        pytest.param(ceiling(4, 100, asked=6), [killed(100)], 8, id="another-cap-was-asked-for"),
        pytest.param(ceiling(2, 100, revision="old"), [], 8, id="another-revision-runs"),
        pytest.param(ceiling(4, 100, asked=6), [killed(10)], 4, id="and-that-was-too-much-too"),
    ],
)
def test_what_a_kill_for_memory_teaches(known, pods, limit):
    found = learned({"dit": known} if known else {}, Caps(32, 8, 20.0), "r", pods)
    assert (found["dit"].max_num_seqs if "dit" in found else None) == limit
    assert within(Caps(32, 8, 20.0), found) == Caps(32, limit or 8, 20.0)
    assert stored([entry.status() for entry in found.values()]) == found


def times(*ago_s):
    return [(NOW - timedelta(seconds=ago)).strftime("%Y-%m-%dT%H:%M:%SZ") for ago in ago_s]


@pytest.mark.parametrize(
    ("names", "recorded", "number", "fought", "hold"),
    [
        pytest.param([], [], 0, False, False, id="peace"),
        pytest.param(["x"], [], 1, False, False, id="once"),
        pytest.param(["x"], times(50, 40, 30, 20), 5, False, False, id="the-fifth-is-corrected"),
        pytest.param(["x"], times(50, 40, 30, 20, 10), 6, True, False, id="the-sixth-is-corrected-and-reported"),
        pytest.param(["x"], times(60, 50, 40, 30, 20, 10), 6, True, True, id="then-slowly"),
        pytest.param(["x"], times(400, 300, 200, 150, 100, 61), 6, True, False, id="once-a-minute"),
        pytest.param(["x"], times(900, 800, 700, 650, 620, 610), 1, False, False, id="old-ones-are-forgotten"),
        pytest.param([], times(60, 50, 40, 30, 20, 10), 6, True, False, id="it-stays-said"),
    ],
)
def test_when_corrections_are_a_fight(names, recorded, number, fought, hold):
    found = fight(names, recorded, NOW)
    assert (len(found.times), found.fought, found.hold) == (number, fought, hold)


CAPS = Caps(32, 8, 20.0)


@pytest.mark.parametrize(
    ("stored", "reported", "epoch"),
    [
        pytest.param(None, [], 1, id="first"),
        pytest.param((CAPS, 3), [], 3, id="unchanged"),
        pytest.param((replace(CAPS, dit_max_num_seqs=1), 3), [], 4, id="edited"),
        pytest.param((replace(CAPS, dit_max_num_seqs=1), 3), [7], 8, id="pods-know-more"),
        pytest.param(None, [5], 6, id="config-map-lost"),
        pytest.param((CAPS, 3), [9], 9, id="config-map-set-back"),
    ],
)
def test_the_epoch_only_rises(stored, reported, epoch):
    assert epoch_of(CAPS, stored, reported) == epoch


def test_caps_survive_the_config_map():
    assert from_data({**CAPS.data(), "epoch": "4"}) == (CAPS, 4)
    assert from_data({"epoch": "4"}) is None


def raw_pod(**status):
    return {
        "metadata": {"labels": {"mammoth.dev/pool": "dit", "mammoth.dev/revision": "r"}},
        "spec": {},
        "status": status,
    }


def container(**fields):
    return {"containerStatuses": [{"name": "dit", "image": "dit:1", **fields}]}


ENDED = {
    "exitCode": 2,
    "reason": "Error",
    "message": "--precision: 'fp8' is not one of bf16",
    "finishedAt": "2026-12-01T11:00:00Z",
}
UNSCHEDULED = {
    "type": "PodScheduled",
    "status": "False",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [
        pytest.param({}, "Loading", "being made", id="new"),
        pytest.param(
            {"phase": "Running", **container(state={"running": {}})}, "Loading", "model is loading", id="loading"
        ),
        pytest.param(
            {"phase": "Running", **container(state={"running": {}}, started=True, ready=False)},
            "ProbeFailing",
            "does not serve",
            id="probe",
        ),
        pytest.param({"conditions": [UNSCHEDULED]}, "Unschedulable", "capacity: 0/3", id="no-gpu"),
        pytest.param(
            {"conditions": [{**UNSCHEDULED, "message": "3 node(s) had untolerated taint {a: b}"}]},
            "Unschedulable",
            "taint: 3",
            id="taint",
        ),
        pytest.param(
            container(state={"waiting": {"reason": "ImagePullBackOff", "message": "no such tag"}}),
            "ImagePullFailed",
            "no such tag",
            id="image",
        ),
        pytest.param(
            container(state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState={"terminated": ENDED}),
            "PodsCrashing",
            "fp8",
            id="crash",
        ),
        pytest.param(
            container(state={"terminated": {**ENDED, "reason": "OOMKilled", "exitCode": 137}}),
            "OutOfMemory",
            "137",
            id="oom",
        ),
        pytest.param(
            {"initContainerStatuses": [{"name": "download", "state": {"terminated": ENDED}}]},
            "DownloadFailed",
            "exit code 2",
            id="download",
        ),
        pytest.param(
            {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no healthy devices"},
            "GpuFault",
            "no healthy",
            id="gpu",
        ),
        pytest.param(
            container(state={"waiting": {"reason": "CreateContainerConfigError", "message": "no secret"}}),
            "PodsCrashing",
            "no secret",
            id="config",
        ),
    ],
)
def test_what_is_wrong_with_a_pod(status, reason, said):
    problem = pod_facts(raw_pod(**status)).problem
    assert problem.reason == reason
    assert said in problem.message


def test_the_last_failure_of_a_pod_is_kept():
    failure = pod_facts(raw_pod(**container(state={"running": {}}, lastState={"terminated": ENDED}))).failure
    assert (failure.reason, failure.time) == ("Error", "2026-12-01T11:00:00Z")
    assert "fp8" in failure.message


def test_a_quota_is_told_from_other_refusals():
    assert why_refused('pods "x" is forbidden: exceeded quota: gpus').reason == "QuotaExceeded"
    assert why_refused("violates PodSecurity").reason == "PodsRefused"


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        ({"labels": {"team": "a"}, "env": [{"name": "X", "value": "1"}], "securityContext": {"fsGroup": 1}}, None),
        (
            {
                "volumes": [{"name": "v", "configMap": {"name": "c"}}],
                "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            },
            None,
        ),
        ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "o.volumes[0].hostPath"),
        ({"hostNetwork": True}, "o.hostNetwork"),
        ({"hostPID": True}, "o.hostPID"),
        ({"serviceAccountName": "x"}, "o.serviceAccountName"),
        ({"namespace": "other"}, "o.namespace"),
        ({"securityContext": {"privileged": True}}, "o.securityContext.privileged"),
        ({"securityContext": {"runAsUser": 0}}, "o.securityContext.runAsUser"),
        ({"labels": {"app.kubernetes.io/name": "x"}}, "o.labels.app.kubernetes.io/name"),
        ({"annotations": {"x": 1}}, "o.annotations"),
        ({"env": {"X": "1"}}, "o.env"),
        ({"env": [{"name": "MAMMOTH_HOST", "value": "x"}]}, "o.env[0].name"),
    ],
)
def test_what_pods_may_be_given(overrides, fault):
    found = [field for field, _ in override_faults(overrides, "o")]
    assert found == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("1024Mi", "1Gi"),
        ("8Gi", "8Gi"),
        ("0.5", "500m"),
        ("4", "4"),
        ("1000m", "1"),
        ("1500m", "1500m"),
        ("2000", "2k"),
        ("0", "0"),
        ("1.5Gi", "1536Mi"),
        ("64Mi", "64Mi"),
        ("100M", "100M"),
    ],
)
def test_quantities_are_written_as_the_api_server_does(text, written):
    assert canonical(text) == written


@pytest.mark.parametrize(("text", "number"), [("4", 4), ("500m", 1), ("1500m", 2), ("2.5", 3), ("0", 1)])
def test_how_many_threads_a_container_is_worth(text, number):
    assert cores(text) == number


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (409, {}, Conflict), (429, {}, TransientError), (500, {}, TransientError), (503, {}, TransientError), (401, {}, TransientError),
        (404, {}, Missing), (403, {}, Forbidden), (422, {}, PermanentError), (400, {}, PermanentError),
        (403, {"details": {"causes": [{"reason": "NamespaceTerminating"}]}}, Leaving),
    ],
)  # fmt: skip
def test_failures_are_typed(status, body, kind):
    assert type(error_of(status, body, None)) is kind


def test_retry_after_is_heard():
    assert error_of(429, {}, "7").retry_after_s == 7.0


def test_only_what_we_own_counts_as_changed():
    manifest = {
        "kind": "Service",
        "metadata": {"name": "a", "labels": {"x": "1"}},
        "spec": {"ports": [{"port": 1, "protocol": "TCP", "name": "g"}]},
    }
    fields = {
        "f:metadata": {"f:labels": {"f:x": {}}},
        "f:spec": {
            "f:ports": {'k:{"port":1,"protocol":"TCP"}': {".": {}, "f:port": {}, "f:protocol": {}, "f:name": {}}}
        },
    }
    live = {
        "kind": "Service",
        "metadata": {
            "name": "a",
            "labels": {"x": "1", "theirs": "y"},
            "managedFields": [{"manager": "mammoth-operator", "operation": "Apply", "fieldsV1": fields}],
        },
        "spec": {
            "clusterIP": "10.0.0.1",
            "ports": [{"port": 9, "protocol": "TCP"}, {"port": 1, "protocol": "TCP", "name": "g", "targetPort": 1}],
        },
    }
    assert owned_digest(live) == sent_digest(manifest)
    live["spec"]["ports"][1]["name"] = "changed"
    assert owned_digest(live) != sent_digest(manifest)
