"""Decide: what pods say of themselves and of each other, as values."""

from __future__ import annotations

from dataclasses import dataclass

from mammoth_wire.v1.control_pb2 import Served

__all__ = ["Load", "Transport"]


@dataclass(frozen=True, slots=True)
class Load:
    """What a pod's Control service said. `served` are the pictures that ended since it was asked last (AR); `rows_alone`: its
    device draws the rows of a wave one by one; `default_size` in pixels (DiT)."""

    in_flight: int
    queue_depth: int
    epoch: int
    max_num_seqs: int
    wait_ms: float | None
    serving: bool
    capacity: int = 1024
    model_digest: str = ""
    instance: str = ""
    served: tuple[Served, ...] = ()
    served_total: int = 0
    hardware: str = ""
    versions: str = ""
    rows_alone: bool = False
    default_size: tuple[int, int] | None = None

    @property
    def work(self) -> int:
        return self.in_flight + self.queue_depth


@dataclass(frozen=True, slots=True)
class Transport:
    """How a test tensor fared between two pods of a revision: `reason` and `message` say why not."""

    revision: str
    proven: bool
    reason: str = ""
    message: str = ""
