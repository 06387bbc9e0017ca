"""Decide: what there is, in the words in which the next step is decided: revisions, pools, pods, whom clients reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mammoth_operator.limits import Caps, from_data
from mammoth_operator.names import (
    OUTCOME_LABEL,
    POOL_LABEL,
    POOLS,
    PROVEN_LABEL,
    REVISION_LABEL,
    Pool,
    child_name,
)
from mammoth_operator.observed import Child, Parent
from mammoth_operator.podfacts import Problem, why_refused
from mammoth_operator.reports import Load
from mammoth_operator.rollout import ALL, Past, Seen

__all__ = ["Children", "PoolView", "Situation", "situation_of"]

Children = Mapping[tuple[str, str], Child]
WORST_FIRST = ("Unschedulable", "QuotaExceeded", "PodsRefused", "GpuFault", "ImagePullFailed", "OutOfMemory", "DownloadFailed", "PodsCrashing", "ProbeFailing", "Loading")  # fmt: skip


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool over all revisions; `problem` is the worst of the target revision's pods that are not ready."""

    replicas: int
    current: int
    placed: int
    updated: int
    ready: int
    available: int
    inflight: int
    queue_depth: int
    problem: Problem | None


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that was seen, sorted. Pods are those that hold or will hold a device."""

    parent: Parent
    children: Children  # ours
    strangers: tuple[Child, ...]  # they carry our label, but are somebody else's, or a former object's
    history: Mapping[str, Past]
    proven: frozenset[str]
    seen: Mapping[tuple[Pool, str], Seen]
    admitted: str | None
    stored_caps: tuple[Caps, int] | None
    loads: Mapping[str, Load]

    def pods(self, pool: Pool, revision: str = "") -> list[Child]:
        """Return the pods of a pool, of one revision where given, oldest first."""
        found = [
            child for child in self.children.values()
            if child.pod and child.pod.pool == pool and not child.pod.finished and (not revision or child.pod.revision == revision)
        ]  # fmt: skip
        return sorted(found, key=lambda pod: (pod.created, pod.name))

    def ready_pods(self) -> list[Child]:
        """Return every pod that takes work."""
        return [pod for pool in POOLS for pod in self.pods(pool) if is_available(pod)]

    def transport_pairs(self) -> dict[str, tuple[Child, Child]]:
        """Return, by revision, an AR and a DiT pod that can show that rows travel between them."""
        pairs = {}
        for revision in {name for _, name in self.seen}:
            ready = [[pod for pod in self.pods(pool, revision) if is_available(pod)] for pool in POOLS]
            if all(ready):
                pairs[revision] = (ready[0][0], ready[1][0])
        return pairs

    def deployment(self, pool: Pool, revision: str) -> Child | None:
        return self.children.get(("Deployment", child_name(self.parent.key.name, pool, revision)))

    def view(self, pool: Pool, target: str) -> PoolView:
        """Return a pool as status shows it."""
        pods, mine = self.pods(pool), self.pods(pool, target)
        loads = [self.loads[pod.uid] for pod in pods if pod.uid in self.loads]
        return PoolView(
            replicas=sum(seen.replicas for (name, _), seen in self.seen.items() if name == pool),
            current=len(pods),
            placed=sum(1 for pod in pods if pod.pod and pod.pod.node),
            updated=len(mine),
            ready=sum(1 for pod in pods if pod.pod and pod.pod.ready),
            available=sum(1 for pod in mine if is_available(pod)),
            inflight=sum(load.in_flight for load in loads),
            queue_depth=sum(load.queue_depth for load in loads),
            problem=self._problem(pool, target),
        )

    def _problem(self, pool: Pool, target: str) -> Problem | None:
        deployment = self.deployment(pool, target)
        problems = [why_refused(deployment.refused)] if deployment and deployment.refused else []
        for child in self.children.values():
            pod = child.pod
            if (
                pod
                and pod.pool == pool
                and pod.revision == target
                and pod.problem
                and not child.leaving
                and not pod.draining_since
            ):
                problems.append(Problem(pod.problem.reason, f"{child.name}: {pod.problem.message}"))  # fmt: skip
        return min(problems, key=lambda problem: (WORST_FIRST.index(problem.reason), problem.message), default=None)


def is_available(pod: Child) -> bool:
    """Return whether a pod takes work: ready, not leaving, not told to drain."""
    return bool(pod.pod and pod.pod.ready and not pod.leaving and not pod.pod.draining_since)


def situation_of(parent: Parent, children: Children, loads: Mapping[str, Load]) -> Situation:
    """Sort what was seen. Only objects that this very parent controls count as its own."""
    ours = {key: child for key, child in children.items() if _is_ours(child, parent)}
    strangers = tuple(child for key, child in children.items() if key not in ours)
    records = [child for child in ours.values() if child.kind == "ControllerRevision"]
    door = ours.get(("Service", parent.key.name))
    config = ours.get(("ConfigMap", parent.key.name))
    return Situation(
        parent=parent,
        children=ours,
        strangers=strangers,
        history={
            hash_of(child): Past(hash_of(child), child.ordinal, child.labels.get(OUTCOME_LABEL, ""))
            for child in records
        },
        proven=frozenset(hash_of(child) for child in records if PROVEN_LABEL in child.labels),
        seen=_seen(ours),
        admitted=None if door is None else door.selector.get(REVISION_LABEL, ALL),
        stored_caps=from_data(config.data) if config else None,
        loads=loads,
    )


def hash_of(child: Child) -> str:
    """Return the revision that a child belongs to, empty for a shared one."""
    return child.labels.get(REVISION_LABEL, "")


def _is_ours(child: Child, parent: Parent) -> bool:
    """Return whether `parent` controls the child, or made it and somebody took the reference out.

    A pod is controlled by a ReplicaSet of a Deployment of ours: labels alone make no pod ours.
    """
    if child.pod:
        return child.owner_name.startswith(f"{parent.key.name}-{child.pod.pool}-{child.pod.revision}-")
    return child.owner_uid == parent.uid or (not child.owner_uid and bool(child.applied) and bool(child.owned))


def _seen(children: Children) -> dict[tuple[Pool, str], Seen]:
    replicas: dict[tuple[Pool, str], int] = {}
    pods: dict[tuple[Pool, str], list[Child]] = {}
    for child in children.values():
        pool: Pool | None = next((pool for pool in POOLS if child.labels.get(POOL_LABEL) == pool), None)
        if pool is None:
            continue
        if child.kind == "Deployment" and not child.leaving:
            replicas[pool, hash_of(child)] = child.replicas
        elif child.pod and not child.pod.finished:
            pods.setdefault((pool, hash_of(child)), []).append(child)
    return {
        key: Seen(replicas.get(key, 0), len(pods.get(key, ())), sum(map(is_available, pods.get(key, ()))))
        for key in replicas.keys() | pods.keys()
    }
