"""Do: own the record of the pictures that ended lately, for whoever asks through Control. It forgets the oldest."""

from __future__ import annotations

import time
import uuid
from collections import deque

from mammoth_wire.v1 import control_pb2

__all__ = ["ServedLog"]

MAX_KEPT = 512  # about 50 KiB in a report


class ServedLog:
    """Pictures in the order in which they ended. Lives on the event loop."""

    def __init__(self) -> None:
        self._instance = uuid.uuid4().hex[:12]
        self._kept: deque[tuple[float, control_pb2.Served]] = deque(maxlen=MAX_KEPT)
        self._total = 0

    def add(self, picture: control_pb2.Served) -> None:
        """Take in a picture that has just ended; its sequence number and age are filled in here."""
        self._total += 1
        picture.sequence = self._total
        self._kept.append((time.monotonic() - picture.total_s, picture))

    def report(self, state: control_pb2.State, *, after: int) -> None:
        """Fill in what `state` says of pictures: those after a sequence number, all of them where it is from another life."""
        state.instance, state.served_total = self._instance, self._total
        now_s, first = time.monotonic(), after if after <= self._total else 0
        for asked_s, picture in self._kept:
            if picture.sequence > first:
                told = state.served.add()
                told.CopyFrom(picture)
                told.asked_ago_s = now_s - asked_s
