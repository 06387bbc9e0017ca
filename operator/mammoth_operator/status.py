"""Decide: the whole of `status` from one view, and what of it is news worth an Event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mammoth_operator.ceilings import Ceiling
from mammoth_operator.conditions import Condition, View, merged, phase, refused, stamp
from mammoth_operator.decision import Event
from mammoth_operator.limits import Caps
from mammoth_operator.names import POOLS, Pool, selector
from mammoth_operator.observed import Parent
from mammoth_operator.pods import checkpoint_path
from mammoth_operator.rollout import Past
from mammoth_operator.situation import PoolView, Situation
from mammoth_operator.spec import PipelineSpec
from mammoth_operator.status_schema import MESSAGE_MAX_LENGTH

__all__ = ["news", "refusal_status", "rollout_status", "status_of"]

Status = dict[str, Any]


def refusal_status(parent: Parent, reason: str, message: str, now: datetime) -> Status:
    """Return the status of a spec that is not carried out: everything but the verdict stays."""
    items = merged(now, parent.generation, refused(reason, message), parent.status.get("conditions", ()))
    return {**parent.status, "observedGeneration": parent.generation, "phase": "Degraded", "conditions": items}


def rollout_status(previous: Mapping[str, Any], view: View, progress: str, now: datetime) -> Status:
    """Return `status.rollout`: the time moves whenever something moved, which is how a stall is told from slowness."""
    same = previous.get("target") == view.target and previous.get("progress") == progress
    rollout = {
        "target": view.target,
        "step": view.plan.step[:MESSAGE_MAX_LENGTH],
        "progress": progress,
        "progressTime": previous["progressTime"] if same and "progressTime" in previous else stamp(now),
    }
    return rollout | ({"rolledBackFrom": view.rolled_back_from} if view.rolled_back_from else {})


def status_of(
    situation: Situation,
    spec: PipelineSpec,
    view: View,
    items: Sequence[Condition],
    *,
    history: Mapping[str, Past],
    caps: Caps,
    epoch: int,
    rollout: Status,
    drift_times: Sequence[str],
    ceilings: Mapping[Pool, Ceiling],
    tuning: Status,
    capacity: Status,
    scaling: Status,
    now: datetime,
) -> Status:
    """Return the status; `tuning`, `capacity` and `scaling` come from those who decide them."""
    parent, previous = situation.parent, situation.parent.status
    current = view.target if view.plan.done else previous.get("currentRevision", "")
    status: Status = {
        "observedGeneration": parent.generation,
        "phase": phase(view, items),
        "conditions": merged(now, parent.generation, items, previous.get("conditions", ())),
        "endpoint": f"{spec.endpoint.public_name or f'{parent.key.name}.{parent.key.namespace}.svc'}:{spec.endpoint.port}",
        "targetRevision": view.target,
        "revisions": _revisions(situation, history),
        "model": {"path": checkpoint_path(spec)} | _resolved(view),
        "effective": {"caps": caps.status(), "arReplicas": view.want["ar"], "ditReplicas": view.want["dit"]},
        **{pool: _pool(parent, pool, view.want[pool], view.pools[pool]) for pool in POOLS},
        "tuning": {
            **tuning,
            "mode": spec.tuning.mode, "epoch": epoch, "applied": caps.status(), "acked": f"{view.acked[0]}/{view.acked[1]}",
        },
        "rollout": rollout,
    }  # fmt: skip
    if current:
        status["currentRevision"] = current
    if drift_times:
        status["drift"] = {"times": list(drift_times)} | ({"message": view.drift_fought} if view.drift_fought else {})
    if ceilings:
        status["memoryCeilings"] = [ceiling.status() for ceiling in ceilings.values()]
    if capacity:
        status["capacity"] = capacity
    if scaling:
        status["scaling"] = scaling
    failure = _last_failure(situation, previous.get("lastFailure"))
    return status | ({"lastFailure": failure} if failure else {})


def _resolved(view: View) -> Status:
    return {"resolvedRevision": next(iter(view.digests))} if len(view.digests) == 1 else {}


def _pool(parent: Parent, pool: Pool, desired: int, seen: PoolView) -> Status:
    labels = selector(parent.key.name, pool)
    status: Status = {
        "desired": desired, "replicas": seen.replicas, "current": seen.current, "updated": seen.updated, "ready": seen.ready,
        "available": seen.available, "inflight": seen.inflight, "queueDepth": seen.queue_depth,
        "summary": f"{seen.available}/{desired}", "selector": ",".join(f"{key}={value}" for key, value in labels.items()),
    }  # fmt: skip
    if seen.problem and seen.available < desired:
        status["blockedReason"] = f"{seen.problem.reason}: {seen.problem.message}"[:MESSAGE_MAX_LENGTH]
    return status


def _revisions(situation: Situation, history: Mapping[str, Past]) -> list[Status]:
    out = []
    for past in sorted(history.values(), key=lambda past: -past.ordinal)[:21]:
        record = situation.children.get(("ControllerRevision", f"{situation.parent.key.name}-{past.hash}"))
        entry: Status = {"hash": past.hash} | ({"outcome": past.outcome} if past.outcome else {})
        if record:
            body = record.data
            entry |= {"time": record.created, "arImage": body["ar"]["image"], "ditImage": body["dit"]["image"], "model": _source(body)}  # fmt: skip
        out.append(entry)
    return out


def _source(body: Mapping[str, Any]) -> str:
    [(kind, value)] = body["model"]["source"].items()
    return f"{kind}:{value if isinstance(value, str) else '@'.join(str(part) for part in value.values())}"


def _last_failure(situation: Situation, previous: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    failures = [
        {"time": child.pod.failure.time, "pod": child.name, "reason": child.pod.failure.reason, "message": child.pod.failure.message}
        for child in situation.children.values()
        if child.pod and child.pod.failure and child.pod.failure.time
    ]  # fmt: skip
    return max([*failures, *([previous] if previous else [])], key=lambda item: item["time"], default=None)


def news(previous: Mapping[str, Any], status: Mapping[str, Any]) -> list[Event]:
    """Return the Events that tell what changed between two statuses, in the order in which it happened."""
    events = []
    target, before = status["targetRevision"], previous.get("targetRevision")
    tuning, tuned = status["tuning"], previous.get("tuning", {})
    if not previous.get("conditions"):
        events.append(Event("Created", f"pools ar {status['ar']['desired']} and dit {status['dit']['desired']}, revision {target}"))  # fmt: skip
    elif before is None or before != target:
        rolled_back = status["rollout"].get("rolledBackFrom")
        said = f"{rolled_back} failed; back to {target}" if rolled_back else f"from {before} to {target}"
        events.append(Event("RolledBack" if rolled_back else "RolloutStarted", said, warning=bool(rolled_back)))
    elif any(status[pool]["desired"] != previous.get(pool, {}).get("desired", 0) for pool in POOLS):
        events.append(Event("Scaled", ", ".join(f"{pool} {previous.get(pool, {}).get('desired', 0)} to {status[pool]['desired']}" for pool in POOLS)))  # fmt: skip
    if tuned.get("applied") and tuned["applied"] != tuning["applied"]:
        events.append(Event("TuningApplied", f"epoch {tuning['epoch']}: " + ", ".join(f"{key} {value:g}" for key, value in tuning["applied"].items())))  # fmt: skip
    if _turned(previous, status, "ModelResolved"):
        events.append(Event("ModelResolved", f"checkpoint {status['model'].get('resolvedRevision', '')[:12]} at {status['model']['path']}"))  # fmt: skip
    if status.get("currentRevision") != previous.get("currentRevision"):
        events.append(Event("RolloutCompleted", f"revision {status.get('currentRevision')} serves"))
    return events


def _turned(previous: Mapping[str, Any], status: Mapping[str, Any], kind: str) -> bool:
    """Return whether a condition has become True."""
    was, now = (
        next((item["status"] for item in each.get("conditions", ()) if item["type"] == kind), "") for each in (previous, status)
    )  # fmt: skip
    return now == "True" != was
