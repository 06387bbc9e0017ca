"""Do: watch what processes take: resident memory and CPU time. Linux only: it reads /proc/PID, and resets a mark there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["HighWater", "cpu_s"]

RESET_HIGH_WATER_MARK = "5"


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of the threads that the process has now, since each began; nanosecond resolution."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


class HighWater:
    """The peaks of processes above where they stood when this was made.

    Where the kernel does not let the mark be reset, an earlier peak may count: the answer is then an upper bound.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._before_bytes = {}
        for pid in pids:
            with suppress(PermissionError):
                Path(f"/proc/{pid}/clear_refs").write_text(RESET_HIGH_WATER_MARK)
            self._before_bytes[pid] = _status_bytes(pid, "VmRSS")

    def extra_bytes(self) -> list[int]:
        """Return the rise of each process so far, in the order in which they were given."""
        return [_status_bytes(pid, "VmHWM") - before for pid, before in self._before_bytes.items()]


def _status_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(value) * 1024
