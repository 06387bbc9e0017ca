"""Translate: seconds to protobuf durations and back."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

__all__ = ["duration", "seconds"]


def duration(value_s: float | None) -> Duration | None:
    """Return `value_s` as a Duration; None stays None, which leaves a message field unset."""
    if value_s is None:
        return None
    message = Duration()
    message.FromNanoseconds(round(value_s * 1e9))
    return message


def seconds(message: Duration) -> float:
    return message.ToNanoseconds() / 1e9
