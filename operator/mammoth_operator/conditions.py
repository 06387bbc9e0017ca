"""Decide: the conditions. Each is a list of rules; the first that applies gives status, reason and message.

Reasons are what people search for and what alerts match: they are spelled here alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mammoth_operator.names import POOLS, Pool
from mammoth_operator.podfacts import Problem
from mammoth_operator.reports import Transport
from mammoth_operator.rollout import ALL, Plan
from mammoth_operator.situation import PoolView
from mammoth_operator.status_schema import MESSAGE_MAX_LENGTH

__all__ = ["Condition", "View", "conditions", "merged", "phase", "refused"]

READY_TYPE = {"ar": "ConditioningReady", "dit": "DiffusionReady"}
READY_REASON = {
    "ImagePullFailed": "ImagePullFailed", "PodsCrashing": "PodsCrashing", "OutOfMemory": "PodsCrashing", "GpuFault": "PodsCrashing",
    "DownloadFailed": "ModelUnavailable", "Unschedulable": "InsufficientCapacity", "QuotaExceeded": "InsufficientCapacity",
    "PodsRefused": "InsufficientCapacity",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition as decided now; when it changed last is added by `merged`."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class View:
    """What the conditions depend on. `stalled`: no progress within the deadline; `rolled_back_from`: the revision that failed."""

    target: str
    want: Mapping[Pool, int]
    pools: Mapping[Pool, PoolView]
    plan: Plan
    admitted: str | None
    proven: bool
    transport: Transport | None
    paused: bool = False
    draining: bool = False
    stalled: bool = False
    rolled_back_from: str = ""
    pinned: bool = False
    was_complete: bool = False
    token_missing: str = ""
    digests: frozenset[str] = frozenset()
    scaling_conflict: str = ""
    drift_fought: str = ""
    slo_burning: str = ""
    tuning_reverted: str = ""
    tuning: tuple[str, str, str] = ("False", "NotEnoughData", "no measurements to decide from")
    acked: tuple[int, int] = (0, 0)

    def lacks(self, pool: Pool) -> bool:
        return self.pools[pool].available < self.want[pool]

    @property
    def problems(self) -> list[Problem]:
        """Return what is wrong in pools that lack pods."""
        return [problem for pool in POOLS if self.lacks(pool) and (problem := self.pools[pool].problem)]


def conditions(view: View) -> list[Condition]:
    """Return every condition, in the order in which people read them."""
    return [
        _ready(view),
        Condition("Accepted", "True", "Valid", "the spec is understood"),
        _model(view),
        *(_pool(view, pool) for pool in POOLS),
        _transport(view),
        _progressing(view),
        _degraded(view),
        _tuning(view),
    ]


def refused(reason: str, message: str) -> list[Condition]:
    """Return the conditions of a spec that is not carried out: what runs goes on running, and Ready says why not."""
    return [Condition("Ready", "False", reason, message), Condition("Accepted", "False", reason, message)]


def _ready(view: View) -> Condition:
    def no(reason: str, message: str) -> Condition:
        return Condition("Ready", "False", reason, message)

    if view.paused:
        return no("Paused", "spec.paused is true: owned objects are left as they are")
    if view.draining:
        return no("Draining", "drained on request; take the annotation mammoth.dev/drain away to serve again")
    for problem in view.problems:
        if problem.reason in READY_REASON:
            return no(READY_REASON[problem.reason], problem.message)
    if view.transport and not view.transport.proven:
        return no("TransportFailed", view.transport.message)
    serves = view.admitted == view.target or (view.admitted is None and not any(view.want.values()))
    if any(view.lacks(pool) for pool in POOLS) or not serves or not (view.proven or not all(view.want.values())):
        elsewhere = view.admitted not in (None, ALL, view.target)
        return no("Progressing", view.plan.step + (f"; until then clients reach {view.admitted}" if elsewhere else ""))
    return Condition("Ready", "True", "Available", f"revision {view.target} serves")


def _model(view: View) -> Condition:
    kind = "ModelResolved"
    if view.token_missing:
        return Condition(kind, "False", "TokenMissing", view.token_missing)
    failed = [problem for problem in view.problems if problem.reason == "DownloadFailed"]
    if failed:
        return Condition(kind, "False", "NotFound", failed[0].message)
    if len(view.digests) > 1:
        return Condition(kind, "False", "DigestMismatch", f"pods hold different checkpoints: {', '.join(sorted(d[:12] for d in view.digests))}")  # fmt: skip
    if view.digests:
        return Condition(kind, "True", "Resolved", f"every pod holds the checkpoint {next(iter(view.digests))[:12]}")
    return Condition(kind, "Unknown", "Loading", "no pod has read the checkpoint yet")


def _pool(view: View, pool: Pool) -> Condition:
    kind, seen, want = READY_TYPE[pool], view.pools[pool], view.want[pool]
    count = f"{seen.available}/{want} ready"
    if not view.lacks(pool):
        return Condition(kind, "True", "Available", count)
    problem = seen.problem or Problem("Loading", "waiting for pods")
    return Condition(kind, "False", problem.reason, f"{count}; {problem.message}")


def _transport(view: View) -> Condition:
    if view.transport and not view.transport.proven:
        return Condition("TransportReady", "False", view.transport.reason, view.transport.message)
    if view.proven:
        return Condition("TransportReady", "True", "Proven", f"a test tensor of {view.target} arrived unchanged")
    return Condition("TransportReady", "Unknown", "NotChecked", "waiting for a pair of pods")


def _progressing(view: View) -> Condition:
    kind = "Progressing"
    if view.stalled:
        return Condition(kind, "False", "DeadlineExceeded", f"no progress: {view.plan.step}")
    if view.rolled_back_from:
        said = f"{view.rolled_back_from} failed, {view.target} is back"
        return Condition(kind, "False", "RolledBack", said) if view.plan.done else Condition(kind, "True", "RollingBack", f"{said}: {view.plan.step}")  # fmt: skip
    pinned = f" (pinned by annotation to {view.target})" if view.pinned else ""
    if view.plan.done:
        return Condition(kind, "False", "Completed", view.plan.step + pinned)
    return Condition(kind, "True", "Scaling" if view.was_complete else "RollingOut", view.plan.step + pinned)


def _degraded(view: View) -> Condition:
    kind = "Degraded"
    if view.drift_fought:
        return Condition(kind, "True", "DriftFought", view.drift_fought)
    if view.scaling_conflict:
        return Condition(kind, "True", "ScalingConflict", view.scaling_conflict)
    lost = [f"{pool} {view.pools[pool].available}/{view.want[pool]}" for pool in POOLS if view.lacks(pool)]
    if view.was_complete and lost and not (view.paused or view.draining):
        return Condition(kind, "True", "PodsLost", f"available: {', '.join(lost)}")
    if view.slo_burning:
        return Condition(kind, "True", "SLOBurning", view.slo_burning)
    if view.tuning_reverted:
        return Condition(kind, "True", "TuningReverted", view.tuning_reverted)
    return Condition(kind, "False", "AsExpected", "nothing is wrong that would cost service")


def _tuning(view: View) -> Condition:
    return Condition("TuningActive", *view.tuning)


def merged(now: datetime, generation: int, wanted: Iterable[Condition], previous: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:  # fmt: skip
    """Return conditions as status holds them: a transition time moves only when the status does; others are kept."""
    before = {item["type"]: item for item in previous}
    out = []
    for item in wanted:
        known = before.pop(item.type, None)
        same = known is not None and known["status"] == item.status
        out.append({
            "type": item.type,
            "status": item.status,
            "reason": item.reason,
            "message": item.message[:MESSAGE_MAX_LENGTH],
            "lastTransitionTime": known["lastTransitionTime"] if known and same else stamp(now),
            "observedGeneration": generation,
        })  # fmt: skip
    return [*out, *({**item, "observedGeneration": generation} for item in before.values())]


def phase(view: View, items: Iterable[Condition]) -> str:
    """Return the word that stands for it all, for display."""
    status = {item.type: item.status for item in items}
    if view.paused:
        return "Paused"
    if status["Ready"] == "True":
        return "Degraded" if status["Degraded"] == "True" else "Ready"
    if status["Degraded"] == "True" or view.stalled:
        return "Degraded"
    if view.admitted not in (None, view.target) or view.admitted == ALL:
        return "Updating"
    return "Loading" if any(pool.placed for pool in view.pools.values()) else "Pending"


def stamp(now: datetime) -> str:
    """Return a time as Kubernetes writes it."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")
