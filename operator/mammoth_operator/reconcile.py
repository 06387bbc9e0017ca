"""Do: one reconcile: gather what is needed, decide, act in order. What is remembered here saves requests and decides nothing."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any

from mammoth_operator.acting import Actor
from mammoth_operator.cluster import Cluster
from mammoth_operator.control import Control
from mammoth_operator.decide import Known, decide
from mammoth_operator.decision import Decision, Event
from mammoth_operator.errors import PermanentError
from mammoth_operator.index import Index
from mammoth_operator.manifests import Options
from mammoth_operator.names import APPLIED_ANNOTATION, DEPLOYMENT_LABEL, Key, profile_name
from mammoth_operator.observed import Child, Parent
from mammoth_operator.reports import Transport
from mammoth_operator.revision import digest, references
from mammoth_operator.situation import Situation, situation_of
from mammoth_operator.spec import MAX_PIXELS, PipelineSpec, SpecError, parse
from mammoth_operator.status import refusal_status
from mammoth_operator.tuning.measuring import Profiler
from mammoth_operator.tuning.observing import Observer, OnPicture
from mammoth_operator.tuning.probing import square
from mammoth_operator.tuning.profile import Profiled

__all__ = ["Reconciler"]

PERIOD_S, JITTER_S = 30.0, 6.0
REFUSED_PERIOD_S = 300.0
AFTER_ACTING_S = 0.1  # what was written is the next decision's ground, and no watch will say so again
RECHECK_S = {True: 300.0, False: 5.0}  # by whether the transport of a revision is proven
CONTENT_S = 20.0

logger = logging.getLogger(__name__)


class Reconciler:
    """Brings objects to where their specs want them. `spawn` runs a check beside it; `wake` asks for another reconcile."""

    def __init__(
        self,
        cluster: Cluster,
        control: Control,
        index: Index,
        options: Options,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        wake: Callable[[Key], None],
        drifted: Callable[[int], None] = lambda count: None,
        on_picture: OnPicture = lambda key, sample: None,
        on_tuned: Callable[[str], None] = lambda action: None,
    ) -> None:
        self._cluster, self._control, self._index, self._options = cluster, control, index, options
        self._spawn, self._wake, self._drifted, self._on_tuned = spawn, wake, drifted, on_tuned
        self._actor = Actor(cluster, control, index)
        self._observer = Observer(on_picture)
        self._profiler = Profiler(control, spawn=spawn, wake=wake)
        self._transports: dict[tuple[Key, str], tuple[float, Transport | None]] = {}
        self._contents: dict[tuple[str, str, str], tuple[float, Mapping[str, str] | None]] = {}

    async def run(self, key: Key) -> float | None:
        """Reconcile `key` and return after how many seconds to do it again; None when it is gone. Raises TransientError."""
        parent = self._index.parent(key)
        if parent is None:
            self._forget(key)
            return None
        situation = await self._situation(parent)
        known = await self._known(situation)
        decision = decide(situation, known, self._options, datetime.now(UTC))
        if decision.weighed:
            self._observer.weighed(key, time.time())
            self._on_tuned(decision.action)
        foreign, learned = await self._in_the_way(parent, decision)
        if learned:
            return 0.0  # a child that no watch had shown yet: look again
        if foreign:
            refusing = Known(foreign=tuple(foreign))
            decision = decide(situation, refusing, self._options, datetime.now(UTC))
        try:
            later_s = await self._actor.act(parent, decision)
        except PermanentError as err:
            await self._report(parent, err)
            return REFUSED_PERIOD_S
        self._drifted(decision.drifted)
        usual_s = PERIOD_S + random.uniform(-JITTER_S, JITTER_S)
        acted_s = AFTER_ACTING_S if decision.applies or decision.scales or decision.drains else None
        return min(wait for wait in (usual_s, decision.again_s, acted_s, later_s) if wait is not None)

    async def _situation(self, parent: Parent) -> Situation:
        children = self._index.children(parent.key)
        bare = situation_of(parent, children, {})
        asked = [child for child in bare.children.values() if _can_answer(child)]
        return situation_of(parent, children, await self._control.loads(asked, self._observer.after(parent.key)))

    async def _known(self, situation: Situation) -> Known:
        """Find out what the watches do not show."""
        parent = situation.parent
        try:
            spec = parse(parent.spec)
        except SpecError:
            return Known()
        if parent.leaving_since:
            return Known()
        return Known(
            transports=self._checks(situation),
            contents=await self._digests(parent.key.namespace, spec),
            token_missing=await self._token_missing(parent.key.namespace, spec),
            accepted=self._actor.accepted,
            observed=self._observer.take(parent.key, situation.pods("ar"), situation.loads, time.time()),
            profiled=self._profiled(situation, spec),
        )

    def _profiled(self, situation: Situation, spec: PipelineSpec) -> Profiled:
        """Return what is known of the hardware of the newest pair of pods, and have it measured when nothing is."""
        parent = situation.parent
        stored = situation.children.get(("ConfigMap", profile_name(parent.key.name)))
        pairs = situation.transport_pairs()
        pair = pairs.get(str(parent.status.get("targetRevision", "")))
        # a class that says nothing has the largest: that is no size to measure
        wanted = [square(item.max_pixels) for item in spec.tuning.slo_classes if item.max_pixels < MAX_PIXELS]
        return self._profiler.of(parent.key, pair, situation.loads, stored.data if stored else {}, wanted)

    def _checks(self, situation: Situation) -> dict[str, Transport]:
        """Return the latest transport checks, and start those that are due."""
        key, now = situation.parent.key, time.monotonic()
        out = {}
        for revision, (ar, dit) in situation.transport_pairs().items():
            proven = revision in situation.proven
            checked, result = self._transports.get((key, revision), (now if proven else -RECHECK_S[False], None))
            if now - checked >= RECHECK_S[proven]:
                checked = now
                self._spawn(self._check(key, revision, ar, dit))
            self._transports[key, revision] = (checked, result)
            if result is not None:
                out[revision] = result
        return out

    async def _check(self, key: Key, revision: str, ar: Child, dit: Child) -> None:
        result = await self._control.check_transport(revision, ar, dit)
        logger.info(
            "transport",
            extra={"key": str(key), "revision": revision, "proven": result.proven, "message_": result.message},
        )
        self._transports[key, revision] = (time.monotonic(), result)
        self._wake(key)

    async def _digests(self, namespace: str, spec: PipelineSpec) -> dict[str, str]:
        out = {}
        for reference in sorted(references(spec), key=lambda item: (item.kind, item.name)):
            data = await self._content(reference.kind, namespace, reference.name)
            out[f"{reference.kind}/{reference.name}"] = "missing" if data is None else digest(dict(data))[:16]
        return out

    async def _token_missing(self, namespace: str, spec: PipelineSpec) -> str:
        secret = spec.model.token_secret_ref
        if secret is None or spec.model.source.hub is None:
            return ""
        data = await self._content("Secret", namespace, secret.name)
        return "" if data and secret.key in data else f"Secret {secret.name} has no key {secret.key}"

    async def _content(self, kind: str, namespace: str, name: str) -> Mapping[str, str] | None:
        """Return the data of a Secret or ConfigMap, as digests, so that nothing secret is kept."""
        known = self._contents.get((kind, namespace, name))
        if known and time.monotonic() - known[0] < CONTENT_S:
            return known[1]
        raw = await self._cluster.get(kind, namespace, name)
        data = None if raw is None else {key: digest(value) for key, value in (raw.get("data") or {}).items()}
        self._contents[kind, namespace, name] = (time.monotonic(), data)
        return data

    async def _in_the_way(self, parent: Parent, decision: Decision) -> tuple[list[str], bool]:
        """Return what of others holds a name that is about to be taken, and whether something of ours came to light."""
        children = self._index.children(parent.key)
        foreign, learned = [], False
        for manifest in decision.applies:
            name = manifest["metadata"]["name"]
            child = children.get((manifest["kind"], name))
            if child is not None and child.owner_uid in (parent.uid, ""):
                continue
            raw = await self._cluster.get(manifest["kind"], parent.key.namespace, name)
            if raw is None:
                continue
            if _is_ours(raw, parent):
                self._index.see(raw)
                learned = True
            else:
                foreign.append(f"{manifest['kind']} {name}")
        return foreign, learned

    async def _report(self, parent: Parent, err: PermanentError) -> None:
        """Say on the object what the API server refuses, since trying again changes nothing."""
        logger.error("refused", extra={"key": str(parent.key), "error": str(err)})
        status = refusal_status(parent, "ApplyFailed", str(err), datetime.now(UTC))
        await self._actor.act(parent, Decision(status=status, events=(Event("ApplyFailed", str(err), warning=True),)))

    def _forget(self, key: Key) -> None:
        for entry in [entry for entry in self._transports if entry[0] == key]:
            del self._transports[entry]
        self._observer.forget(key)
        self._actor.forget(key)


def _can_answer(child: Child) -> bool:
    pod = child.pod
    return bool(pod and pod.ip and (pod.ready or pod.draining_since) and not pod.finished)


def _is_ours(raw: Mapping[str, Any], parent: Parent) -> bool:
    meta = raw["metadata"]
    owners = [ref for ref in meta.get("ownerReferences", ()) if ref.get("controller")]
    if owners:
        return bool(owners[0]["uid"] == parent.uid)
    return meta.get("labels", {}).get(DEPLOYMENT_LABEL) == parent.key.name and APPLIED_ANNOTATION in meta.get(
        "annotations", {}
    )
