"""Do: a cluster from the side of the tests: start one or name an existing one, act on its programs, take it down.

A cluster of our own lives in a supervisor process and a work folder, and both go when it stops.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from harness import binaries
from harness.errors import ClusterError, Unavailable
from harness.isolation import NAMESPACES, make_groups, remove_groups, require_namespaces
from harness.machine import NODE_PROGRAMS, PLANE_PROGRAMS, require
from harness.node import SOCKET
from harness.seed import known_layers, plant, seed
from harness.supervisor import KUBECONFIG

__all__ = ["Cluster", "Tier"]

Tier = Literal["plane", "node"]
NAMED = "MAMMOTH_TEST_KUBECONFIG"
START_WITHIN_S, STOP_WITHIN_S = 120, 20


@dataclass(slots=True)
class Cluster:
    """A Kubernetes that answers. `work` and the programs' restarts exist only where it is our own.

    `layers` are digests of image layers that its node has from the start.

    `kubectl` and `helm` are programs of the right version; `kubeconfig` is an administrator's and works from this machine.
    """

    tier: Tier
    kubeconfig: Path
    kubectl: Path
    helm: Path
    seconds_to_start: float
    work: Path | None = None
    layers: frozenset[str] = frozenset()
    _supervisor: subprocess.Popen[str] | None = field(default=None, repr=False)

    @classmethod
    def obtain(cls, tier: Tier) -> Cluster:
        """Return the cluster that MAMMOTH_TEST_KUBECONFIG names, or start one. Raises Unavailable where neither can be."""
        if named := os.environ.get(NAMED):
            return cls(tier, Path(named), _installed("kubectl"), _installed("helm"), 0.0)
        require(NODE_PROGRAMS if tier == "node" else PLANE_PROGRAMS, root=tier == "node")
        if tier == "node":
            require_namespaces()
        tools = binaries.build()
        start = time.monotonic()
        work = Path(tempfile.mkdtemp(prefix=f"mammoth-{tier}-"))
        cluster = cls(tier, work / KUBECONFIG, tools / "kubectl", tools / "helm", 0.0, work)
        try:
            cluster._start(tools)
        except BaseException:
            cluster.stop()
            raise
        cluster.seconds_to_start = time.monotonic() - start
        print(f"{tier} ready in {cluster.seconds_to_start:.1f} s", flush=True)
        return cluster

    @property
    def own(self) -> bool:
        return self.work is not None

    @property
    def containerd(self) -> Path:
        """The node's containerd socket."""
        return self._folder() / SOCKET

    @property
    def audit_log(self) -> Path:
        """One JSON object a line for every request that the API server answered."""
        return self._folder() / "audit.log"

    def log(self, program: str) -> str:
        return (self._folder() / "logs" / f"{program}.log").read_text(errors="replace")

    def restart(self, program: str) -> None:
        """Kill a program (`kube-apiserver`, `etcd`, …) and start it again; it may take a while to answer."""
        self._tell(f"restart {program}")

    def halt(self, program: str) -> None:
        """Kill a program and leave it dead until `resume`."""
        self._tell(f"stop {program}")

    def resume(self, program: str) -> None:
        self._tell(f"start {program}")

    def stop(self) -> None:
        """End every process of the cluster and remove what it kept. A named cluster is left as it is."""
        if self.work is None:
            return
        if self._supervisor is not None:
            assert self._supervisor.stdin is not None
            assert self._supervisor.stdout is not None
            self._supervisor.stdin.close()
            try:
                self._supervisor.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
            self._supervisor.stdout.close()
            self._supervisor = None
        if self.tier == "node":
            remove_groups(self.work.name)
        shutil.rmtree(self.work)
        self.work = None

    def _start(self, tools: Path) -> None:
        assert self.work is not None
        command = [sys.executable, "-m", "harness", "supervise", self.tier, str(tools), str(self.work)]
        if self.tier == "plane":
            self._launch(command)
        else:
            with suppress(Unavailable):  # a node without light images runs others
                self.layers = frozenset(known_layers(planted := seed()))
                plant(planted, self.work / "containerd")
            make_groups(self.work.name)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self._launch([*NAMESPACES, *command, str(listener.fileno())], listener.fileno())
        if (answer := self._answer(START_WITHIN_S)) != "ready":
            raise ClusterError(answer)

    def _launch(self, command: list[str], *descriptors: int) -> None:
        assert self.work is not None
        with (self.work / "supervisor.log").open("w") as log:
            self._supervisor = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                pass_fds=descriptors,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
            )

    def _tell(self, line: str) -> None:
        if self._supervisor is None or self._supervisor.stdin is None:
            raise Unavailable("the programs of a cluster that is not our own are left alone")
        self._supervisor.stdin.write(line + "\n")
        self._supervisor.stdin.flush()
        if (answer := self._answer(STOP_WITHIN_S)) != "ok":
            raise ClusterError(f"{line}: {answer}")

    def _answer(self, within_s: float) -> str:
        """Return what the supervisor says next; when it says nothing, what it left in its log."""
        assert self._supervisor is not None
        assert self._supervisor.stdout is not None
        readable, _, _ = select.select([self._supervisor.stdout], [], [], within_s)
        if not readable:
            return f"no answer within {within_s:.0f} s"
        if line := self._supervisor.stdout.readline().strip():
            rest = self._supervisor.stdout.read() if line.startswith("failed:") else ""
            return f"{line}\n{rest}".strip()
        return f"the supervisor ended: {(self._folder() / 'supervisor.log').read_text()[-2000:]}"

    def _folder(self) -> Path:
        if self.work is None:
            raise Unavailable("only a cluster of our own shows its files")
        return self.work


def _installed(program: str) -> Path:
    """Return a program for a named cluster: the one that was built for the tests, or the machine's."""
    built = binaries.built()
    found = built / program if built is not None else shutil.which(program)
    if found is None:
        raise Unavailable(f"{NAMED} names a cluster, and there is no {program} to talk to it")
    return Path(found)
