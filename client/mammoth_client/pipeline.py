"""Do: own both stages as child processes on loopback. They are started as `python -m mammoth_dit` and
`python -m mammoth_ar`, so nothing of theirs is imported here; a process writes its ports to a file as soon as they are
bound, and grpc.health.v1 on its health port says SERVING after warm-up.

    with pipeline(model="checkpoints/tiny", device="cpu") as stages, Client(stages.address) as client:
        ...
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mammoth_client.process import Child, sharing_cores

__all__ = ["FlagValue", "Pipeline", "pipeline", "stage_flags"]

FlagValue = str | int | float | bool | Path
StageName = Literal["ar", "dit"]
STAGES: tuple[StageName, ...] = ("ar", "dit")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Running stages. `address` is the public door; `dits` are the replicas that the AR stage may choose from."""

    address: str
    ar: Child
    dits: tuple[Child, ...]
    log_dir: Path

    @property
    def children(self) -> tuple[Child, ...]:
        return (self.ar, *self.dits)

    def wait(self, *, poll_s: float = 0.2) -> None:
        """Return never; raise as `pipeline` does when a stage exits."""
        while True:
            for child in self.children:
                child.check()
            time.sleep(poll_s)


def stage_flags(stage: StageName, flags: Mapping[str, FlagValue]) -> list[str]:
    """Return the command-line flags of one stage: those named `ar_x` or `dit_x` belong to it alone, others to both.

    `max_num_seqs=4` becomes `--max-num-seqs=4`, `dit_batching="step"` becomes `--batching=step` on the DiT stage.
    """
    argv = []
    for name, value in flags.items():
        owner, _, rest = name.partition("_")
        if owner in STAGES and owner != stage:
            continue
        argv.append(f"--{(rest if owner == stage else name).replace('_', '-')}={value}")
    return argv


@contextmanager
def pipeline(
    model: str | Path,
    *,
    port: int = 0,
    num_dits: int = 1,
    log_dir: str | Path | None = None,
    start_timeout_s: float = 600.0,
    grace_s: float = 30.0,
    **flags: FlagValue,
) -> Iterator[Pipeline]:
    """Run one AR stage and `num_dits` DiT stages of `model` until the block ends; enter once all of them serve.

    `port` is the public one, 0 for any free one. `flags` are the stages' own; see `stage_flags`. Logs go to `log_dir`,
    or to a temporary folder that is deleted at the end. A stage gets SIGTERM and `grace_s` to drain before it is killed.
    The stages share the cores of the machine evenly unless OMP_NUM_THREADS is set.

    Stages that lose this process, even to SIGKILL, drain and stop by themselves.

    Raises InvalidRequest, with its words, when a stage refuses its flags or its checkpoint; EngineFailed, with the end
    of its log, when it exits for another reason or does not serve within `start_timeout_s`.
    """
    deadline_s = time.monotonic() + start_timeout_s
    with ExitStack() as stack:
        folder = Path(log_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="mammoth-")))
        folder.mkdir(parents=True, exist_ok=True)
        environ = sharing_cores(os.environ, num_processes=1 + num_dits, num_cores=os.cpu_count() or 1)

        def start(name: str, argv: Sequence[str]) -> Child:
            return stack.enter_context(Child(name, ["-m", *argv], folder, grace_s=grace_s, environ=environ))

        common = ["--model", str(model)]
        dits = tuple(
            start(f"dit-{index}", ["mammoth_dit", *common, *_ports(0), *stage_flags("dit", flags)])
            for index in range(num_dits)
        )
        targets = ",".join(f"{LOOPBACK}:{dit.ports(deadline_s)['port']}" for dit in dits)
        ar = start("ar", ["mammoth_ar", *common, "--dit-target", targets, *_ports(port), *stage_flags("ar", flags)])
        address = f"{LOOPBACK}:{ar.ports(deadline_s)['port']}"
        for child in (ar, *dits):
            child.wait_serving(deadline_s, beside=(ar, *dits))
        yield Pipeline(address, ar, dits, folder)


def _ports(port: int) -> list[str]:
    return ["--port", str(port), "--control-port", "0", "--health-port", "0", "--metrics-port", "0"]
