"""Decide: the schema of `status`. Every list and string is bounded, so that an object stays under 32 KiB."""

from __future__ import annotations

from typing import Any

__all__ = ["MESSAGE_MAX_LENGTH", "status_schema"]

Schema = dict[str, Any]
MESSAGE_MAX_LENGTH = 512
PHASES = ["Pending", "Loading", "Ready", "Updating", "Degraded", "Paused", "Deleting"]


def _text(max_length: int = 128) -> Schema:
    return {"type": "string", "maxLength": max_length}


def _time() -> Schema:
    return {"type": "string", "format": "date-time"}


def _count() -> Schema:
    return {"type": "integer", "minimum": 0}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


def _list(item: Schema, max_items: int, *keys: str) -> Schema:
    kind: Schema = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)} if keys else {"x-kubernetes-list-type": "atomic"}  # fmt: skip
    return {"type": "array", "maxItems": max_items, "items": item, **kind}


def _condition() -> Schema:
    schema = _object(
        type=_text(64),
        status={"type": "string", "enum": ["True", "False", "Unknown"]},
        reason={**_text(64), "pattern": "^[A-Za-z]([A-Za-z0-9]*)$"},
        message=_text(MESSAGE_MAX_LENGTH),
        lastTransitionTime=_time(),
        observedGeneration={"type": "integer", "format": "int64"},
    )
    return {**schema, "required": ["type", "status", "reason", "message", "lastTransitionTime"]}


def _pool() -> Schema:
    return _object(
        desired=_count(), replicas=_count(), current=_count(), updated=_count(), ready=_count(), available=_count(),
        inflight=_count(), queueDepth=_count(), summary=_text(16), selector=_text(256), blockedReason=_text(MESSAGE_MAX_LENGTH),
    )  # fmt: skip


def _caps() -> Schema:
    return _object(arMaxNumSeqs=_count(), ditMaxNumSeqs=_count(), requestBatchMaxWaitMs={"type": "number"})


def _tuning() -> Schema:
    decision = _object(
        time=_time(), knob=_text(32), **{"from": {"type": "number"}}, to={"type": "number"}, reason=_text(),
        evidence=_text(MESSAGE_MAX_LENGTH), outcome=_text(16), p95Before={"type": "number"}, p95Expected={"type": "number"},
        p95After={"type": "number"},
    )  # fmt: skip
    return _object(
        mode=_text(16), epoch=_count(), applied=_caps(), recommended=_caps(), acked=_text(16), lastDecision=decision,
        history=_list(decision, 10), frozenUntil=_time(), asked=_caps(), tuned=_caps(), said=_text(MESSAGE_MAX_LENGTH),
    )  # fmt: skip


def _ceiling() -> Schema:
    schema = _object(pool=_text(8), maxNumSeqs=_count(), asked=_count(), revision=_text(16), time=_time(), pod=_text(253))  # fmt: skip
    return {**schema, "required": list(schema["properties"])}


def _capacity() -> Schema:
    return _object(
        imagesPerHour={"type": "number"}, profileTime=_time(), gpu=_text(), basis=_text(16),
        p95Seconds=_list({**_object(name=_text(32), seconds={"type": "number"}), "required": ["name"]}, 16, "name"),
        waves=_list({**_object(size=_text(16), pictureMs={"type": "number"}, fixedMs={"type": "number"}, missPercent={"type": "number"}), "required": ["size"]}, 8, "size"),
    )  # fmt: skip


def status_schema() -> Schema:
    """Return the schema of `status`."""
    revision = _object(hash=_text(16), time=_time(), outcome=_text(16), arImage=_text(512), ditImage=_text(512), model=_text(512))  # fmt: skip
    return {
        **_object(
            observedGeneration={"type": "integer", "format": "int64"},
            phase={"type": "string", "enum": PHASES},
            conditions=_list(_condition(), 16, "type"),
            endpoint=_text(256),
            currentRevision=_text(16),
            targetRevision=_text(16),
            revisions=_list({**revision, "required": ["hash"]}, 21, "hash"),
            model=_object(resolvedRevision=_text(), bytes=_count(), path=_text(512)),
            effective=_object(caps=_caps(), arReplicas=_count(), ditReplicas=_count()),
            ar=_pool(),
            dit=_pool(),
            tuning=_tuning(),
            memoryCeilings=_list(_ceiling(), 2, "pool"),
            capacity=_capacity(),
            scaling=_object(
                ar=_count(),
                dit=_count(),
                time=_time(),
                reason=_text(32),
                message=_text(MESSAGE_MAX_LENGTH),
                needs=_list(_object(time=_time(), ar=_count(), dit=_count(), perSecond={"type": "number"}), 12),
            ),
            rollout=_object(
                target=_text(16),
                step=_text(MESSAGE_MAX_LENGTH),
                progress=_text(256),
                progressTime=_time(),
                rolledBackFrom=_text(16),
            ),
            drift=_object(times=_list(_time(), 6), message=_text(MESSAGE_MAX_LENGTH)),
            lastFailure=_object(time=_time(), pod=_text(253), reason=_text(64), message=_text(MESSAGE_MAX_LENGTH)),
        ),
        "description": "What was seen, and what is being done about it.",
    }
