"""Whole reconciles without a cluster: from what is there follows what to do, and in the end nothing."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from mammoth_operator.decide import Known
from mammoth_operator.podfacts import Failure
from mammoth_operator.tuning.samples import Ask, Observed, Sample


def kinds(world):
    return sorted({(child.kind, child.name) for child in world.children.values() if child.kind != "Pod"})


def test_a_new_deployment_settles_and_then_costs_nothing(world):
    world.settle()
    assert world.condition("Ready") == ("True", "Available")
    assert world.events == ["Created", "ModelResolved", "RolloutCompleted"]
    decision = world.decide()
    assert (decision.applies, decision.scales, decision.deletes, decision.limits, decision.finalizers) == (
        (),
        (),
        (),
        (),
        None,
    )
    assert dict(decision.status) == world.status


def test_an_edit_of_caps_touches_the_config_map_and_the_pods_alone(world):
    world.settle()
    world.edit(dit={"maxNumSeqs": 2, "requestBatchMaxWaitMs": 5})
    decision = world.step()
    assert [manifest["kind"] for manifest in decision.applies] == ["ConfigMap"]
    decision = world.step()
    assert {call.pod.pod.pool for call in decision.limits} <= {"ar", "dit"}
    world.settle()
    assert world.status["tuning"]["epoch"] == 2
    assert world.status["tuning"]["acked"] == "2/2"


def test_an_edit_of_an_image_rolls_and_leaves_only_the_new(world):
    world.settle()
    old = world.status["targetRevision"]
    world.edit(dit={"image": "dit:2"})
    world.settle()
    new = world.status["targetRevision"]
    assert new != old
    assert [name for kind, name in kinds(world) if kind == "Deployment"] == [f"demo-ar-{new}", f"demo-dit-{new}"]
    assert {entry["hash"]: entry["outcome"] for entry in world.status["revisions"]} == {old: "ready", new: "ready"}


@pytest.mark.parametrize(
    "edit",
    [
        {"rollout": {"maxSurge": 2}},
        {"tuning": {"mode": "Off"}},
        {"revisionHistoryLimit": 3},
        {"endpoint": {"port": 80}},
    ],
    ids=str,
)
def test_what_makes_no_pods_rolls_nothing(world, edit):
    world.settle()
    revision, pods = world.status["targetRevision"], {child.uid for child in world.children.values() if child.pod}
    world.edit(**edit)
    world.settle()
    assert world.status["targetRevision"] == revision
    assert {child.uid for child in world.children.values() if child.pod} == pods


def test_a_stalled_rollout_goes_back_and_stays_back(world):
    world.settle()
    good = world.status["targetRevision"]
    world.pods_come = False
    world.edit(dit={"image": "dit:bad"}, rollout={"progressDeadlineSeconds": 60})
    for _ in range(4):
        world.step()
    bad = world.status["targetRevision"]
    assert bad != good
    world.now += timedelta(seconds=61)
    world.step()
    assert world.condition("Progressing") == ("False", "DeadlineExceeded")
    world.settle()
    assert world.status["targetRevision"] == good
    assert world.condition("Progressing") == ("False", "RolledBack")
    assert world.condition("Ready")[0] == "True"
    assert "RolledBack" in world.events


def test_a_pinned_revision_wins_over_the_spec(world):
    world.settle()
    old = world.status["targetRevision"]
    world.edit(dit={"image": "dit:2"})
    world.settle()
    world.annotations["mammoth.dev/revision"] = old
    world.settle()
    assert world.status["targetRevision"] == old


def test_a_lost_status_is_made_again_from_the_children(world):
    world.settle()
    before, world.status = world.status, {}
    world.settle()
    for volatile in ("conditions", "rollout"):
        before.pop(volatile)
    assert {key: world.status[key] for key in before} == before


def test_old_records_beyond_the_limit_are_forgotten(world):
    world.edit(revisionHistoryLimit=2)
    world.settle()
    for number in range(5):
        world.edit(dit={"image": f"dit:{number + 10}"})
        world.settle()
    assert len([name for kind, name in kinds(world) if kind == "ControllerRevision"]) == 3


def test_paused_decides_no_write_but_status(world):
    world.settle()
    world.edit(paused=True, dit={"image": "dit:2"})
    decision = world.step()
    assert (decision.applies, decision.scales, decision.deletes, decision.limits) == ((), (), (), ())
    assert world.condition("Ready") == ("False", "Paused")


def test_the_finalizer_is_there_only_while_work_can_be_lost(world):
    world.pods_come = False
    for _ in range(3):
        world.step()
    assert world.finalizers == ()
    world.pods_come = True
    for child in list(world.children.values()):
        if child.pod:
            world.children["Pod", child.name] = replace(child, pod=replace(child.pod, ready=True))
    world.settle()
    assert world.finalizers == ("mammoth.dev/drain",)
    world.edit(ar={"replicas": 0})
    world.settle()
    assert world.finalizers == ()


def test_a_deletion_empties_ar_first_and_then_lets_go(world):
    world.settle()
    world.leaving_since = "2026-12-01T12:00:00+00:00"
    decision = world.decide()
    assert [(child.labels["mammoth.dev/pool"], count) for child, count in decision.scales] == [("ar", 0)]
    assert [child.name for child in decision.deletes] == ["demo"]
    assert decision.finalizers is None
    world.step()
    assert world.condition("Ready") == ("False", "Deleting")
    assert world.decide().finalizers == ()


def test_a_deletion_ends_at_its_deadline_whatever_the_pods_do(world):
    world.settle()
    world.leaving_since = world.now.isoformat()
    world.now += timedelta(seconds=120 + 30 + 15)
    assert world.decide().finalizers == ()


def test_draining_on_request_stops_ar_then_dit_and_comes_back(world):
    world.settle()
    world.annotations["mammoth.dev/drain"] = "true"
    world.settle()
    assert not [child for child in world.children.values() if child.pod]
    assert world.condition("Ready") == ("False", "Draining")
    del world.annotations["mammoth.dev/drain"]
    world.settle()
    assert world.condition("Ready")[0] == "True"


def test_what_others_hold_is_refused_and_told_once(world):
    world.known = Known(foreign=("Service demo",))
    first, second = world.step(), world.step()
    assert world.condition("Accepted") == ("False", "NameTaken")
    assert (len(first.events), len(second.events)) == (1, 0)
    assert not world.children


def test_a_label_alone_makes_nothing_ours(world):
    world.settle()
    theirs = replace(world.children["Service", "demo"], name="theirs", owner_uid="somebody", uid="x")
    world.children["Service", "theirs"] = theirs
    assert theirs not in world.decide().deletes


def test_a_changed_child_is_restored_and_told(world):
    world.settle()
    world.children["Service", "demo"] = replace(world.children["Service", "demo"], owned="changed")
    decision = world.step()
    assert [manifest["metadata"]["name"] for manifest in decision.applies] == ["demo"]
    assert world.events[-1] == "DriftCorrected"
    assert decision.drifted == 1


def test_the_epoch_never_falls_when_the_config_map_is_lost(world):
    world.settle()
    for cap in (2, 3, 4):
        world.edit(dit={"maxNumSeqs": cap})
        world.settle()
    del world.children["ConfigMap", "demo"]
    world.status = {}
    world.settle()
    assert world.status["tuning"]["epoch"] >= 4


def kill(world, pool, time="2026-12-01T11:30:00Z"):
    """Let a pod of the pool have been killed for its memory, and serve again."""
    pod = next(child for child in world.children.values() if child.pod and child.pod.pool == pool)
    failure = Failure(time, "OOMKilled", "exit code 137")
    world.children["Pod", pod.name] = replace(pod, pod=replace(pod.pod, failure=failure))


def test_a_pod_that_is_killed_for_its_memory_halves_the_cap_of_its_pool(world):
    world.settle()
    kill(world, "dit")
    world.settle()
    assert world.status["tuning"]["applied"] == {"arMaxNumSeqs": 32, "ditMaxNumSeqs": 4, "requestBatchMaxWaitMs": 20}
    assert world.status["tuning"]["acked"] == "2/2"
    assert world.events[-2:] == ["OutOfMemory", "TuningApplied"]
    assert len({name for name, _ in world.situation.seen}) == 2, "no new revision"
    world.edit(dit={"maxNumSeqs": 6})
    world.settle()
    assert world.status["tuning"]["applied"]["ditMaxNumSeqs"] == 6, "who asks anew is trusted"
    assert world.events.count("OutOfMemory") == 1


def test_a_pod_that_dies_before_its_revision_ever_served_says_nothing_of_batches(world):
    world.proves = False
    world.step()
    kill(world, "ar")
    world.step()
    assert world.status["tuning"]["applied"]["arMaxNumSeqs"] == 32
    assert "memoryCeilings" not in world.status


def test_a_promise_that_is_missed_by_far_is_told_until_it_is_kept_again(world):
    world.edit(tuning={"sloClasses": [{"name": "all", "p95Seconds": 5}]})
    world.settle()
    now_s = world.now.timestamp()

    def ended(latency_s: float) -> Known:
        ask = Ask(now_s - 60.0 - latency_s, 512, 512, 50)
        return Known(observed=Observed(tuple(Sample(ask, done_s=now_s - 60.0) for _ in range(30))))

    world.known = ended(9.0)
    world.step()
    assert world.condition("Degraded") == ("True", "SLOBurning")
    assert world.condition("Ready") == ("True", "Available")
    assert world.status["phase"] == "Degraded"
    world.known = ended(1.0)
    world.step()
    assert world.condition("Degraded") == ("False", "AsExpected")
