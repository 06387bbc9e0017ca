"""Decide what both clients share: the request, its deadline, and when to try again. No I/O and no clock in here."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mammoth_client._events import EventReader
from mammoth_client.types import Event
from mammoth_wire.errors import Cancelled, DeadlineExceeded, InvalidRequest, MammothError, Overloaded, Unavailable
from mammoth_wire.params import Bounds, resolve_generation
from mammoth_wire.v1 import image_generation_pb2

__all__ = ["CHANNEL_OPTIONS", "Exchange", "RetryPolicy", "checked_timeout_s", "generate_request", "next_delay_s"]

MAX_TIMEOUT_S = 3600.0
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 8 * 2**20),
    ("grpc.lb_policy_name", "round_robin"),
    # The clients retry by themselves and know whether an event has arrived; reconnecting keeps pace with them.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a request that no server has begun is sent again, and how long the pauses grow.

    `overloaded` also retries a full queue, after the time that the server named.
    """

    max_attempts: int = 4
    first_s: float = 0.2
    max_s: float = 5.0
    overloaded: bool = False


def next_delay_s(err: MammothError, num_attempts: int, jitter: float, policy: RetryPolicy) -> float | None:
    """Return the pause before the next attempt after `num_attempts` have failed, the last with `err`; None to give up.

    `jitter` is a random number in [0, 1): pauses vary by a fifth either way and never undercut the server's hint.
    Cancelled is what gRPC says for a server that hung up just as the request arrived.
    """
    full_for_a_while = policy.overloaded and isinstance(err, Overloaded) and err.retry_after_s is not None
    if not (isinstance(err, Unavailable | Cancelled) or full_for_a_while) or num_attempts >= policy.max_attempts:
        return None
    backoff_s: float = min(policy.max_s, policy.first_s * 2 ** (num_attempts - 1)) * (0.8 + 0.4 * jitter)
    return max(backoff_s, err.retry_after_s or 0.0)


def checked_timeout_s(value: Any, *, field: str = "timeout_s") -> float:
    """Return `value` as seconds. Raises InvalidRequest naming `field` unless it is above 0 and at most an hour."""
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        text = f"{value!r:.40} is not a number of seconds above 0 and at most {MAX_TIMEOUT_S:.0f}"
        raise InvalidRequest([(field, text)])
    return seconds


def generate_request(prompt: str, fields: Mapping[str, Any]) -> image_generation_pb2.GenerateRequest:
    """Return the message that asks for `prompt` with the given fields, and only those; request_id is made up if absent.

    Raises InvalidRequest naming every field that no deployment would accept.
    """
    given = {name: value for name, value in {"prompt": prompt, **fields}.items() if not _absent(value)}
    given.setdefault("request_id", str(uuid.uuid4()))
    values = asdict(resolve_generation(given, bounds=Bounds()))
    resolved = values | values["diffusion"] | values["conditioning"]
    sent = {name: resolved.get(name, value) for name, value in given.items()}
    try:
        return image_generation_pb2.GenerateRequest(**sent)
    except UnicodeEncodeError as err:
        name = next((name for name, value in given.items() if value == err.object), "labels")
        raise InvalidRequest([(name, "holds characters that UTF-8 cannot carry (lone surrogates)")]) from err


class Exchange:
    """One request over all its attempts: what to send, what has arrived, when to give up."""

    def __init__(
        self, prompt: str, fields: Mapping[str, Any], *, timeout_s: float, policy: RetryPolicy, now_s: float
    ) -> None:
        self.request = generate_request(prompt, fields)
        self._policy = policy
        self._deadline_s = now_s + checked_timeout_s(timeout_s)
        self._reader = EventReader(self.request.num_images if self.request.HasField("num_images") else 1)
        self._num_attempts = 0

    def begin(self, now_s: float) -> float:
        """Count an attempt and return the seconds that it may take."""
        self._num_attempts += 1
        if now_s >= self._deadline_s:
            text = f"no server accepted the request in {self._num_attempts - 1} attempts"
            raise DeadlineExceeded(text, stage="client")
        return self._deadline_s - now_s

    def read(self, message: image_generation_pb2.GenerateEvent) -> tuple[Event, ...]:
        """Return the events of a message; see EventReader."""
        return self._reader.read(message)

    def finish(self) -> None:
        """Check, at the end of a stream, that everything has arrived."""
        self._reader.finish()

    def delay_after(self, err: MammothError, now_s: float, jitter: float) -> float:
        """Return the pause before the next attempt. Raises `err` when there shall be none: an event has arrived,
        the policy says no, or the deadline would pass first."""
        delay_s = None if self._reader.started else next_delay_s(err, self._num_attempts, jitter, self._policy)
        if delay_s is None or now_s + delay_s >= self._deadline_s:
            raise err
        return delay_s


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple) and not value)
