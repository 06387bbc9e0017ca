"""A deployment as the watches would show it: what the decisions stand on, made without a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mammoth_operator.decide import Known, decide
from mammoth_operator.decision import Decision
from mammoth_operator.manifests import Options
from mammoth_operator.names import Key
from mammoth_operator.observed import Child, Parent, child_of, sent_digest
from mammoth_operator.podfacts import PodFacts
from mammoth_operator.reports import Load, Transport
from mammoth_operator.situation import situation_of

NOW = datetime(2026, 12, 1, 12, 0, 0, tzinfo=UTC)
SPEC: dict[str, Any] = {
    "model": {"source": {"path": "/opt/checkpoint"}},
    "ar": {"image": "ar:1", "replicas": 1},
    "dit": {"image": "dit:1", "replicas": 1},
}


@dataclass
class World:
    """Plays API server, controllers and kubelet at once: what was decided is so, and pods are ready at once."""

    spec: dict[str, Any] = field(default_factory=lambda: {key: dict(value) for key, value in SPEC.items()})
    now: datetime = NOW
    annotations: dict[str, str] = field(default_factory=dict)
    finalizers: tuple[str, ...] = ()
    leaving_since: str = ""
    generation: int = 1
    status: dict[str, Any] = field(default_factory=dict)
    children: dict[tuple[str, str], Child] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    pods_come: bool = True
    proves: bool = True
    known: Known = field(default_factory=Known)
    _count: int = 0

    @property
    def parent(self) -> Parent:
        return Parent(Key("space", "demo"), "uid", 1, self.generation, "2026-12-01T11:00:00Z", self.spec, self.status,
                      self.annotations, self.finalizers, self.leaving_since, ())  # fmt: skip

    @property
    def situation(self):
        return situation_of(self.parent, self.children, self.loads)

    def edit(self, **changes: Any) -> None:
        for key, value in changes.items():
            self.spec[key] = {**self.spec[key], **value} if isinstance(value, dict) and key in self.spec else value
        self.generation += 1

    def decide(self) -> Decision:
        revisions = {name for _, name in self.situation.seen}
        checks = {name: Transport(name, True) for name in revisions if self.proves and self._pair(name)}
        return decide(self.situation, replace(self.known, transports=checks), Options(), self.now)

    def _pair(self, revision: str) -> bool:
        return all(
            any(child.pod and child.pod.ready for child in self.situation.pods(pool, revision))
            for pool in ("ar", "dit")
        )

    def step(self) -> Decision:
        """Decide, make it so, and let nature follow."""
        decision = self.decide()
        for manifest in decision.applies:
            self.apply(manifest)
        for child, replicas in decision.scales:
            self.children[child.kind, child.name] = replace(child, replicas=replicas)
        for pod in decision.drains:
            self.children["Pod", pod.name] = replace(pod, pod=replace(pod.pod, draining_since=self.now.isoformat()))
        for child in decision.deletes:
            self.children.pop((child.kind, child.name))
        for call in decision.limits:
            self.loads[call.pod.uid] = replace(
                self.loads[call.pod.uid], epoch=call.epoch, max_num_seqs=call.max_num_seqs, wait_ms=call.wait_ms
            )
        if decision.finalizers is not None:
            self.finalizers = decision.finalizers
        self.status = dict(decision.status) or self.status
        self.events += [event.reason for event in decision.events]
        self.nature()
        return decision

    def apply(self, manifest: Any) -> Child:
        self._count += 1
        known = self.children.get((manifest["kind"], manifest["metadata"]["name"]))
        uid = known.uid if known else f"uid-{self._count}"
        raw = {
            **manifest,
            "metadata": {
                **manifest["metadata"],
                "uid": uid,
                "resourceVersion": str(self._count),
                "creationTimestamp": "2026-12-01T11:00:00Z",
            },
        }
        child = replace(child_of(raw), owned=sent_digest(manifest))
        self.children[child.kind, child.name] = child
        return child

    def nature(self) -> None:
        for child in [child for child in self.children.values() if child.kind == "Deployment"]:
            mine = [pod for pod in self.children.values() if pod.kind == "Pod" and pod.owner_name == f"{child.name}-rs"]
            for _ in range(child.replicas - len(mine)):
                self.add_pod(child, ready=self.pods_come)
            for pod in mine[child.replicas :]:
                del self.children["Pod", pod.name]
        names = {child.name for child in self.children.values() if child.kind == "Deployment"}
        for key, pod in list(self.children.items()):
            if pod.kind == "Pod" and pod.owner_name.removesuffix("-rs") not in names:
                del self.children[key]

    def add_pod(self, deployment: Child, *, ready: bool) -> Child:
        self._count += 1
        pool, revision = deployment.labels["mammoth.dev/pool"], deployment.labels["mammoth.dev/revision"]
        facts = PodFacts(pool, revision, f"10.0.0.{self._count}", ready, False, "node", "", None, None)
        pod = Child("Pod", "space", f"{deployment.name}-{self._count}", f"pod-{self._count}", self._count, deployment.labels,
                    owner_name=f"{deployment.name}-rs", pod=facts, created=f"2026-12-01T11:00:{self._count % 60:02}Z")  # fmt: skip
        self.children["Pod", pod.name] = pod
        capacity = self.spec[pool].get("capacity", {}).get("maxNumSeqs", {"ar": 32, "dit": 8}[pool])
        self.loads[pod.uid] = Load(0, 0, 0, capacity, 20.0 if pool == "dit" else None, True, capacity, "feed")
        return pod

    def settle(self, *, steps: int = 30, seconds: float = 1.0) -> World:
        """Step until nothing is written any more; fail when that never comes."""
        for _ in range(steps):
            before = self.status
            decision = self.step()
            self.now += timedelta(seconds=seconds)
            if (
                not (
                    decision.applies
                    or decision.scales
                    or decision.deletes
                    or decision.drains
                    or decision.limits
                    or decision.events
                )
                and self.status == before
            ):
                return self
        raise AssertionError(f"never settles: {decision}")

    def condition(self, kind: str) -> tuple[str, str]:
        return next((item["status"], item["reason"]) for item in self.status["conditions"] if item["type"] == kind)


@pytest.fixture
def world() -> World:
    return World()
