"""Do: run the real operator as a process, kill it, read its health and metrics."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from playing.api import eventually


@dataclass(slots=True)
class Operator:
    """One operator process. `lease_s` is short, so that a killed one is followed soon."""

    kubeconfig: Path
    log: Path
    identity: str = "one"
    namespaces: str = ""
    home: str = "default"
    lease_s: float = 5.0
    flags: tuple[str, ...] = ()
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, *, wait: bool = True) -> Operator:
        with socket.create_server(("127.0.0.1", 0)) as held:
            self.port = held.getsockname()[1]
        command = [
            sys.executable, "-m", "mammoth_operator", f"--identity={self.identity}", f"--lease-seconds={self.lease_s}",
            f"--port={self.port}", "--host=127.0.0.1", f"--namespace={self.home}", f"--watch-namespaces={self.namespaces}", *self.flags,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "KUBECONFIG": str(self.kubeconfig)})  # fmt: skip
        if wait:
            eventually(lambda: self.answers("/healthz"), within_s=30, what=f"operator {self.identity} is up")
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it and return its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.process = None
        return code

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            assert self.process is None or self.process.poll() is None, f"the operator ended: {self.log.read_text()[-3000:]}"  # fmt: skip
            return False

    def metrics(self) -> dict[str, float]:
        """Return every sample by its name with labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}  # fmt: skip

    def rss_mib(self) -> float:
        assert self.process is not None
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
