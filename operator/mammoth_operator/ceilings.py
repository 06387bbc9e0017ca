"""Decide: the batch limit that pods killed for their memory have taught.

A kill names no picture size, so it halves the cap of its pool; a wave that only its device cannot hold is halved by the
stage itself. What was learned holds until somebody asks for another cap or another revision runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from mammoth_operator.decision import Event
from mammoth_operator.limits import Caps
from mammoth_operator.names import POOLS, Pool
from mammoth_operator.observed import Child

__all__ = ["Ceiling", "learned", "news_of", "stored", "within"]

KILLED = "OOMKilled"
SAME_BURST_S = 30  # kills so close to the last one happened before its lesson was everywhere


@dataclass(frozen=True, slots=True)
class Ceiling:
    """At most `max_num_seqs` since `pod` was killed at `time`; `asked` and `revision` are what it was learned for."""

    pool: Pool
    max_num_seqs: int
    asked: int
    revision: str
    time: str
    pod: str

    def status(self) -> dict[str, Any]:
        return {
            "pool": self.pool, "maxNumSeqs": self.max_num_seqs, "asked": self.asked, "revision": self.revision,
            "time": self.time, "pod": self.pod,
        }  # fmt: skip


def stored(entries: Iterable[Mapping[str, Any]]) -> dict[Pool, Ceiling]:
    """Return the ceilings of `status.memoryCeilings`."""
    return {
        item["pool"]: Ceiling(
            item["pool"], item["maxNumSeqs"], item["asked"], item["revision"], item["time"], item["pod"]
        )
        for item in entries
    }


def learned(known: Mapping[Pool, Ceiling], caps: Caps, revision: str, pods: Iterable[Child]) -> dict[Pool, Ceiling]:
    """Return the ceilings after the kills that `pods` of a revision that has served report; `caps` are the asked ones."""
    pods = list(pods)
    out = {}
    for pool in POOLS:
        asked, _ = caps.of(pool)
        before = known.get(pool)
        if before and (before.asked, before.revision) != (asked, revision):
            before = replace(before, max_num_seqs=asked, asked=asked, revision=revision)
        kills = [
            (time, pod.name)
            for pod in pods
            if (time := _killed(pod, pool, revision)) and (before is None or _is_after(time, before))
        ]
        if kills:
            time, name = max(kills)
            limit = before.max_num_seqs if before else asked
            out[pool] = Ceiling(pool, max(limit // 2, 1), asked, revision, time, name)
        elif before:
            out[pool] = before
    return out


def within(caps: Caps, ceilings: Mapping[Pool, Ceiling]) -> Caps:
    """Return `caps` lowered to the ceilings."""
    ar, dit = (ceilings.get(pool) for pool in POOLS)
    return replace(
        caps,
        ar_max_num_seqs=min(caps.ar_max_num_seqs, ar.max_num_seqs) if ar else caps.ar_max_num_seqs,
        dit_max_num_seqs=min(caps.dit_max_num_seqs, dit.max_num_seqs) if dit else caps.dit_max_num_seqs,
    )


def news_of(known: Mapping[Pool, Ceiling], now: Mapping[Pool, Ceiling]) -> list[Event]:
    """Return an Event for each pool that has learned something."""
    return [
        Event(
            "OutOfMemory",
            f"{ceiling.pod} was killed for its memory; at most {ceiling.max_num_seqs} at once in every {pool} pod from now on. "
            f"spec.{pool}.resources.memory gives it more, another spec.{pool}.maxNumSeqs lifts the limit",
            warning=True,
        )
        for pool, ceiling in now.items()
        if pool not in known or known[pool].time != ceiling.time
    ]


def _killed(pod: Child, pool: Pool, revision: str) -> str:
    """Return when a pod of this pool and revision was last killed for its memory; empty when it was not."""
    facts = pod.pod
    if facts is None or (facts.pool, facts.revision) != (pool, revision):
        return ""
    return facts.failure.time if facts.failure and facts.failure.reason == KILLED else ""


def _is_after(time: str, before: Ceiling) -> bool:
    return datetime.fromisoformat(time) - datetime.fromisoformat(before.time) > timedelta(seconds=SAME_BURST_S)
