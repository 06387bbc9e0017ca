"""Translate: the error vocabulary and its gRPC status table, read in both directions.

An error on the wire is keyed by (status code, ErrorInfo.reason); field violations travel as BadRequest, retry hints as
RetryInfo, everything else as ErrorInfo metadata. Trailers stay under 4 KiB.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from mammoth_wire.durations import duration, seconds

__all__ = [
    "AlreadyRunning", "Cancelled", "ContractMismatch", "DataLoss", "DeadlineExceeded", "DeadlineUnreachable",
    "EngineFailed", "InvalidRequest", "MammothError", "NotFound", "Overloaded", "ShapeTooLarge", "StaleEpoch",
    "Unavailable", "abort", "as_status", "from_packed", "from_rpc_error", "from_status", "to_status",
]  # fmt: skip

DOMAIN = "mammoth.dev"
DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_BYTES = 1000
MAX_VIOLATIONS = 6
MAX_TEXT_BYTES = 200

logger = logging.getLogger(__name__)


class MammothError(Exception):
    """Anything a caller can be told.

    `violations` are (field, text) pairs, `retry_after_s` a hint when trying again makes sense, `metadata` short strings.
    """

    status: ClassVar[grpc.StatusCode]
    reason: ClassVar[str]

    def __init__(
        self,
        message: str,
        *,
        violations: Iterable[tuple[str, str]] = (),
        retry_after_s: float | None = None,
        **metadata: str,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s
        self.metadata: Mapping[str, str] = metadata


class InvalidRequest(MammothError):
    """The caller's fault: each violation names a field and what it may be. Never retried."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_FIELD"

    def __init__(self, violations: Iterable[tuple[str, str]], **metadata: str) -> None:
        violations = tuple(violations)
        message = "; ".join(f"{field}: {text}" for field, text in violations)
        super().__init__(message, violations=violations, retry_after_s=None, **metadata)


class Overloaded(MammothError):
    """No room now: queue or memory is full. Try again after `retry_after_s`."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUEUE_FULL"


class ShapeTooLarge(MammothError):
    """The picture does not fit this device even alone; metadata `limit` says what does."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "SHAPE_TOO_LARGE"


class DeadlineUnreachable(MammothError):
    """Refused at once: the work ahead takes longer than the caller allows; metadata `eta_s`."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "DEADLINE_UNREACHABLE"


class ContractMismatch(MammothError):
    """The two stages do not serve the same model and row layout; metadata `ours`, `theirs`."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "CONTRACT_MISMATCH"


class StaleEpoch(MammothError):
    """Limits of an older epoch than the one in force; metadata `epoch`."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    reason = "STALE_EPOCH"


class Unavailable(MammothError):
    """Draining, or no replica answers. Try again after `retry_after_s`, elsewhere if there is an elsewhere."""

    status = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"


class DeadlineExceeded(MammothError):
    """The deadline passed; metadata `stage` says where the request was."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class Cancelled(MammothError):
    """The caller left."""

    status = grpc.StatusCode.CANCELLED
    reason = "CANCELLED"


class AlreadyRunning(MammothError):
    """A request of this id is running."""

    status = grpc.StatusCode.ALREADY_EXISTS
    reason = "REQUEST_RUNNING"


class DataLoss(MammothError):
    """Rows arrived damaged; metadata `part` and `chunk` say where. Replaying them may help."""

    status = grpc.StatusCode.DATA_LOSS
    reason = "DATA_LOSS"


class NotFound(MammothError):
    """Nothing of this id is known."""

    status = grpc.StatusCode.NOT_FOUND
    reason = "UNKNOWN_ID"


class EngineFailed(MammothError):
    """Ours: this request failed for a reason that is not the caller's; metadata `error_id` finds the log line."""

    status = grpc.StatusCode.INTERNAL
    reason = "ENGINE_FAILED"


ERRORS: Mapping[tuple[grpc.StatusCode, str], type[MammothError]] = {
    (kind.status, kind.reason): kind
    for kind in (InvalidRequest, Overloaded, ShapeTooLarge, DeadlineUnreachable, ContractMismatch, StaleEpoch, Unavailable,
                 DeadlineExceeded, Cancelled, AlreadyRunning, DataLoss, NotFound, EngineFailed)
}  # fmt: skip
CODES = {code.value[0]: code for code in grpc.StatusCode}
# What a status means when it carries no reason of ours: the transport or a proxy raised it.
FOREIGN: Mapping[grpc.StatusCode, type[MammothError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: EngineFailed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.NOT_FOUND: NotFound,
}


def to_status(err: MammothError) -> status_pb2.Status:
    """Return `err` as google.rpc.Status, shortened so that the trailers stay under 4 KiB."""
    metadata = {key: _short(value, MAX_TEXT_BYTES) for key, value in err.metadata.items()}
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=err.reason, domain=DOMAIN, metadata=metadata)]
    if err.violations:
        bad = error_details_pb2.BadRequest()
        for field, text in err.violations[:MAX_VIOLATIONS]:
            bad.field_violations.add(field=_short(field, MAX_TEXT_BYTES), description=_short(text, MAX_TEXT_BYTES))
        details.append(bad)
    if err.retry_after_s is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=duration(err.retry_after_s)))
    status = status_pb2.Status(code=err.status.value[0], message=_short(err.message, MAX_MESSAGE_BYTES))
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _short(text: str, max_bytes: int) -> str:
    """Cut `text` so that it takes at most `max_bytes` in a trailer, where a byte that is not ASCII takes three."""
    spent = 0
    for index, char in enumerate(text):
        spent += 1 if " " <= char <= "~" else 3 * len(char.encode(errors="replace"))
        if spent > max_bytes:
            return text[:index]
    return text


def from_status(code: grpc.StatusCode, message: str, status: status_pb2.Status | None) -> MammothError:
    """Return the error that `to_status` wrote, or the nearest one for a status that is not ours."""
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    retry_after_s: float | None = None
    for detail in status.details if status else ():
        for target in (info, bad, retry):
            if detail.Is(target.DESCRIPTOR):
                detail.Unpack(target)
        if detail.Is(retry.DESCRIPTOR):
            retry_after_s = seconds(retry.retry_delay)
    ours = ERRORS.get((code, info.reason)) if info.domain == DOMAIN else None
    kind = ours or FOREIGN.get(code, EngineFailed)
    error = kind.__new__(kind)  # a subclass may have a narrower constructor; the wire carries the base's fields
    violations = [(violation.field, violation.description) for violation in bad.field_violations]
    MammothError.__init__(error, message or code.name, violations=violations, retry_after_s=retry_after_s)
    error.metadata = dict(info.metadata)
    return error


def from_packed(packed: bytes) -> MammothError:
    """Return the error in a serialised google.rpc.Status."""
    status = status_pb2.Status.FromString(packed)
    return from_status(CODES.get(status.code, grpc.StatusCode.UNKNOWN), status.message, status)


def from_rpc_error(err: grpc.RpcError | grpc.aio.AioRpcError) -> MammothError:
    """Return the typed error behind a failed call, of the blocking or the asyncio API."""
    trailing: Any = err.trailing_metadata() or ()
    trailers: dict[str, Any] = dict(trailing)
    packed = trailers.get(DETAILS_KEY)
    status = status_pb2.Status.FromString(packed) if isinstance(packed, bytes) else None
    return from_status(err.code(), err.details() or "", status)


async def abort(context: grpc.aio.ServicerContext[Any, Any], err: MammothError) -> None:
    """End the call with the status of `err` and its details. Never returns normally."""
    packed = to_status(err).SerializeToString()
    await context.abort(err.status, _short(err.message, MAX_MESSAGE_BYTES), ((DETAILS_KEY, packed),))


@asynccontextmanager
async def as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """End the call with the status of a MammothError; log any other exception under an id and tell the caller the id."""
    try:
        yield
    except MammothError as err:
        await abort(context, err)
    except grpc.aio.AbortError:
        raise
    except Exception:
        error_id = uuid.uuid4().hex[:12]
        logger.exception("internal error", extra={"error_id": error_id})
        await abort(context, EngineFailed(f"internal error {error_id}", error_id=error_id))
        raise
