"""Do: the programs of a cluster as processes: started with a log each, stopped by recorded pid, reaped, missed when they end.

Every process gets a parent-death signal: whatever ends the supervisor ends them too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from harness.errors import ClusterError

__all__ = ["Command", "Processes", "run"]

Command = list[str | Path]

POLL_S = 0.1
LOG_TAIL_BYTES = 2000


class Processes:
    """Owns the running programs: name to command line and pid."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._commands: dict[str, list[str]] = {}
        self._pids: dict[int, str] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: Command) -> None:
        """Start `command` under `name`; its output is appended to `logs`/`name`.log."""
        self._commands[name] = [str(part) for part in command]
        self.resume(name)

    def resume(self, name: str) -> None:
        """Start `name` again, with the command it had."""
        argv = ["setpriv", "--pdeathsig", "KILL", *self._commands[name]]
        log = os.open(self._logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            streams = [(os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)]
            pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=streams, setpgroup=0)
        finally:
            os.close(log)
        self._pids[pid] = name

    def stop(self, name: str) -> None:
        """End `name` and wait until it is gone. Stopping what does not run does nothing."""
        for pid in [pid for pid, running in self._pids.items() if running == name]:
            del self._pids[pid]
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def restart(self, name: str) -> None:
        self.stop(name)
        self.resume(name)

    def stop_all(self) -> None:
        for name in reversed(list(self._commands)):
            self.stop(name)

    def reap(self) -> None:
        """Collect every child that has ended, orphans included. Raises ClusterError when one of the programs has."""
        while (ended := _ended_child()) is not None:
            pid, status = ended
            if (name := self._pids.pop(pid, None)) is not None:
                raise ClusterError(f"{name} ended with status {os.waitstatus_to_exitcode(status)}:\n{self.tail(name)}")

    def tail(self, name: str) -> str:
        """Return the last lines of a program's log."""
        return (self._logs / f"{name}.log").read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    def until(self, command: Command, *, within_s: float) -> None:
        """Repeat `command` until it succeeds. Raises ClusterError when a program ends, or when `within_s` have passed."""
        deadline = time.monotonic() + within_s
        while (last := run(command, check=False)).returncode:
            self.reap()
            if time.monotonic() > deadline:
                raise ClusterError(f"after {within_s:.0f} s still: {' '.join(map(str, command))}: {last.stderr[-500:]}")
            time.sleep(POLL_S)


def run(command: Command, *, check: bool = True, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `command` to its end with its output captured. Raises ClusterError, with what it said, when it fails."""
    argv = [str(part) for part in command]
    if shutil.which(argv[0]) is None:
        raise ClusterError(f"{argv[0]}: no such program")
    done = subprocess.run(argv, capture_output=True, text=True, input=given, check=False)
    if check and done.returncode:
        raise ClusterError(f"{' '.join(argv)}: status {done.returncode}: {done.stderr[-LOG_TAIL_BYTES:]}")
    return done


def _ended_child() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None
