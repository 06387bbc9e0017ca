"""Decide: what a failed call to the API server means: try again, give up on this wish, or stop writing altogether."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ApiError", "Conflict", "Forbidden", "Missing", "NotLeader", "PermanentError", "TransientError", "error_of"]


class ApiError(Exception):
    """A call that failed. `status` is the HTTP status, 0 when there was no answer."""

    def __init__(self, message: str, *, status: int = 0, reason: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after_s = status, reason, retry_after_s


class TransientError(ApiError):
    """It may work later, with the same wish: no answer, 409, 429, 5xx, or a lease that somebody else holds."""


class Conflict(TransientError):
    """409: the object is not what we believed; a newer view of it is on its way."""


class NotLeader(TransientError):
    """This process does not hold the lease, so it must not write."""


class Leaving(TransientError):
    """The namespace is being deleted: nothing can be made in it, and nothing needs to be."""


class PermanentError(ApiError):
    """The same wish will fail again: the API server refuses it as it is."""


class Missing(PermanentError):
    """404: no such object, or no such kind."""


class Forbidden(PermanentError):
    """403: our role does not allow it, or a quota or a policy does not."""


def error_of(status: int, body: Mapping[str, Any], retry_after: str | None) -> ApiError:
    """Return the typed error of an answer."""
    message, reason = str(body.get("message") or f"HTTP {status}")[:1000], str(body.get("reason") or "")
    causes = (body.get("details") or {}).get("causes") or ()
    wait_s = float(retry_after) if retry_after and retry_after.isdecimal() else None
    if any(cause.get("reason") == "NamespaceTerminating" for cause in causes):
        return Leaving(message, status=status, reason=reason, retry_after_s=60.0)
    if status == 409:
        return Conflict(message, status=status, reason=reason, retry_after_s=wait_s)
    if status == 429 or status >= 500 or status == 401:
        return TransientError(message, status=status, reason=reason, retry_after_s=wait_s)
    kind = {404: Missing, 403: Forbidden}.get(status, PermanentError)
    return kind(message, status=status, reason=reason)
