"""Conditions as a table: what is said first when several things are wrong, and when a transition time moves."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from mammoth_operator.conditions import Condition, View, conditions, merged, phase
from mammoth_operator.podfacts import Problem
from mammoth_operator.reports import Transport
from mammoth_operator.rollout import ALL, Plan
from mammoth_operator.situation import PoolView

NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)
UP = PoolView(1, 1, 1, 1, 1, 1, 0, 0, None)
DOWN = replace(UP, ready=0, available=0)
DONE = Plan({}, "new", "new is in place", done=True)
GOING = Plan({}, "old", "waiting for the first dit pod of new")
GOOD = View(
    "new",
    {"ar": 1, "dit": 1},
    {"ar": UP, "dit": UP},
    DONE,
    "new",
    True,
    None,
    was_complete=True,
    digests=frozenset({"d"}),
    acked=(2, 2),
)


def down(reason: str, **changes) -> View:
    pools = {"ar": UP, "dit": replace(DOWN, problem=Problem(reason, "said"))}
    return replace(GOOD, pools=pools, plan=GOING, was_complete=False, **changes)


@pytest.mark.parametrize(
    ("view", "kind", "status", "reason"),
    [
        pytest.param(GOOD, "Ready", "True", "Available", id="all-is-well"),
        pytest.param(replace(GOOD, paused=True), "Ready", "False", "Paused", id="paused-comes-first"),
        pytest.param(replace(GOOD, draining=True), "Ready", "False", "Draining", id="draining"),
        pytest.param(down("ImagePullFailed"), "Ready", "False", "ImagePullFailed", id="image"),
        pytest.param(down("OutOfMemory"), "Ready", "False", "PodsCrashing", id="oom-crashes"),
        pytest.param(down("Unschedulable"), "Ready", "False", "InsufficientCapacity", id="no-room"),
        pytest.param(down("QuotaExceeded"), "Ready", "False", "InsufficientCapacity", id="quota"),
        pytest.param(down("DownloadFailed"), "Ready", "False", "ModelUnavailable", id="model"),
        pytest.param(down("Loading"), "Ready", "False", "Progressing", id="loading-is-progress"),
        pytest.param(replace(GOOD, transport=Transport("new", False, "Unreachable", "x")), "Ready", "False", "TransportFailed", id="transport"),
        pytest.param(replace(GOOD, proven=False), "Ready", "False", "Progressing", id="not-yet-proven"),
        pytest.param(replace(GOOD, admitted="old"), "Ready", "False", "Progressing", id="clients-still-reach-the-old"),
        pytest.param(replace(GOOD, admitted=ALL), "Ready", "False", "Progressing", id="clients-reach-both"),
        pytest.param(down("OutOfMemory"), "DiffusionReady", "False", "OutOfMemory", id="pool-says-oom"),
        pytest.param(down("OutOfMemory"), "ConditioningReady", "True", "Available", id="the-other-pool-is-fine"),
        pytest.param(replace(GOOD, transport=Transport("new", False, "VersionMismatch", "x")), "TransportReady", "False", "VersionMismatch", id="contract"),
        pytest.param(replace(GOOD, proven=False), "TransportReady", "Unknown", "NotChecked", id="unchecked"),
        pytest.param(GOOD, "TransportReady", "True", "Proven", id="proven"),
        pytest.param(replace(GOOD, slo_burning="x"), "Degraded", "True", "SLOBurning", id="a-promise-is-missed"),
        pytest.param(replace(GOOD, tuning_reverted="x"), "Degraded", "True", "TuningReverted", id="a-change-was-taken-back"),
        pytest.param(replace(GOOD, slo_burning="x", tuning_reverted="x"), "Degraded", "True", "SLOBurning", id="what-users-see-comes-first"),
        pytest.param(GOOD, "Progressing", "False", "Completed", id="completed"),
        pytest.param(replace(GOOD, plan=GOING, was_complete=False), "Progressing", "True", "RollingOut", id="rolling"),
        pytest.param(replace(GOOD, plan=GOING), "Progressing", "True", "Scaling", id="scaling"),
        pytest.param(replace(GOOD, plan=GOING, stalled=True), "Progressing", "False", "DeadlineExceeded", id="stalled"),
        pytest.param(replace(GOOD, rolled_back_from="bad"), "Progressing", "False", "RolledBack", id="rolled-back"),
        pytest.param(replace(GOOD, plan=GOING, rolled_back_from="bad"), "Progressing", "True", "RollingBack", id="rolling-back"),
        pytest.param(replace(GOOD, pools={"ar": UP, "dit": DOWN}), "Degraded", "True", "PodsLost", id="pods-lost"),
        pytest.param(replace(GOOD, drift_fought="x", pools={"ar": UP, "dit": DOWN}), "Degraded", "True", "DriftFought", id="fight-first"),
        pytest.param(replace(GOOD, scaling_conflict="x"), "Degraded", "True", "ScalingConflict", id="two-writers"),
        pytest.param(GOOD, "Degraded", "False", "AsExpected", id="not-degraded"),
        pytest.param(replace(GOOD, token_missing="x"), "ModelResolved", "False", "TokenMissing", id="token"),
        pytest.param(replace(GOOD, digests=frozenset({"a", "b"})), "ModelResolved", "False", "DigestMismatch", id="two-checkpoints"),
        pytest.param(replace(GOOD, digests=frozenset()), "ModelResolved", "Unknown", "Loading", id="unread"),
        pytest.param(replace(GOOD, tuning=("False", "Off", "spec.tuning.mode is Off")), "TuningActive", "False", "Off", id="tuning-off"),
        pytest.param(replace(GOOD, tuning=("False", "AckMissing", "1 of 2")), "TuningActive", "False", "AckMissing", id="unacknowledged"),
    ],
)  # fmt: skip
def test_what_is_said(view, kind, status, reason):
    found = next(item for item in conditions(view) if item.type == kind)
    assert (found.status, found.reason) == (status, reason)


def test_a_rollout_says_who_serves_meanwhile():
    [ready] = [item for item in conditions(down("Loading", admitted="old")) if item.type == "Ready"]
    assert ready.message == "waiting for the first dit pod of new; until then clients reach old"


@pytest.mark.parametrize(
    ("view", "word"),
    [
        (GOOD, "Ready"), (replace(GOOD, paused=True), "Paused"), (replace(GOOD, scaling_conflict="x"), "Degraded"),
        (replace(GOOD, admitted="old", plan=GOING, was_complete=False), "Updating"), (down("Loading"), "Loading"),
        (replace(down("Unschedulable"), pools={"ar": replace(DOWN, placed=0), "dit": replace(DOWN, placed=0)}), "Pending"),
        (replace(down("Loading"), stalled=True), "Degraded"),
    ],
)  # fmt: skip
def test_one_word_for_it_all(view, word):
    assert phase(view, conditions(view)) == word


def test_a_transition_time_moves_only_with_the_status():
    first = merged(NOW, 1, [Condition("Ready", "False", "A", "a")], [])
    same = merged(NOW + timedelta(60), 2, [Condition("Ready", "False", "B", "b")], first)
    other = merged(NOW + timedelta(60), 2, [Condition("Ready", "True", "C", "c")], same)
    assert same[0]["lastTransitionTime"] == first[0]["lastTransitionTime"]
    assert (same[0]["reason"], same[0]["observedGeneration"]) == ("B", 2)
    assert other[0]["lastTransitionTime"] != first[0]["lastTransitionTime"]


def test_a_message_is_never_too_long_for_the_schema():
    [item] = merged(NOW, 1, [Condition("Ready", "False", "A", "x" * 2000)], [])
    assert len(item["message"]) == 512
