"""Decide: the live caps and their epoch, and which pods have yet to hear of them. Nothing here restarts anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mammoth_operator.names import Pool
from mammoth_operator.spec import PipelineSpec

__all__ = ["Caps", "asked", "epoch_of", "from_data"]


@dataclass(frozen=True, slots=True)
class Caps:
    """The caps in force: most rows (AR) and jobs (DiT) at once, and the longest wait for company."""

    ar_max_num_seqs: int
    dit_max_num_seqs: int
    request_batch_max_wait_ms: float

    def data(self) -> dict[str, str]:
        """Return what the ConfigMap holds; the pods' variables refer to these keys."""
        return {
            "ar.max-num-seqs": str(self.ar_max_num_seqs),
            "dit.max-num-seqs": str(self.dit_max_num_seqs),
            "dit.request-batch-max-wait-ms": f"{self.request_batch_max_wait_ms:g}",
        }

    def status(self) -> dict[str, Any]:
        return {
            "arMaxNumSeqs": self.ar_max_num_seqs,
            "ditMaxNumSeqs": self.dit_max_num_seqs,
            "requestBatchMaxWaitMs": self.request_batch_max_wait_ms,
        }

    def of(self, pool: Pool) -> tuple[int, float | None]:
        """Return (max_num_seqs, request_batch_max_wait_ms or None) of a pool."""
        return (self.ar_max_num_seqs, None) if pool == "ar" else (self.dit_max_num_seqs, self.request_batch_max_wait_ms)


def asked(spec: PipelineSpec) -> Caps:
    """Return the caps that the spec asks for. A tuner in mode Auto puts its own in their place, within the same capacity."""
    return Caps(spec.ar.cap, spec.dit.cap, spec.dit.request_batch_max_wait_ms)


def from_data(data: Mapping[str, str]) -> tuple[Caps, int] | None:
    """Return the caps and the epoch of a ConfigMap; None when it does not hold them whole."""
    try:
        caps = Caps(
            int(data["ar.max-num-seqs"]),
            int(data["dit.max-num-seqs"]),
            float(data["dit.request-batch-max-wait-ms"]),
        )
        return caps, int(data["epoch"])
    except (KeyError, ValueError):
        return None


def epoch_of(caps: Caps, stored: tuple[Caps, int] | None, reported: Iterable[int]) -> int:
    """Return the epoch of `caps`: one more than every known one when they are new, the highest known one otherwise.

    `stored` is what the ConfigMap holds, `reported` what the status and the pods say, so that a lost ConfigMap or a
    restarted operator never makes the epoch fall.
    """
    known = max((*reported, stored[1] if stored else 0), default=0)
    return known if stored and stored[0] == caps and known > 0 else known + 1
