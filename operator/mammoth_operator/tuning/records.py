"""Decide what is remembered of a change: what it was, what was expected, and what came of it. As status holds it, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

__all__ = ["KNOBS", "MAX_RECORDS", "Knob", "Outcome", "Record"]

Knob = Literal["ditMaxNumSeqs", "requestBatchMaxWaitMs", "arMaxNumSeqs"]
KNOBS: tuple[Knob, ...] = ("ditMaxNumSeqs", "requestBatchMaxWaitMs", "arMaxNumSeqs")
Outcome = Literal["pending", "kept", "reverted", "revert", "recommended"]
MAX_RECORDS = 10
MAX_REASON, MAX_EVIDENCE = 128, 512


@dataclass(frozen=True, slots=True)
class Record:
    """A change of one knob. Times are seconds since 1970, p95s in seconds.

    `outcome`: pending until it is judged, then kept or reverted; revert is the change that takes one back; recommended was
    never put in force.
    """

    time_s: float
    knob: Knob
    old: float
    new: float
    reason: str
    evidence: str
    p95_before_s: float
    p95_expected_s: float
    outcome: Outcome = "pending"
    p95_after_s: float | None = None

    def status(self) -> dict[str, Any]:
        """Return it as `status.tuning.history` holds it."""
        text = {
            "time": _stamp(self.time_s),
            "knob": self.knob,
            "from": self.old,
            "to": self.new,
            "reason": self.reason[:MAX_REASON],
            "evidence": self.evidence[:MAX_EVIDENCE],
            "p95Before": round(self.p95_before_s, 3),
            "p95Expected": round(self.p95_expected_s, 3),
            "outcome": self.outcome,
        }
        return text | ({} if self.p95_after_s is None else {"p95After": round(self.p95_after_s, 3)})

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Record:
        """Return what `status` wrote."""
        return cls(
            time_s=datetime.fromisoformat(raw["time"]).timestamp(),
            knob=raw["knob"],
            old=float(raw["from"]),
            new=float(raw["to"]),
            reason=raw.get("reason", ""),
            evidence=raw.get("evidence", ""),
            p95_before_s=float(raw.get("p95Before", 0.0)),
            p95_expected_s=float(raw.get("p95Expected", 0.0)),
            outcome=raw.get("outcome", "kept"),
            p95_after_s=float(raw["p95After"]) if "p95After" in raw else None,
        )


def _stamp(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
