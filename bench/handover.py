"""Do: measure the hand-over: rows of a 1024-pixel picture from one process to another over loopback gRPC, as in production.

    python -m bench.handover

The sender runs the AR stage's RowLog and Replicas, the receiver is the DiT service in a child (`bench.replica`). Rows are
appended prompt first, then 64 at a time at a steady pace, after the replica has admitted them. The clock runs from the
moment when the last rows exist (before their digest and their chunk) to the replica's answer that it holds all rows and
that their digest is right.

Memory is that of the first whole transfer of both processes, after a short one. `peak_rise_bytes` is the rise of their
resident peaks, added up: the rows in the log where the sender keeps them for a replay (1x the payload), the receiver's
copy (1x), and whatever gRPC and the codec hold on the way. `peak_extra_bytes` is what handing over costs on top of the
rows themselves: the rise without the payload, whose floor is the receiver's copy.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench import codec, report
from bench.processes import HighWater
from bench.report import Spread
from mammoth_ar.handover import Replicas, RowLog
from mammoth_client.process import Child
from mammoth_wire.tensors import CHUNK_ROWS, Rows, contract, header
from mammoth_wire.v1 import types_pb2
from mammoth_wire.v1.diffusion_pb2 import Begin, RowChunk

DTYPE = types_pb2.DTYPE_BFLOAT16
MODEL_DIGEST = "bench"
PROMPT_ID, GRID_ID = 1, 520  # an id of text and one of a visual token, in the tiny vocabulary
SIDE_PX = 1024
TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0
CODEC_WARM_UP, CODEC_REPEATS = 2, 10


@dataclass(frozen=True, slots=True)
class Workload:
    """The rows of one picture and the time between two chunks of them."""

    num_prompt_rows: int = 38
    num_grid_rows: int = 4160
    width: int = 3584
    pace_ms: float = 5.0

    @property
    def num_rows(self) -> int:
        return self.num_prompt_rows + self.num_grid_rows

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.width * 2

    @property
    def contract(self) -> str:
        return contract(self.width, MODEL_DIGEST)

    def begin(self, job_id: str) -> Begin:
        return Begin(
            job_id=job_id,
            parameters=types_pb2.DiffusionParameters(
                height=SIDE_PX, width=SIDE_PX, steps=50, guidance=9.0, cfg_end=1.0
            ),
            rows=header("rows", DTYPE, self.num_rows, self.width),
            answer_start_index=self.num_prompt_rows,
            contract=self.contract,
            probe=True,
        )

    def parts(self) -> Iterator[Rows]:
        """Yield the rows as the engine does: the prompt's, then the grid's in chunks; finite bits of bfloat16."""
        random = np.random.default_rng(0)
        sizes = [CHUNK_ROWS] * (self.num_grid_rows // CHUNK_ROWS) + [self.num_grid_rows % CHUNK_ROWS]
        for size, token in [(self.num_prompt_rows, PROMPT_ID), *((size, GRID_ID) for size in sizes if size)]:
            bits = random.integers(0, 0x7F80, (size, self.width), np.uint16)
            yield Rows(np.full(size, token, np.int32), bits, DTYPE)


async def decode(log: RowLog, workload: Workload) -> float:
    """Append the rows at their pace, close the log, and return when the last rows were there."""
    began_s = time.perf_counter()
    for index, rows in enumerate(workload.parts()):
        await asyncio.sleep(began_s + index * workload.pace_ms / 1000 - time.perf_counter())
        last_rows_at = time.perf_counter()
        log.append(RowChunk.PART_CONDITION, rows)
    log.close()
    return last_rows_at


async def hand_over(replicas: Replicas, workload: Workload, job_id: str) -> float:
    """Stream one picture's rows and return the milliseconds from the last rows to the replica's answer."""
    log = RowLog(workload.begin(job_id))
    async with aclosing(replicas.denoise(log, timeout_s=TIMEOUT_S)) as events, asyncio.TaskGroup() as tasks:
        await anext(events)  # the admission: nothing is decoded before it
        decoding = tasks.create_task(decode(log, workload))
        answer = (await anext(events)).drawn
        answered_at = time.perf_counter()
    assert answer.rows_sha256 == log.sha256.hex(), "the replica holds other rows than were sent"
    return 1000 * (answered_at - decoding.result())


async def measure(
    address: str, receiver_pid: int, workload: Workload, *, warm_up: int, repeats: int
) -> tuple[list[int], list[float]]:
    """Return the memory of the first whole transfer, sender and receiver, and the milliseconds of `repeats` later ones."""
    replicas = Replicas([address])
    try:
        await hand_over(replicas, replace(workload, num_grid_rows=2 * CHUNK_ROWS), "short")
        memory = HighWater([os.getpid(), receiver_pid])
        await hand_over(replicas, workload, "memory")
        extra_bytes = memory.extra_bytes()
        names = [f"picture-{index}" for index in range(warm_up + repeats)]
        return extra_bytes, [await hand_over(replicas, workload, name) for name in names][warm_up:]
    finally:
        await replicas.close()


def run(workload: Workload, *, warm_up: int, repeats: int, folder: Path) -> Path:
    """Measure transfers against a child, then the codec alone, and write handover.json into `folder`."""
    (sender_bytes, receiver_bytes), waits_ms = _transfers(workload, warm_up=warm_up, repeats=repeats)
    parts = list(workload.parts())
    rows = Rows(np.concatenate([part.ids for part in parts]), np.concatenate([part.bits for part in parts]), DTYPE)
    speeds = codec.rates(rows, warm_up=CODEC_WARM_UP, repeats=CODEC_REPEATS)
    wait_ms, rise_bytes = Spread.of(waits_ms), sender_bytes + receiver_bytes
    spread = {"wait_ms": wait_ms} | {_figure(name): Spread.of(values) for name, values in speeds.items()}
    return report.write(
        "handover",
        workload={**asdict(workload), "dtype": "bfloat16", "chunk_rows": CHUNK_ROWS, "codec_repeats": CODEC_REPEATS},
        warm_up=warm_up,
        repeats=repeats,
        spread=spread,
        figures={
            "p50_ms": wait_ms.p50,
            "p95_ms": wait_ms.p95,
            "max_ms": wait_ms.max,
            "bytes": workload.num_bytes,
            "peak_extra_bytes": rise_bytes - workload.num_bytes,
            "payload_ratio": rise_bytes / workload.num_bytes - 1,
            "peak_rise_bytes": rise_bytes,
            "sender_rise_bytes": sender_bytes,
            "receiver_rise_bytes": receiver_bytes,
            **{name: value.p50 for name, value in spread.items() if name != "wait_ms"},
        },
        folder=folder,
    )


def _transfers(workload: Workload, *, warm_up: int, repeats: int) -> tuple[list[int], list[float]]:
    """Run `measure` against a replica of our own."""
    flags = ["--width", str(workload.width), "--contract", workload.contract, "--log-level", "warning"]
    flags += [word for name in ("port", "control-port", "health-port", "metrics-port") for word in (f"--{name}", "0")]
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mammoth-bench-")))
        child = stack.enter_context(Child("replica", ["-m", "bench.replica", *flags], logs, grace_s=10.0))
        deadline_s = time.monotonic() + START_TIMEOUT_S
        child.wait_serving(deadline_s)
        address = f"127.0.0.1:{child.ports(deadline_s)['port']}"
        return asyncio.run(measure(address, child.pid, workload, warm_up=warm_up, repeats=repeats))


def _figure(rate: str) -> str:
    return rate if rate == "codec_to_memcpy" else f"{rate}_gb_per_s"


def main() -> None:
    default = Workload()
    parser = argparse.ArgumentParser(prog="python -m bench.handover", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--grid-rows", type=int, default=default.num_grid_rows)
    parser.add_argument("--width", type=int, default=default.width, help="elements of a row")
    parser.add_argument("--pace-ms", type=float, default=default.pace_ms, help="time between two chunks of 64 rows")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder of handover.json")
    args = parser.parse_args()
    workload = replace(default, num_grid_rows=args.grid_rows, width=args.width, pace_ms=args.pace_ms)
    run(workload, warm_up=args.warm_up, repeats=args.repeats, folder=args.results)


if __name__ == "__main__":
    main()
