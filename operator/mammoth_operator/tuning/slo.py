"""Decide which promise a picture falls under, and whether it was kept: what burn rates are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mammoth_operator.spec import MAX_PIXELS, MAX_STEPS
from mammoth_operator.tuning.objective import Promise, class_of
from mammoth_operator.tuning.samples import Sample

__all__ = ["Result", "promises_of", "result_of"]

Result = Literal["kept", "late", "failed"]


def promises_of(spec: Mapping[str, Any]) -> tuple[Promise, ...]:
    """Return the promises of a spec as it is written, which the schema has checked."""
    classes = (spec.get("tuning") or {}).get("sloClasses") or ()
    return tuple(
        Promise(item["name"], item["p95Seconds"], item.get("maxPixels", MAX_PIXELS), item.get("maxSteps", MAX_STEPS))
        for item in classes
    )


def result_of(sample: Sample, promises: tuple[Promise, ...]) -> tuple[str, Result] | None:
    """Return (class, result) of a picture; None when it falls under no promise."""
    name = class_of(sample.ask, promises)
    promise = next((promise for promise in promises if promise.name == name), None)
    if promise is None:
        return None
    if sample.failed:
        return name, "failed"
    return name, "kept" if sample.latency_s <= promise.p95_s else "late"
