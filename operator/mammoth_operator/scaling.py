"""Decide: how a pool of one revision gets smaller: the least loaded pods stop taking work, finish, and go.

A pod that was told to drain never takes work again, so it is replaced when the pool does not shrink after all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from mammoth_operator.observed import Child, Parent
from mammoth_operator.reports import Load
from mammoth_operator.spec import PipelineSpec

__all__ = ["Shrink", "scaling_conflict", "shrink"]

PEOPLE = "kubectl"  # whoever scales by hand


@dataclass(frozen=True, slots=True)
class Shrink:
    """`replicas` to apply now; pods to tell to `drain`, pods to `delete` because they no longer serve, and whether to wait."""

    replicas: int
    drain: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    waiting: bool = False


def shrink(
    current: int, wanted: int, pods: Sequence[Child], loads: Mapping[str, Load], now: datetime, drain_s: float
) -> Shrink:
    """Decide the next step from `current` to `wanted` replicas; `pods` are the living ones of the pool and revision.

    `loads` are by pod uid; a pod that says nothing holds nothing that could be saved and goes first.
    """
    living = [pod for pod in pods if pod.pod and not pod.leaving and not pod.pod.finished]
    marked = [pod for pod in living if pod.pod and pod.pod.draining_since]
    if wanted >= current:
        spare = [pod.name for pod in marked if _is_done(pod, loads, now, drain_s)]
        return Shrink(wanted, delete=tuple(spare), waiting=len(spare) < len(marked))
    surplus = min(current - wanted, len(living))
    fresh = sorted((pod for pod in living if pod not in marked), key=lambda pod: _order(pod, loads))
    chosen = fresh[: max(surplus - len(marked), 0)]
    leaving = [*marked, *chosen][:surplus]
    drained = all(_is_done(pod, loads, now, drain_s) if pod in marked else not _is_ready(pod) for pod in leaving)
    if drained:
        return Shrink(wanted)
    return Shrink(current, drain=tuple(pod.name for pod in chosen), waiting=True)


def _order(pod: Child, loads: Mapping[str, Load]) -> tuple[bool, int, str]:
    load = loads.get(pod.uid)
    return (_is_ready(pod), load.work if load else -1, pod.name)


def _is_ready(pod: Child) -> bool:
    return bool(pod.pod and pod.pod.ready)


def _is_done(pod: Child, loads: Mapping[str, Load], now: datetime, drain_s: float) -> bool:
    assert pod.pod is not None
    load = loads.get(pod.uid)
    since = datetime.fromisoformat(pod.pod.draining_since)
    return load is None or load.work == 0 or (now - since).total_seconds() >= drain_s


def scaling_conflict(parent: Parent, spec: PipelineSpec) -> str:
    """Return who writes replicas that are somebody else's to write; empty when nobody does."""
    for writer in parent.writers:
        mode = spec.pool("ar" if writer.pool == "ar" else "dit").scaling.mode
        field = f"spec.{writer.pool}.replicas is written by {writer.manager}"
        if mode == "External" and not writer.through_scale:
            return f"{field}, but scaling.mode is External: leave it out of the manifest"
        if mode == "Static" and writer.through_scale and not writer.manager.startswith(PEOPLE):
            return f"{field} through the scale subresource, but scaling.mode is Static"
    return ""
