"""Decide: how a deployment that is being deleted leaves: no new work, AR pods finish theirs, then everything goes at once.

It never waits for a pod to answer: kubelet ends the pods' grace, and a deadline ends the wait.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from mammoth_operator.conditions import Condition, merged
from mammoth_operator.decision import Decision, Event
from mammoth_operator.names import FINALIZER
from mammoth_operator.pods import GRACE_S
from mammoth_operator.situation import Situation

__all__ = ["departure", "finalizers_wanted"]

SLACK_S = 15
DEFAULT_DRAIN_S = 120
LOOK_AGAIN_S = 5.0


def finalizers_wanted(situation: Situation, policy: str) -> tuple[str, ...]:
    """Return the finalizers that are due: one, while a pod may hold accepted work that a deletion should wait for."""
    pods = situation.pods("ar")
    if policy != "Drain" or not pods:
        return ()
    takes_work = any(pod.pod and pod.pod.ready for pod in pods)
    return (FINALIZER,) if takes_work or FINALIZER in situation.parent.finalizers else ()


def departure(situation: Situation, now: datetime) -> Decision:
    """Return the next step of a parent that has a deletion time."""
    parent = situation.parent
    if FINALIZER not in parent.finalizers:
        return Decision()
    spec = parent.spec
    deadline = datetime.fromisoformat(parent.leaving_since) + timedelta(seconds=_drain_s(spec) + GRACE_S + SLACK_S)
    pods = situation.pods("ar")
    if spec.get("deletionPolicy", "Drain") != "Drain" or not pods or now >= deadline:
        return Decision(finalizers=())
    door = situation.children.get(("Service", parent.key.name))
    running = [child for child in situation.children.values() if child.kind == "Deployment" and child.labels.get("mammoth.dev/pool") == "ar"]  # fmt: skip
    message = f"no new work; AR pods finish theirs ({len(pods)} left), at most until {deadline:%H:%M:%S} UTC"
    ready = Condition("Ready", "False", "Deleting", message)
    items = merged(now, parent.generation, [ready], parent.status.get("conditions", ()))
    return Decision(
        deletes=(door,) if door and not door.leaving else (),
        scales=tuple((child, 0) for child in running if child.replicas and not child.leaving),
        status={**parent.status, "phase": "Deleting", "conditions": items},
        events=(Event("Draining", message),) if parent.status.get("phase") != "Deleting" else (),
        again_s=min(LOOK_AGAIN_S, max((deadline - now).total_seconds(), 0.1)),
    )


def _drain_s(spec: Any) -> float:
    return float(spec.get("ar", {}).get("drainSeconds", DEFAULT_DRAIN_S))
