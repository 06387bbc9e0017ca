"""Decide: one reconcile. From what a user wants and what is there follows what to do now; no diff, no memory, no order of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from mammoth_operator.acceptance import check
from mammoth_operator.ceilings import learned, news_of, stored, within
from mammoth_operator.conditions import View, conditions, merged
from mammoth_operator.decision import Decision, Event, LimitsCall
from mammoth_operator.departure import departure, finalizers_wanted
from mammoth_operator.drift import Drift, Fight, differing, fight
from mammoth_operator.limits import asked, epoch_of
from mammoth_operator.manifests import (
    Manifest,
    Options,
    Owner,
    Record,
    Wanted,
    desired_objects,
    profile_object,
    record_object,
)
from mammoth_operator.names import DRAIN_ANNOTATION, POOLS, REVISION_ANNOTATION, Pool, revision_name
from mammoth_operator.observed import Child
from mammoth_operator.reports import Transport
from mammoth_operator.revision import Revision, revision_of, spec_of
from mammoth_operator.rollout import Past, Plan, Policy, last_ready, plan_rollout, target_of
from mammoth_operator.scaling import Shrink, scaling_conflict, shrink
from mammoth_operator.situation import Situation, hash_of
from mammoth_operator.spec import PipelineSpec, SpecError, parse
from mammoth_operator.status import news, refusal_status, rollout_status, status_of
from mammoth_operator.tuning.deciding import Ground, Tuned, tuned
from mammoth_operator.tuning.profile import NO_PROFILE, Profiled
from mammoth_operator.tuning.samples import Observed
from mammoth_operator.tuning.sizing import planned

__all__ = ["Known", "decide"]

IN_THE_WAY_S = 10.0  # no watch shows what is not ours
PROGRESS_MAX_LENGTH = 256
MEASURING_S = 10.0  # between two looks at what pods measure
WAITING_S = 2.0  # while something is under way that no watch reports
PRUNED_KINDS = ("PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "ServiceMonitor", "Service")


@dataclass(frozen=True, slots=True)
class Known:
    """What was found out beside the watches. `transports` are the latest checks by revision, `contents` are digests of referenced Secrets and ConfigMaps, `foreign` names objects of
    somebody else in the way, `accepted` see `differing`."""

    transports: Mapping[str, Transport] = field(default_factory=dict)
    contents: Mapping[str, str] = field(default_factory=dict)
    token_missing: str = ""
    foreign: tuple[str, ...] = ()
    accepted: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    profiled: Profiled = NO_PROFILE
    observed: Observed = field(default_factory=Observed)


def decide(situation: Situation, known: Known, options: Options, now: datetime) -> Decision:
    """Return what to do now."""
    parent = situation.parent
    if parent.leaving_since:
        return departure(situation, now)
    try:
        spec = check(parse(parent.spec))
    except SpecError as err:
        return _refuse(situation, "InvalidSpec", str(err), now)
    if known.foreign:
        return _refuse(situation, "NameTaken", f"in the way, and not ours: {', '.join(known.foreign)}", now)
    return _Reconcile(situation, spec, known, options, now).decision()


def _refuse(situation: Situation, reason: str, message: str, now: datetime) -> Decision:
    status = refusal_status(situation.parent, reason, message, now)
    told = any(item["type"] == "Accepted" and item["message"] == message[:512] for item in situation.parent.status.get("conditions", ()))  # fmt: skip
    event = Event(reason, message, warning=True)
    return Decision(
        status=status, events=() if told else (event,), again_s=None if reason == "InvalidSpec" else IN_THE_WAY_S
    )


class _Reconcile:
    """The values that one decision passes through, computed once, in order."""

    def __init__(self, situation: Situation, spec: PipelineSpec, known: Known, options: Options, now: datetime) -> None:
        self.situation, self.known, self.options, self.now = situation, known, options, now
        self.parent, self.previous = situation.parent, situation.parent.status
        asked_for = revision_of(spec, known.contents)
        self.pinned = self.parent.annotations.get(REVISION_ANNOTATION, "")
        target = target_of(asked_for.hash, situation.history, pinned=self.pinned, auto_rollback=spec.rollout.auto_rollback)  # fmt: skip
        self.asked, self.revision, self.spec = asked_for, asked_for, spec
        if target != asked_for.hash:
            body = situation.children["ControllerRevision", revision_name(self.parent.key.name, target)].data
            self.revision, self.spec = Revision(target, body), spec_of(body, spec)
        self.transport = known.transports.get(target)
        self.proven = situation.proven | {name for name, check in known.transports.items() if check.proven}
        self.draining = self.parent.annotations.get(DRAIN_ANNOTATION) == "true"
        self.want: dict[Pool, int] = {pool: self._want(pool) for pool in POOLS}
        self.plan = self._plan()
        self.known_ceilings = stored(self.previous.get("memoryCeilings", ()))
        killed = [child for child in situation.children.values() if child.pod] if target in self.proven else []
        self.ceilings = learned(self.known_ceilings, asked(self.spec), target, killed)
        self.tuned = self._tuned()
        self.caps = self.tuned.verdict.caps
        reported = [load.epoch for load in situation.loads.values()]
        self.epoch = epoch_of(self.caps, situation.stored_caps, [*reported, int(self.previous.get("tuning", {}).get("epoch", 0))])  # fmt: skip

    @property
    def target(self) -> str:
        return self.revision.hash

    def _want(self, pool: Pool) -> int:
        """Return how many replicas are wanted; in mode Operator the planner's last word."""
        if self.draining:
            return 0 if pool == "ar" or not self.situation.pods("ar") else self._running(pool)
        wanted = self.spec.pool(pool)
        if wanted.scaling.mode == "Operator":
            bounds = wanted.scaling.min_replicas, wanted.scaling.max_replicas
            return planned(self.previous.get("scaling", {}), pool, self._running(pool), *bounds)
        return wanted.replicas if wanted.replicas is not None else max(self._running(pool), 1)

    def _running(self, pool: Pool) -> int:
        return sum(seen.replicas for (name, _), seen in self.situation.seen.items() if name == pool)

    def _plan(self) -> Plan:
        rollout = self.spec.rollout
        return plan_rollout(
            self.target, self.want, self.situation.seen, proven=self.proven, admitted=self.situation.admitted,
            policy=Policy(rollout.max_surge, rollout.max_unavailable, rollout.strategy == "Recreate"),
        )  # fmt: skip

    def _tuned(self) -> Tuned:
        lacking = [f"{pool} {self.situation.view(pool, self.target).available}/{want}" for pool, want in self.want.items() if self.situation.view(pool, self.target).available != want]  # fmt: skip
        moving = [*([] if self.plan.done else [self.plan.step]), *lacking, *(["drained"] if self.draining else [])]
        ground = Ground(
            spec=self.spec, asked=asked(self.spec), within=within(asked(self.spec), self.ceilings), target=self.target,
            ready=self.situation.ready_pods(), loads=self.situation.loads, want=self.want, rolling=", ".join(moving),
            profiled=self.known.profiled, observed=self.known.observed,
        )  # fmt: skip
        return tuned(ground, self.previous, self.now)

    def decision(self) -> Decision:
        shrinks = {pool: self._shrink(pool) for pool in POOLS}
        view = self._view()
        pools = sorted(f"{p}-{r} {s.available}/{s.replicas}" for (p, r), s in self.situation.seen.items())
        progress = f"transport {'' if view.proven else 'not '}proven; {', '.join(pools)}"[:PROGRESS_MAX_LENGTH]
        rollout = rollout_status(self.previous.get("rollout", {}), view, progress, self.now)
        stalled = not view.plan.done and not view.paused and self._is_late(rollout["progressTime"])
        if stalled and self.spec.rollout.auto_rollback and not self.pinned and last_ready(self.situation.history, self.target):  # fmt: skip
            return self._roll_back()
        view = self._view(stalled=stalled)
        items = conditions(view)
        record = self._record(ready=items[0].status == "True" and view.plan.done)
        objects = desired_objects(self._owner(), self._wanted(shrinks, record), self.options)
        if self.known.profiled.data:
            objects.append(profile_object(self._owner(), self.known.profiled.data))
        drift, held = self._drift(objects)
        if held.fought:
            view = self._view(stalled=stalled, fought=f"changed by somebody else {len(held.times)} times in 10 minutes, last {', '.join(drift.names) or 'corrected'}")  # fmt: skip
            items = conditions(view)
        history = {**self.situation.history, self.target: Past(self.target, record.ordinal, record.outcome)}
        status = status_of(
            self.situation, self.spec, view, items, history=history, caps=self.caps, epoch=self.epoch,
            rollout=rollout, drift_times=held.times, ceilings=self.ceilings, tuning=self.tuned.verdict.status,
            capacity=self.tuned.capacity, scaling=self.tuned.scaling, now=self.now,
        )  # fmt: skip
        events = [*news_of(self.known_ceilings, self.ceilings), *self._news(status)]
        if self.spec.paused:
            return Decision(status=status, events=tuple(events))
        if drift.names and not held.hold:
            events.append(Event("DriftCorrected", f"restored {', '.join(drift.names)}"))
        told = tuple(self.situation.children["Pod", name] for each in shrinks.values() for name in each.drain)
        return Decision(
            applies=() if held.hold else drift.applies,
            scales=tuple(self._old_scales()),
            deletes=(*self._leftovers(objects), *(self.situation.children["Pod", name] for each in shrinks.values() for name in each.delete)),
            drains=told,
            limits=tuple(self._limits()),
            finalizers=self._finalizers(),
            status=status,
            events=tuple(events),
            drifted=0 if held.hold else len(drift.names),
            weighed=self.tuned.verdict.weighed,
            action=self.tuned.verdict.action,
            again_s=WAITING_S if self._is_waiting(shrinks, view) else MEASURING_S if self.spec.tuning.mode != "Off" else None,
        )  # fmt: skip

    def _view(self, *, stalled: bool = False, fought: str = "") -> View:
        loads = self.situation.loads
        ready = self.situation.ready_pods()
        failed = self.asked.hash if self.target != self.asked.hash and not self.pinned else ""
        return View(
            target=self.target,
            want=self.want,
            pools={pool: self.situation.view(pool, self.target) for pool in POOLS},
            plan=self.plan,
            admitted=self.situation.admitted,
            proven=self.target in self.proven,
            transport=self.transport,
            paused=self.spec.paused,
            draining=self.draining,
            stalled=stalled,
            rolled_back_from=failed,
            pinned=bool(self.pinned) and self.pinned == self.target,
            was_complete=self.previous.get("currentRevision") == self.target,
            token_missing=self.known.token_missing,
            digests=frozenset(loads[pod.uid].model_digest for pod in ready if pod.uid in loads and loads[pod.uid].model_digest and hash_of(pod) == self.target),
            scaling_conflict=scaling_conflict(self.parent, self.spec),
            drift_fought=fought,
            slo_burning=self.tuned.burning,
            tuning_reverted=self.tuned.reverted,
            tuning=self.tuned.verdict.condition,
            acked=(sum(self._has_acked(pod) for pod in ready), len(ready)),
        )  # fmt: skip

    def _news(self, status: Mapping[str, Any]) -> list[Event]:
        """Return what is new; the tuner tells its own changes of the caps."""
        told = self.tuned.verdict.events
        return [
            *told,
            *(event for event in news(self.previous, status) if not (told and event.reason == "TuningApplied")),
        ]

    def _is_late(self, since: str) -> bool:
        limit = timedelta(seconds=self.spec.rollout.progress_deadline_seconds)
        return self.now - datetime.fromisoformat(since) >= limit

    def _roll_back(self) -> Decision:
        """Mark the target as failed; what follows from that is decided when it is so."""
        record = Record(self._record(ready=False).ordinal, "failed", self.target in self.proven)
        manifest = record_object(self._owner(), self.spec, self.revision, record)
        message = f"{self.target}: {self.plan.step}: no progress in {self.spec.rollout.progress_deadline_seconds} s"
        progressing = next(item for item in conditions(self._view(stalled=True)) if item.type == "Progressing")
        items = merged(self.now, self.parent.generation, [progressing], self.previous.get("conditions", ()))
        return Decision(
            applies=(manifest,),
            status={**self.previous, "conditions": items},
            events=(Event("DeadlineExceeded", message, warning=True),),
            again_s=0.0,
        )

    def _record(self, *, ready: bool) -> Record:
        """Return what is to be recorded of the target: the newest ordinal, and how it fared."""
        history = self.situation.history
        known = history.get(self.target, Past(self.target, 0))
        newest = max((past.ordinal for past in history.values()), default=0)
        outcome = "ready" if ready else known.outcome
        return Record(known.ordinal if known.ordinal == newest and newest else newest + 1, outcome, self.target in self.proven)  # fmt: skip

    def _owner(self) -> Owner:
        return Owner(self.parent.key.namespace, self.parent.key.name, self.parent.uid)

    def _shrink(self, pool: Pool) -> Shrink:
        """Return the next step of the target's pool towards the planned number."""
        planned = self.plan.replicas[pool, self.target]
        deployment = self.situation.deployment(pool, self.target)
        if deployment is None or self.draining:
            return Shrink(planned)
        return shrink(
            deployment.replicas, planned, self.situation.pods(pool, self.target), self.situation.loads, self.now,
            self.spec.pool(pool).drain_seconds,
        )  # fmt: skip

    def _wanted(self, shrinks: Mapping[Pool, Shrink], record: Record) -> Wanted:
        replicas: dict[Pool, int | None] = {
            pool: None if self._is_external(pool) and self.plan.done else shrinks[pool].replicas for pool in POOLS
        }
        return Wanted(self.spec, self.revision, record, replicas, self.plan.admit or None, self.caps, self.epoch)

    def _is_external(self, pool: Pool) -> bool:
        wanted = self.spec.pool(pool)
        return wanted.scaling.mode == "External" and wanted.replicas is None

    def _drift(self, objects: Sequence[Manifest]) -> tuple[Drift, Fight]:
        settled = (
            self.previous.get("targetRevision") == self.target
            and self.previous.get("observedGeneration") == self.parent.generation
            and not self.situation.strangers
        )
        drift = differing(objects, self.situation.children, settled=settled, accepted=self.known.accepted)
        return drift, fight(drift.names, self.previous.get("drift", {}).get("times", ()), self.now)

    def _old_scales(self) -> list[tuple[Child, int]]:
        scales = []
        for (pool, revision), count in self.plan.replicas.items():
            deployment = self.situation.deployment(pool, revision)
            if revision != self.target and deployment and not deployment.leaving and deployment.replicas != count:
                scales.append((deployment, count))
        return scales

    def _leftovers(self, objects: Sequence[Manifest]) -> list[Child]:
        """Return what nobody needs any more: old Deployments without pods, their Services, records beyond the limit."""
        named = {(item["kind"], item["metadata"]["name"]) for item in objects}
        held = {revision for (_, revision), seen in self.situation.seen.items() if seen.held}
        history = sorted(self.situation.history.values(), key=lambda past: -past.ordinal)
        old = [past.hash for past in history if past.hash not in held | {self.target, self.asked.hash}]
        forgotten = set(old[self.spec.revision_history_limit :])
        out = []
        for key, child in self.situation.children.items():
            revision = hash_of(child)
            if key in named or child.leaving or child.pod:
                continue
            if child.kind == "ControllerRevision":
                unneeded = revision in forgotten
            elif revision:
                unneeded = revision not in held and (child.kind != "Deployment" or child.replicas == 0)
            else:
                unneeded = child.kind in PRUNED_KINDS
            if unneeded:
                out.append(child)
        return out

    def _limits(self) -> list[LimitsCall]:
        calls = []
        for pod in self.situation.ready_pods():
            if pod.uid in self.situation.loads and not self._has_acked(pod):
                cap, wait_ms = self._cap_of(pod)
                calls.append(LimitsCall(pod, self.epoch, cap, wait_ms))
        return calls

    def _cap_of(self, pod: Child) -> tuple[int, float | None]:
        assert pod.pod is not None
        cap, wait_ms = self.caps.of("ar" if pod.pod.pool == "ar" else "dit")
        return min(cap, self.situation.loads[pod.uid].capacity), wait_ms

    def _has_acked(self, pod: Child) -> bool:
        load = self.situation.loads.get(pod.uid)
        return load is not None and load.epoch == self.epoch and (load.max_num_seqs, load.wait_ms) == self._cap_of(pod)

    def _finalizers(self) -> tuple[str, ...] | None:
        ours = finalizers_wanted(self.situation, self.spec.deletion_policy)
        held = tuple(name for name in self.parent.finalizers if name.startswith("mammoth.dev/"))
        return None if ours == held else ours

    def _is_waiting(self, shrinks: Mapping[Pool, Shrink], view: View) -> bool:
        unproven = view.transport is not None and not view.transport.proven
        return any(each.waiting for each in shrinks.values()) or unproven or view.acked[0] < view.acked[1]
