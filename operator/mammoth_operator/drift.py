"""Decide: which objects differ from what they should be, and whether somebody else keeps changing them back.

The record of corrections is kept in status: six within ten minutes are a fight, and a fight is corrected once a minute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from mammoth_operator.names import APPLIED_ANNOTATION
from mammoth_operator.observed import Child, sent_digest
from mammoth_operator.situation import Children

__all__ = ["Drift", "Fight", "differing", "fight"]

FIGHT_WINDOW_S, FIGHT_TIMES = 600, 6
SLOW_S = 60

Manifest = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Drift:
    """`applies` is what must be applied; `names` are those of them that somebody else had changed or deleted."""

    applies: tuple[Manifest, ...]
    names: tuple[str, ...]


def differing(
    manifests: Sequence[Manifest], children: Children, *, settled: bool, accepted: Mapping[str, tuple[str, str]]
) -> Drift:
    """Compare what is wanted with what is there; an object as it should be costs no request.

    `settled`: the last reconcile left this very intent in place, so a missing object was deleted by somebody.
    `accepted` maps a uid to (stamp, digest) of an object as the API server stored it, where that differs from what was sent.
    """
    applies, names = [], []
    for manifest in manifests:
        meta = manifest["metadata"]
        child = children.get((manifest["kind"], meta["name"]))
        stamp = meta["annotations"][APPLIED_ANNOTATION]
        if child is None:
            applies.append(manifest)
            if settled:
                names.append(f"{manifest['kind']} {meta['name']} (deleted)")
        elif not _as_sent(child, manifest, stamp, accepted):
            applies.append(manifest)
            if settled and child.applied == stamp:
                names.append(f"{manifest['kind']} {meta['name']}")
    return Drift(tuple(applies), tuple(names))


def _as_sent(child: Child, manifest: Manifest, stamp: str, accepted: Mapping[str, tuple[str, str]]) -> bool:
    if child.leaving:
        return True  # a new one can be made only when this one is gone
    if child.applied != stamp:
        return False
    return child.owned == sent_digest(manifest) or accepted.get(child.uid) == (stamp, child.owned)


@dataclass(frozen=True, slots=True)
class Fight:
    """`times` of recent corrections, this one included; whether it is `fought`, and whether to `hold` back for now."""

    times: tuple[str, ...]
    fought: bool
    hold: bool


def fight(names: Sequence[str], recorded: Sequence[str], now: datetime) -> Fight:
    """Return what follows from correcting `names` now, after the corrections that status has recorded."""
    recent = [time for time in recorded if now - datetime.fromisoformat(time) < timedelta(seconds=FIGHT_WINDOW_S)]
    held_back = len(recent) >= FIGHT_TIMES and (now - datetime.fromisoformat(recent[-1])).total_seconds() < SLOW_S
    if not names or held_back:
        return Fight(tuple(recent), len(recent) >= FIGHT_TIMES, bool(names) and held_back)
    times = [*recent, now.strftime("%Y-%m-%dT%H:%M:%SZ")][-FIGHT_TIMES:]
    return Fight(tuple(times), len(times) >= FIGHT_TIMES, False)
