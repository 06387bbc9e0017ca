"""Rows 1 to 12 of the operator's behaviours (platform.md 3.3) on a real API server; the test plays kubelet."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
from playing.api import always, eventually
from playing.kubelet import add_node


@contextmanager
def watched(pipeline, **least):
    """Fail when a pool ever has fewer available pods than promised."""
    low: list[str] = []
    over = threading.Event()

    def look():
        while not over.wait(0.05):
            for pool, promised in least.items():
                found = pipeline.available(pool)
                if found < promised:
                    low.append(f"{pool} {found}")

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not low


def hash_of(pipeline) -> str:
    return pipeline.status["targetRevision"]


def test_row_1_create_makes_every_child_and_tells_it_in_order(operator, pipeline):
    pipeline.create(dit={"replicas": 2}).ready()
    revision = hash_of(pipeline)
    assert set(pipeline.children("ServiceAccount")) == {"demo"}
    assert pipeline.children("ConfigMap")["demo"]["data"]["dit.max-num-seqs"] == "8"
    assert set(pipeline.children("Service")) == {"demo", f"demo-dit-{revision}"}
    assert pipeline.children("Service")[f"demo-dit-{revision}"]["spec"]["clusterIP"] == "None"
    assert set(pipeline.children("Deployment")) == {f"demo-ar-{revision}", f"demo-dit-{revision}"}
    assert set(pipeline.children("PodDisruptionBudget")) == {"demo-dit"}
    assert set(pipeline.children("NetworkPolicy")) == {"demo-ar", "demo-dit"}
    assert all(
        item["metadata"]["ownerReferences"][0]["controller"]
        for kind in ("Service", "Deployment", "ConfigMap")
        for item in pipeline.children(kind).values()
    )
    assert eventually(lambda: "RolloutCompleted" in pipeline.events())
    assert pipeline.events() == ["Created", "ModelResolved", "RolloutCompleted"]
    assert pipeline.status["ar"]["summary"], pipeline.status["dit"]["summary"] == ("1/1", "2/2")


def test_row_2_applying_the_same_again_writes_nothing(make_operator, proxy, pipeline):
    make_operator(config=proxy.config).start()
    pipeline.create().ready()
    time.sleep(6)
    before, pods, writes = pipeline.versions(), {pod["metadata"]["uid"] for pod in pipeline.pods()}, len(proxy.writes())
    pipeline.edit(dit={"replicas": 1})
    pipeline.annotate(note="touched")
    time.sleep(4)
    assert pipeline.versions() == before
    assert {pod["metadata"]["uid"] for pod in pipeline.pods()} == pods
    assert proxy.writes()[writes:] == []


def test_row_3_live_caps_reach_every_pod_and_restart_none(operator, pipeline, kubelet):
    pipeline.create(ar={"replicas": 2}, dit={"replicas": 2}).ready()
    pods, before, start = pipeline.pods(), pipeline.versions(), time.monotonic()
    epoch = pipeline.status["tuning"]["epoch"]
    pipeline.edit(dit={"maxNumSeqs": 3, "requestBatchMaxWaitMs": 75}, ar={"maxNumSeqs": 16})
    eventually(lambda: (s := pipeline.status["tuning"])["acked"] == "4/4" and s["epoch"] == epoch + 1, within_s=10)
    assert time.monotonic() - start < 10
    limits = {kubelet.of(pod).stage: kubelet.of(pod).limits for pod in pods}
    assert (limits["dit"].max_num_seqs, limits["dit"].wait_ms, limits["ar"].max_num_seqs) == (3, 75.0, 16)
    changed = {key for key, version in pipeline.versions().items() if before[key] != version}
    assert changed == {("ConfigMap", "demo")}
    assert {pod["metadata"]["uid"] for pod in pipeline.pods()} == {pod["metadata"]["uid"] for pod in pods}
    pipeline.edit(dit={"replicas": 3})
    eventually(lambda: pipeline.status["tuning"]["acked"] == "5/5")
    assert all(kubelet.of(pod).limits.max_num_seqs == 3 for pod in pipeline.pods("dit"))
    assert "TuningApplied" in pipeline.events()


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param({"dit": {"image": "mammoth-dit:2"}}, id="image"),
        pytest.param({"model": {"source": {"path": "/models/other"}}}, id="model"),
        pytest.param({"ar": {"capacity": {"maxNumSeqs": 16}}}, id="capacity"),
        pytest.param({"dit": {"accelerator": {"count": 2}}}, id="accelerator"),
    ],
)
def test_row_4_what_makes_pods_rolls_the_pair(operator, pipeline, edit):
    pipeline.create().ready()
    old = hash_of(pipeline)
    with watched(pipeline, ar=1, dit=1):
        pipeline.edit(**edit)
        eventually(lambda: hash_of(pipeline) != old)
        pipeline.ready()
    new = hash_of(pipeline)
    eventually(lambda: set(pipeline.children("Deployment")) == {f"demo-ar-{new}", f"demo-dit-{new}"})
    assert pipeline.children("Service")["demo"]["spec"]["selector"]["mammoth.dev/revision"] == new
    made = {
        name: item["metadata"]["creationTimestamp"] for name, item in pipeline.children("ControllerRevision").items()
    }
    assert set(made) == {f"demo-{old}", f"demo-{new}"}
    assert [event for event in pipeline.events() if event.startswith("Rollout")][-2:] == [
        "RolloutStarted",
        "RolloutCompleted",
    ]


def test_row_5_scaling_changes_replicas_alone_and_spares_the_pod_at_work(operator, pipeline, kubelet):
    pipeline.create(dit={"replicas": 3}).ready()
    revision = hash_of(pipeline)
    busy = pipeline.pods("dit")[1]
    kubelet.of(busy).in_flight = 4
    pipeline.edit(dit={"replicas": 1})
    eventually(lambda: len(pipeline.pods("dit")) == 1)
    pipeline.ready()
    assert pipeline.pods("dit")[0]["metadata"]["uid"] == busy["metadata"]["uid"]
    assert hash_of(pipeline) == revision
    assert "Scaled" in pipeline.events()


def test_row_5_a_pod_at_work_is_drained_before_it_goes(operator, pipeline, kubelet):
    pipeline.create(dit={"replicas": 2}).ready()
    for pod in pipeline.pods("dit"):
        kubelet.of(pod).in_flight = 1
    pipeline.edit(dit={"replicas": 1})
    eventually(
        lambda: any(
            "mammoth.dev/draining-since" in pod["metadata"].get("annotations", {}) for pod in pipeline.pods("dit")
        )
    )
    always(lambda: len(pipeline.pods("dit")) == 2, for_s=3, what="nobody goes while it works")
    [marked] = [
        pod for pod in pipeline.pods("dit") if "mammoth.dev/draining-since" in pod["metadata"].get("annotations", {})
    ]
    kubelet.of(marked).in_flight = 0
    eventually(lambda: len(pipeline.pods("dit")) == 1)
    assert pipeline.pods("dit")[0]["metadata"]["uid"] != marked["metadata"]["uid"]


def test_row_6_what_was_changed_by_hand_is_restored(operator, pipeline, api):
    pipeline.create().ready()
    name = f"demo-dit-{hash_of(pipeline)}"
    api.merge("Deployment", pipeline.namespace, name, {"spec": {"minReadySeconds": 0, "progressDeadlineSeconds": 77}})
    eventually(lambda: pipeline.children("Deployment")[name]["spec"]["progressDeadlineSeconds"] == 1800)
    api.delete("Service", pipeline.namespace, "demo")
    eventually(lambda: "demo" in pipeline.children("Service"))
    api.merge("ConfigMap", pipeline.namespace, "demo", {"data": {"epoch": "999", "dit.max-num-seqs": "1"}})
    eventually(lambda: pipeline.children("ConfigMap")["demo"]["data"]["dit.max-num-seqs"] == "8")
    assert eventually(lambda: pipeline.events().count("DriftCorrected") >= 2)


def test_row_6_the_sixth_fight_in_ten_minutes_is_reported(operator, pipeline, api):
    def change(port: int) -> None:
        ports = [{"name": "grpc", "port": port, "targetPort": "grpc"}]
        api.merge("Service", pipeline.namespace, "demo", {"spec": {"ports": ports}})

    def port() -> int:
        return pipeline.children("Service")["demo"]["spec"]["ports"][0]["port"]

    pipeline.create().ready()
    for fights in range(1, 7):
        assert pipeline.has("Degraded", "False")
        change(6000 + fights)
        eventually(lambda number=fights: len(pipeline.status.get("drift", {}).get("times", ())) == number)
        assert port() == 50051
    assert "6 times" in pipeline.until("Degraded", "True", "DriftFought")["message"]
    change(7000)
    always(lambda: port() == 7000, for_s=4, what="slowed down")


def test_row_7_child_replicas_set_by_hand_are_restored(operator, pipeline, api):
    pipeline.create().ready()
    name = f"demo-dit-{hash_of(pipeline)}"
    api.merge("Deployment", pipeline.namespace, name, {"spec": {"replicas": 3}}, sub="/scale")
    eventually(lambda: pipeline.children("Deployment")[name]["spec"]["replicas"] == 1)
    eventually(lambda: len(pipeline.pods("dit")) == 1)
    pipeline.ready()


def test_row_8_a_revert_in_mid_rollout_keeps_the_promise(operator, pipeline, fate):
    fate(start_s=0.8)
    pipeline.create(ar={"replicas": 2}, dit={"replicas": 2}).ready()
    old = hash_of(pipeline)
    with watched(pipeline, ar=2, dit=2):
        pipeline.edit(dit={"image": "mammoth-dit:2"})
        eventually(lambda: len(pipeline.children("Deployment")) == 4)
        eventually(lambda: pipeline.available("dit") == 3)
        pipeline.edit(dit={"image": "mammoth-dit:1"})
        eventually(lambda: hash_of(pipeline) == old)
        pipeline.ready()
    eventually(lambda: set(pipeline.children("Deployment")) == {f"demo-ar-{old}", f"demo-dit-{old}"})


def test_row_9_three_edits_in_ten_seconds_converge_on_the_last(operator, pipeline, fate):
    fate(start_s=0.8)
    pipeline.create(ar={"replicas": 2}, dit={"replicas": 2}).ready()
    with watched(pipeline, ar=2, dit=2):
        for tag in (2, 3, 4):
            pipeline.edit(dit={"image": f"mammoth-dit:{tag}"}, ar={"image": f"mammoth-ar:{tag}"})
            time.sleep(2.5)
        pipeline.ready(within_s=60)
    images = {
        pod["spec"]["containers"][0]["image"] for pod in pipeline.pods() if "deletionTimestamp" not in pod["metadata"]
    }
    assert images == {"mammoth-dit:4", "mammoth-ar:4"}


def test_row_10_a_rollout_without_progress_goes_back_by_itself(operator, pipeline, fate):
    fate("loading", image="mammoth-dit:bad")
    pipeline.create(rollout={"progressDeadlineSeconds": 10}).ready()
    good = hash_of(pipeline)
    with watched(pipeline, ar=1, dit=1):
        pipeline.edit(dit={"image": "mammoth-dit:bad"})
        eventually(lambda: hash_of(pipeline) != good)
        bad = hash_of(pipeline)
        eventually(lambda: hash_of(pipeline) == good, within_s=60, what="rolled back")
        pipeline.until("Progressing", "False", "RolledBack")
    assert pipeline.has("Ready", "True")
    assert "RolledBack" in pipeline.events()
    assert {item["hash"]: item.get("outcome") for item in pipeline.status["revisions"]} == {
        good: "ready",
        bad: "failed",
    }
    pipeline.edit(dit={"image": "mammoth-dit:2"})
    eventually(lambda: hash_of(pipeline) not in (good, bad))
    pipeline.ready()


def test_row_10_without_auto_rollback_the_stall_is_said(operator, pipeline, fate):
    fate("loading", image="mammoth-dit:bad")
    pipeline.create(rollout={"progressDeadlineSeconds": 10, "autoRollback": False}).ready()
    pipeline.edit(dit={"image": "mammoth-dit:bad"})
    assert (
        "waiting for the first dit pod"
        in pipeline.until("Progressing", "False", "DeadlineExceeded", within_s=60)["message"]
    )


def test_row_11_a_revision_can_be_pinned_by_hand(operator, pipeline):
    pipeline.create().ready()
    old = hash_of(pipeline)
    pipeline.edit(dit={"image": "mammoth-dit:2"})
    eventually(lambda: hash_of(pipeline) != old)
    pipeline.ready()
    new = hash_of(pipeline)
    pipeline.annotate(revision=old)
    eventually(lambda: hash_of(pipeline) == old)
    pipeline.ready()
    assert pipeline.pods("dit", revision=old)
    assert "pinned" in pipeline.condition("Progressing")["message"]
    assert {item["hash"] for item in pipeline.status["revisions"]} == {old, new}
    pipeline.annotate(revision=None)
    eventually(lambda: hash_of(pipeline) == new)
    pipeline.ready()


def test_row_12_on_a_full_cluster_one_is_drained_then_replaced(operator, pipeline, api):
    add_node(api, "full-0", gpus=4)
    where = {"nodePool": {"nodeSelector": {"kubernetes.io/hostname": "full-0"}}}
    full = {"maxSurge": 0, "maxUnavailable": 1}
    pipeline.create(ar={"replicas": 2, **where}, dit={"replicas": 2, **where}, rollout=full).ready()
    old = hash_of(pipeline)
    with watched(pipeline, ar=1, dit=1):
        pipeline.edit(dit={"image": "mammoth-dit:2"})
        eventually(lambda: hash_of(pipeline) != old)
        pipeline.ready(within_s=60)


@pytest.mark.parametrize(
    ("node", "dit", "word"),
    [
        pytest.param({"name": "tiny-0", "gpus": 1}, {"accelerator": {"count": 2}}, "capacity", id="capacity"),
        pytest.param({"name": "taken-0", "gpus": 8, "taint": True}, {}, "taint", id="taint"),
        pytest.param(None, {}, "node selection", id="selector"),
    ],
)
def test_row_12_why_pods_are_pending_is_said(operator, pipeline, api, node, dit, word):
    name = node["name"] if node else "nowhere"
    if node:
        add_node(api, **node)
    pipeline.create(dit={**dit, "nodePool": {"nodeSelector": {"kubernetes.io/hostname": name}}})
    assert word in pipeline.until("DiffusionReady", "False", "Unschedulable")["message"]
    assert word in pipeline.until("Ready", "False", "InsufficientCapacity")["message"]
    assert word in pipeline.status["dit"]["blockedReason"]


def test_row_12_a_quota_is_named_as_such(operator, pipeline, api):
    api.create(
        "ResourceQuota",
        pipeline.namespace,
        {"metadata": {"name": "gpus"}, "spec": {"hard": {"requests.nvidia.com/gpu": "1"}}},
    )
    eventually(lambda: api.get("ResourceQuota", pipeline.namespace, "gpus")["status"].get("hard"))
    pipeline.create()
    message = eventually(
        lambda: next(
            (item["message"] for item in pipeline.status.get("conditions", ()) if item["reason"] == "QuotaExceeded"), ""
        )
    )
    assert "quota" in message
