"""Decide: whether a spec that the API server took can be carried out; what the processes of this version cannot do is refused.

Nothing is accepted and then ignored.
"""

from __future__ import annotations

from mammoth_operator.names import POOLS
from mammoth_operator.overrides import override_faults
from mammoth_operator.spec import PipelineSpec, SpecError

__all__ = ["check"]

CHUNK_ROWS = 64


def check(spec: PipelineSpec) -> PipelineSpec:
    """Return `spec`. Raises SpecError naming each field that is not allowed or that this version cannot honour."""
    faults = [fault for pool in POOLS for fault in override_faults(spec.pool(pool).pod_overrides, f"spec.{pool}.podOverrides")]  # fmt: skip
    faults += [(field, f"this version cannot do it: {text}") for refused, field, text in _limits(spec) if refused]
    if faults:
        raise SpecError(faults)
    return spec


def _limits(spec: PipelineSpec) -> tuple[tuple[bool, str, str], ...]:
    transport, seen = spec.transport, spec.observability
    return (
        (transport.chunk_rows != CHUNK_ROWS, "spec.transport.chunkRows", f"rows travel {CHUNK_ROWS} at a time"),
        (transport.max_inflight_bytes_per_stream is not None, "spec.transport.maxInflightBytesPerStream", "flow control is HTTP/2's"),
        (transport.tls.mode != "Disabled", "spec.transport.tls.mode", "the stages speak plain text; use Disabled"),
        (spec.endpoint.openai_compat.enabled, "spec.endpoint.openaiCompat.enabled", "there is no HTTP endpoint"),
        (seen.tracing is not None, "spec.observability.tracing", "the stages do not trace"),
        (seen.dashboards, "spec.observability.dashboards", "there are no dashboards"),
    )  # fmt: skip
