"""Do: own one child process of ours: start, find its ports, wait for its health, stop it, and tell how it ended.

A child leads a process group of its own, so that Ctrl-C reaches it only through us; it is stopped when its block ends
and, should the block never end, when the interpreter exits. We hold its standard input open and never write to it: a
child that finds it closed has lost us, even to SIGKILL, and stops by itself.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc

from mammoth_client._health import checker, health_of, question
from mammoth_wire.errors import EngineFailed, InvalidRequest

__all__ = ["Child", "last_lines", "refusals", "run_module", "sharing_cores"]

T = TypeVar("T")
POLL_S = 0.05
HEALTH_TIMEOUT_S = 2.0
NUM_LOG_LINES = 12
UNUSABLE = 2


class Child:
    """`python ARGV --ports-file FILE --stop-with-stdin true` as a context manager.

    Its output goes to `log_path`; `pid` is for signals.
    """

    def __init__(
        self, name: str, argv: Sequence[str], folder: Path, *, grace_s: float, environ: Mapping[str, str] | None = None
    ) -> None:
        """Start it. Without `environ` it inherits ours."""
        self.name = name
        self.log_path = folder / f"{name}.log"
        self._ports_path = folder / f"{name}.ports.json"
        self._ports_path.unlink(missing_ok=True)
        self._grace_s = grace_s
        ours = ["--ports-file", str(self._ports_path), "--stop-with-stdin", "true"]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *argv, *ours], stdin=subprocess.PIPE, stdout=log, stderr=log, env=environ,
                start_new_session=True,
            )  # fmt: skip
        atexit.register(self._kill)

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check(self) -> None:
        """Raise when the process has exited.

        InvalidRequest when it refused its settings or its checkpoint (exit code 2), a violation for each of its lines
        that says so; EngineFailed, with the end of its log, otherwise.
        """
        code = self._process.poll()
        if code is None:
            return
        text = f"exited with code {code}; its last lines:\n{last_lines(self.log_path)}"
        if code == UNUSABLE:
            raise InvalidRequest(refusals(self.log_path.read_text(errors="replace")) or [(self.name, text)])
        raise EngineFailed(f"{self.name}: {text}")

    def ports(self, deadline_s: float) -> Mapping[str, int]:
        """Wait until the process has bound its ports and return them by name: port, control_port, health_port, ..."""
        return self._wait(deadline_s, "bind its ports", self._read_ports)

    def wait_serving(self, deadline_s: float, *, beside: Sequence[Child] = ()) -> None:
        """Wait until the process is healthy; raise as `check` does when it or one of `beside` exits.

        `deadline_s` is on the monotonic clock.
        """
        with grpc.insecure_channel(f"127.0.0.1:{self.ports(deadline_s)['health_port']}") as channel:
            check = checker(channel)

            def serving() -> bool | None:
                for other in beside:
                    other.check()
                return _is_serving(check) or None

            self._wait(deadline_s, "serve", serving)

    def stop(self) -> None:
        """Ask the process to end, wait for it to drain, and kill its group if it takes longer than the grace."""
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.terminate()
                self._process.wait(self._grace_s)
        finally:
            self._kill()
            atexit.unregister(self._kill)

    def _kill(self) -> None:
        """End whatever is left of the process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _read_ports(self) -> Mapping[str, int] | None:
        """Return the ports once the file is there and complete."""
        try:
            ports: Mapping[str, int] = json.loads(self._ports_path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return ports

    def _wait(self, deadline_s: float, what: str, answer: Callable[[], T | None]) -> T:
        """Ask until there is an answer, the process exits, or the deadline passes."""
        while (found := answer()) is None:
            self.check()
            if time.monotonic() >= deadline_s:
                raise EngineFailed(f"{self.name}: did not {what} in time; its last lines:\n{last_lines(self.log_path)}")
            time.sleep(POLL_S)
        return found


def sharing_cores(environ: Mapping[str, str], *, num_processes: int, num_cores: int) -> dict[str, str]:
    """Return `environ` with an equal share of the cores as OMP_NUM_THREADS, unless that is set.

    Processes that each take every core spend their time waiting for one another's threads.
    """
    return {"OMP_NUM_THREADS": str(max(1, num_cores // num_processes)), **environ}


def run_module(argv: Sequence[str]) -> None:
    """Run `python -m ARGV` to its end. Raises EngineFailed, with the end of what it said, when it fails."""
    done = subprocess.run([sys.executable, "-m", *argv], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        said = _end_of((done.stdout + done.stderr).decode(errors="replace"))
        raise EngineFailed(f"python -m {argv[0]} exited with code {done.returncode}; its last lines:\n{said}")


def refusals(text: str) -> list[tuple[str, str]]:
    """Return who said what in the lines of a log that refuse settings or a checkpoint: `mammoth-dit: --device: ...`."""
    return re.findall(r"^(mammoth-\w+): (.+)$", text, re.MULTILINE)


def last_lines(path: Path) -> str:
    """Return the end of a log file, indented."""
    return _end_of(path.read_text(errors="replace"))


def _end_of(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines()[-NUM_LOG_LINES:]) or "  (nothing)"


def _is_serving(check: Callable[..., Any]) -> bool:
    try:
        return health_of("", check(question(""), timeout=HEALTH_TIMEOUT_S)).serving
    except grpc.RpcError:
        return False
