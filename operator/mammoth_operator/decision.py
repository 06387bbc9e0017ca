"""Decide: what one reconcile is to do, as a value: nothing has been done yet when it exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mammoth_operator.observed import Child

__all__ = ["Decision", "Event", "LimitsCall"]

Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event: a reason people search for, and a sentence."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class LimitsCall:
    """Caps to put in force in a pod."""

    pod: Child
    epoch: int
    max_num_seqs: int
    wait_ms: float | None


@dataclass(frozen=True, slots=True)
class Decision:
    """Writes in the order in which they happen, calls to pods, the status, and when to look again.

    `weighed`: the tuner has compared settings, with `action` as the outcome. `finalizers` is None when they are as they should be; `again_s` is None when the usual time will do.
    """

    applies: tuple[Manifest, ...] = ()
    scales: tuple[tuple[Child, int], ...] = ()
    deletes: tuple[Child, ...] = ()
    drains: tuple[Child, ...] = ()
    limits: tuple[LimitsCall, ...] = ()
    finalizers: tuple[str, ...] | None = None
    status: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    drifted: int = 0
    weighed: bool = False
    action: str = ""
    again_s: float | None = None
