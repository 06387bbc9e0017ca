"""Decide: the next step of a paired rollout, from what is there now. No memory: a revert is a rollout to another target.

DiT(new) comes up, then AR(new); when rows are proven to travel between them, clients are let in; then AR(old) leaves, then
DiT(old). Each AR pod streams to DiT pods of its own revision alone, so both revisions can serve side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mammoth_operator.names import POOLS, Pool

__all__ = ["ALL", "Plan", "Policy", "Seen", "last_ready", "plan_rollout", "target_of"]

ALL = ""  # admitted: every ready AR pod, whatever its revision


@dataclass(frozen=True, slots=True)
class Seen:
    """What one pool of one revision has: wanted `replicas`, living `pods` (leaving ones too), `available` ones."""

    replicas: int = 0
    pods: int = 0
    available: int = 0

    @property
    def held(self) -> int:
        """Return how many devices are taken, or about to be."""
        return max(self.replicas, self.pods)

    @property
    def serving(self) -> int:
        """Return the available pods that the wanted number keeps."""
        return min(self.available, self.replicas)


@dataclass(frozen=True, slots=True)
class Policy:
    """How far a pool may be above and below its wanted number."""

    max_surge: int = 1
    max_unavailable: int = 0
    recreate: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """The numbers to apply now, by (pool, revision), whom clients reach, and what is being waited for."""

    replicas: Mapping[tuple[Pool, str], int]
    admit: str
    step: str
    done: bool = False


Pools = Mapping[tuple[Pool, str], Seen]
NOTHING = Seen()


def plan_rollout(
    target: str,
    want: Mapping[Pool, int],
    seen: Pools,
    *,
    proven: frozenset[str],
    admitted: str | None,
    policy: Policy,
) -> Plan:
    """Decide the next step towards `want` replicas of `target`.

    `proven` revisions have carried a test tensor; `admitted` is what clients reach (ALL, a revision, or None: no door yet).
    In each pool replicas never exceed want + max_surge, and those that serve never fall below want - max_unavailable by
    our doing.
    """
    olds = sorted({revision for (_, revision), pool in seen.items() if revision != target and pool.held})
    if not olds:
        return _steady(target, want, seen, proven)
    if policy.recreate:
        return _recreate(target, want, seen, olds, admitted)
    if admitted == ALL and target not in proven:
        return _collapse(target, want, seen, proven=proven, policy=policy, olds=olds)
    return _paired(target, want, seen, proven, admitted, policy, olds)


def _steady(target: str, want: Mapping[Pool, int], seen: Pools, proven: frozenset[str]) -> Plan:
    missing = [pool for pool in POOLS if seen.get((pool, target), NOTHING).serving < want[pool]]
    if missing:
        step = f"waiting for {' and '.join(missing)} pods of {target}"
    elif target not in proven and all(want.values()):
        step = f"proving the transport of {target}"
    else:
        return Plan({(pool, target): want[pool] for pool in POOLS}, target, f"{target} is in place", done=True)
    return Plan({(pool, target): want[pool] for pool in POOLS}, target, step)


def _recreate(target: str, want: Mapping[Pool, int], seen: Pools, olds: list[str], admitted: str | None) -> Plan:
    ar_left = any(seen.get(("ar", old), NOTHING).held for old in olds)
    replicas: dict[tuple[Pool, str], int] = {}
    for old in olds:
        replicas["ar", old] = 0
        replicas["dit", old] = seen.get(("dit", old), NOTHING).replicas if ar_left else 0
    replicas |= {(pool, target): 0 for pool in POOLS}
    return Plan(replicas, target if admitted is None else admitted, "draining the old revision before the new one starts")  # fmt: skip


def _collapse(
    target: str, want: Mapping[Pool, int], seen: Pools, *, proven: frozenset[str], policy: Policy, olds: list[str]
) -> Plan:
    """Return to one admitted revision first: an unproven one must not be let in by a door that is open to all."""
    keep = max(olds, key=lambda old: (old in proven, seen.get(("ar", old), NOTHING).serving, old))
    others = [old for old in [*olds, target] if old != keep and _any_held(seen, old)]
    inner = _paired(keep, want, seen, proven | {keep}, ALL, policy, others)
    replicas = {(pool, target): 0 for pool in POOLS} | dict(inner.replicas)
    return Plan(replicas, inner.admit, f"returning to {keep} before {target} starts")


def _any_held(seen: Pools, revision: str) -> bool:
    return any(seen.get((pool, revision), NOTHING).held for pool in POOLS)


def _paired(
    target: str, want: Mapping[Pool, int], seen: Pools, proven: frozenset[str], admitted: str | None, policy: Policy, olds: list[str]
) -> Plan:  # fmt: skip
    new = {pool: seen.get((pool, target), NOTHING) for pool in POOLS}
    pair_works = (target in proven and min(new["ar"].serving, new["dit"].serving) > 0) or not all(want.values())
    enough = {pool: new[pool].serving >= want[pool] - policy.max_unavailable for pool in POOLS}
    admit = _admit(target, admitted, pair_works, all(enough.values()))
    serves = pair_works and admitted in (ALL, target)  # what is counted is what clients reach already
    replicas: dict[tuple[Pool, str], int] = {}
    for pool in POOLS:
        needed = _needed(pool, want, new, serves, enough["dit"], policy)
        replicas |= _old_replicas(pool, needed, seen, olds, admitted)
        room = want[pool] + policy.max_surge - sum(seen.get((pool, old), NOTHING).held for old in olds)
        may_grow = pool == "dit" or new["dit"].serving > 0 or want["dit"] == 0
        grown = min(want[pool], max(room, 0)) if may_grow else 0
        replicas[pool, target] = max(min(new[pool].replicas, want[pool]), grown)
    return Plan(replicas, admit, _step(target, new, want, proven, serves))


def _admit(target: str, admitted: str | None, pair_works: bool, enough: bool) -> str:
    if admitted is None:
        return target
    if not pair_works:
        return admitted
    return target if enough else ALL


def _needed(
    pool: Pool, want: Mapping[Pool, int], new: Mapping[Pool, Seen], serves: bool, dit_ready: bool, policy: Policy
) -> int:
    """Return how many old replicas must go on serving while the new ones do what they can."""
    least = max(want[pool] - policy.max_unavailable, 0)
    if serves:
        left = max(least - new[pool].serving, 0)
        return max(left, 1) if pool == "ar" and not dit_ready else left
    if policy.max_surge:
        return want[pool]
    # without room for a second DiT pod nothing can serve meanwhile: AR pods finish what they have and leave first
    return 0 if want["dit"] <= policy.max_unavailable else least


def _old_replicas(
    pool: Pool, needed: int, seen: Pools, olds: list[str], admitted: str | None
) -> dict[tuple[Pool, str], int]:
    """Return how many old replicas stay: enough to serve, those first that clients reach and that are available."""
    kept: dict[tuple[Pool, str], int] = {}
    ranked = sorted(olds, key=lambda old: _rank(pool, old, seen, admitted))
    for old in ranked:
        has = seen.get((pool, old), NOTHING)
        reachable = admitted in (ALL, old)
        keep = min(has.replicas, needed) if reachable else 0
        if pool == "dit" and seen.get(("ar", old), NOTHING).held:
            keep = max(keep, min(has.replicas, 1))  # an AR pod of this revision can still be working
        kept[pool, old] = keep
        needed -= min(has.serving, keep) if reachable else 0
    return kept


def _rank(pool: Pool, old: str, seen: Pools, admitted: str | None) -> tuple[bool, bool, int, str]:
    """Return who stays first: those that clients reach, DiT pods that an AR pod may still need, those that are available."""
    needless = pool == "dit" and not seen.get(("ar", old), NOTHING).held
    return (admitted not in (ALL, old), needless, -seen.get((pool, old), NOTHING).serving, old)


def _step(target: str, new: Mapping[Pool, Seen], want: Mapping[Pool, int], proven: frozenset[str], serves: bool) -> str:
    if not new["dit"].serving and want["dit"]:
        return f"waiting for the first dit pod of {target}"
    if not new["ar"].serving and want["ar"]:
        return f"waiting for the first ar pod of {target}"
    if target not in proven and all(want.values()):
        return f"proving the transport of {target}"
    return f"replacing old pods by those of {target}" if serves else f"letting clients in to {target}"


@dataclass(frozen=True, slots=True)
class Past:
    """A revision that was recorded: newer ones have higher ordinals; outcome is ready, failed, or empty."""

    hash: str
    ordinal: int
    outcome: str = ""


def last_ready(history: Mapping[str, Past], other_than: str) -> str | None:
    """Return the newest revision that was ready once, other than `other_than`."""
    ready = [past for past in history.values() if past.outcome == "ready" and past.hash != other_than]
    return max(ready, key=lambda past: past.ordinal).hash if ready else None


def target_of(asked: str, history: Mapping[str, Past], *, pinned: str, auto_rollback: bool) -> str:
    """Return the revision to run: the pinned one if it is known, else the asked one, else, when that failed, the last ready."""
    if pinned and pinned in history:
        return pinned
    if auto_rollback and asked in history and history[asked].outcome == "failed":
        return last_ready(history, asked) or asked
    return asked
