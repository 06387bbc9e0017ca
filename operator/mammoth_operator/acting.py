"""Do: carry a decision out, in order: objects, pods, Events, status. Status is written only when it says something new."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mammoth_operator.cluster import Cluster
from mammoth_operator.conditions import stamp
from mammoth_operator.control import Control
from mammoth_operator.decision import Decision, Event
from mammoth_operator.errors import Conflict, Missing, PermanentError, TransientError
from mammoth_operator.index import Index
from mammoth_operator.names import (
    API_VERSION,
    APPLIED_ANNOTATION,
    DELETION_COST_ANNOTATION,
    DRAINING_ANNOTATION,
    KIND,
    MANAGER,
    POOLS,
    Key,
)
from mammoth_operator.observed import Child, Parent, child_of, sent_digest
from mammoth_operator.revision import digest

__all__ = ["Actor"]

STATUS_PERIOD_S = 5.0  # between writes that only move counters
OPTIONAL_KINDS = ("PodMonitor", "ServiceMonitor")
LEAVES_FIRST = "-1000"
INVALID = 422


class Actor:
    """Carries out decisions. `accepted` holds what the API server made of objects that it stores otherwise than they are sent."""

    def __init__(self, cluster: Cluster, control: Control, index: Index) -> None:
        self._cluster, self._control, self._index = cluster, control, index
        self.accepted: dict[str, tuple[str, str]] = {}
        self._status_written: dict[Key, float] = {}

    async def act(self, parent: Parent, decision: Decision) -> float | None:
        """Do it all; return after how many seconds a put-off status is due. Raises ApiError."""
        for manifest in decision.applies:
            await self._apply(parent, manifest)
        await asyncio.gather(*(self._control.set_limits(call.pod, call.epoch, call.max_num_seqs, call.wait_ms) for call in decision.limits))  # fmt: skip
        for pod in decision.drains:
            await self._drain(pod)
        for child, replicas in decision.scales:
            self._see(await self._cluster.merge(child.kind, child.namespace, child.name, {"spec": {"replicas": replicas}}, uid=child.uid))  # fmt: skip
        for child in decision.deletes:
            await self._cluster.delete(child.kind, child.namespace, child.name, uid=child.uid)
        for (
            event
        ) in decision.events:  # before the status, which says that they were told: none is lost, a repeated one counts
            await self._tell(parent, event)
        later_s = await self._write_status(parent, decision.status)
        if decision.finalizers is not None:
            await self._finalize(parent, decision.finalizers)
        return later_s

    def forget(self, key: Key) -> None:
        self._status_written.pop(key, None)

    async def _apply(self, parent: Parent, manifest: Mapping[str, Any]) -> None:
        child = self._index.children(parent.key).get((manifest["kind"], manifest["metadata"]["name"]))
        if child is not None and child.owner_uid not in (parent.uid, ""):
            raise Conflict(f"{child.kind} {child.name} still belongs to a former object of this name")
        try:
            raw = await self._forced(manifest, child) if child else await self._cluster.apply(manifest)
        except Missing:
            if manifest["kind"] in OPTIONAL_KINDS:
                return  # its kind is not installed here
            raise TransientError(f"{manifest['kind']} {manifest['metadata']['name']} cannot be applied yet") from None
        self._see(raw)
        made = child_of(raw)
        if made.owned != sent_digest(manifest):
            self.accepted[made.uid] = (manifest["metadata"]["annotations"][APPLIED_ANNOTATION], made.owned)

    async def _forced(self, manifest: Mapping[str, Any], child: Child) -> dict[str, Any]:
        """Apply over what others wrote. A list entry of theirs that makes ours invalid can only be replaced with its list."""
        try:
            return await self._cluster.apply(manifest, uid=child.uid)
        except PermanentError as err:
            if err.status != INVALID:
                raise
        body = {key: manifest[key] for key in ("spec", "data") if key in manifest}
        await self._cluster.merge(child.kind, child.namespace, child.name, body, uid=child.uid)
        try:
            return await self._cluster.apply(manifest, uid=child.uid)
        except PermanentError as err:
            raise Conflict(f"{child.kind} {child.name} was changed again meanwhile: {err}") from err

    async def _drain(self, pod: Child) -> None:
        """Mark a pod, so that the mark outlives us, and tell it; it leaves first when its Deployment shrinks."""
        marks = {DRAINING_ANNOTATION: stamp(datetime.now(UTC)), DELETION_COST_ANNOTATION: LEAVES_FIRST}
        self._see(await self._cluster.merge("Pod", pod.namespace, pod.name, {"metadata": {"annotations": marks}}, uid=pod.uid))  # fmt: skip
        await self._control.drain(pod)

    async def _write_status(self, parent: Parent, status: Mapping[str, Any]) -> float | None:
        if not status or status == parent.status:
            return None
        since_s = time.monotonic() - self._status_written.get(parent.key, -STATUS_PERIOD_S)
        if _counters_aside(status) == _counters_aside(parent.status) and since_s < STATUS_PERIOD_S:
            return STATUS_PERIOD_S - since_s
        self._see(await self._cluster.apply_status(parent, status))
        self._status_written[parent.key] = time.monotonic()
        return None

    async def _finalize(self, parent: Parent, finalizers: tuple[str, ...]) -> None:
        try:
            self._see(await self._cluster.apply_finalizers(parent, finalizers))
        except Missing:
            return  # gone already

    async def _tell(self, parent: Parent, event: Event) -> None:
        """Post an Event; the same one again only counts."""
        now = stamp(datetime.now(UTC))
        name = f"{parent.key.name}.{digest([parent.uid, event.reason, event.message])[:16]}"
        manifest = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": parent.key.namespace},
            "involvedObject": {"apiVersion": API_VERSION, "kind": KIND, "namespace": parent.key.namespace, "name": parent.key.name, "uid": parent.uid},
            "reason": event.reason,
            "message": event.message[:1000],
            "type": "Warning" if event.warning else "Normal",
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }  # fmt: skip
        try:
            await self._cluster.create(manifest)
        except Conflict:
            known = await self._cluster.get("Event", parent.key.namespace, name)
            if known is not None:
                patch = {"count": known.get("count", 1) + 1, "lastTimestamp": now}
                await self._cluster.merge("Event", parent.key.namespace, name, patch, uid=known["metadata"]["uid"])

    def _see(self, raw: Mapping[str, Any]) -> None:
        self._index.see(raw)


def _counters_aside(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is written at once when it changes."""
    out = dict(status)
    for pool in POOLS:
        out[pool] = {key: value for key, value in status.get(pool, {}).items() if key not in ("inflight", "queueDepth")}
    return out
