"""Do: compare the twin with the two services on one recorded trace: latency, throughput, wave sizes.

    python -m bench.twin

The services draw a seeded trace with the checkpoint that ships. Their profile is taken through Control while its first third
runs, so under the same load on the same machine. Of the last third the twin gets the arrivals alone, and draws it twice:

- replayed (the figures `*_ratio`): costs corrected by what its own pictures took, so only queueing, batching and the
  policies are judged, and a machine whose speed changes in between disturbs nothing;
- foretold (`foretold_*_ratio`): costs corrected by the middle third alone, as the tuner has them.

The figures are twin / services, medians over repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from bench import report
from bench.pages import bring_in
from bench.report import Spread
from mammoth_client import AsyncClient
from mammoth_client.pipeline import Pipeline, pipeline
from mammoth_operator.tuning.calibration import calibrated, overheads, written
from mammoth_operator.tuning.observing import sample_of
from mammoth_operator.tuning.probing import Point, Probe, next_probe, probed
from mammoth_operator.tuning.profile import Profile
from mammoth_operator.tuning.samples import Ask, Sample, percentile, throughput
from mammoth_operator.tuning.traces import Phase, arrivals
from mammoth_operator.tuning.trial import replay
from mammoth_operator.tuning.twin import Plant, Setting
from mammoth_wire.v1 import control_pb2, control_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "checkpoints" / "emoji"
PROMPT = "a red apple"
SIDES = {128: 1.0, 64: 1.0}
AR_CAPACITY, AR_CAP, DIT_CAP = 16, 8, 4
START_S = 600.0
SEED = 50


class Controls:
    """Stubs to both stages' Control ports."""

    def __init__(self, stages: Pipeline) -> None:
        deadline_s = time.monotonic() + START_S
        children = {"ar": stages.ar, "dit": stages.dits[0]}
        self.channels = {
            name: grpc.aio.insecure_channel(f"127.0.0.1:{child.ports(deadline_s)['control_port']}")
            for name, child in children.items()
        }
        self._epoch = 0
        self.stubs = {name: control_pb2_grpc.ControlStub(channel) for name, channel in self.channels.items()}

    async def set_limits(self, setting: Setting) -> None:
        """Put the caps in force, under an epoch of their own."""
        self._epoch += 1
        await self.stubs["ar"].SetLimits(
            control_pb2.SetLimitsRequest(epoch=self._epoch, max_num_seqs=setting.ar_max_num_seqs)
        )
        await self.stubs["dit"].SetLimits(
            control_pb2.SetLimitsRequest(
                epoch=self._epoch, max_num_seqs=setting.dit_max_num_seqs, request_batch_max_wait_ms=setting.wait_ms
            )
        )

    async def profile(self, sizes: list[tuple[int, int]], dit_capacity: int = DIT_CAP) -> Profile:
        """Measure as the operator does."""
        points: dict[Probe, Point] = {}
        while (probe := next_probe(points, sizes, dit_capacity, AR_CAP)) is not None:
            shape = control_pb2.Shape(height=probe.shape[0], width=probe.shape[1])
            request = control_pb2.ProfileRequest(shapes=[shape], batch_sizes=[probe.batch_size], steps=8)
            [measured] = (await self.stubs[probe.pool].Profile(request, timeout=120.0)).measurements
            points[probe] = Point(tuple(measured.step_ms), measured.rest_ms)
        state = await self.stubs["dit"].GetState(control_pb2.GetStateRequest())
        return probed(points, "this machine", "now", rows_alone=state.environment.row_bucket == 1, time="")

    async def samples(self, after: int) -> tuple[list[Sample], int]:
        """Return the pictures that ended after a sequence number, and the newest number."""
        state = await self.stubs["ar"].GetState(control_pb2.GetStateRequest(served_after=after))
        now_s = time.monotonic()
        return [sample_of(picture, now_s) for picture in state.served], state.served_total

    async def close(self) -> None:
        for channel in self.channels.values():
            await channel.close()


async def draw(client: AsyncClient, asks: Sequence[Ask], steps: int) -> None:
    """Ask for every picture at its time, whether earlier ones are there or not."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def one(index: int, ask: Ask) -> None:
        await asyncio.sleep(began_s + ask.at_s - loop.time())
        await client.generate(
            PROMPT, seed=index, height=ask.height_px, width=ask.width_px, steps=steps, timeout_s=600.0
        )

    async with asyncio.TaskGroup() as tasks:
        for index, ask in enumerate(asks):
            tasks.create_task(one(index, ask))


async def compare(
    stages: Pipeline, per_s: float, part_s: float, steps: int, seed: int
) -> tuple[list[Sample], list[Sample], list[Sample]]:
    """Return the last third of a trace as the services drew it, as replayed and as foretold."""
    setting = Setting(ar_max_num_seqs=AR_CAP, dit_max_num_seqs=DIT_CAP)
    controls = Controls(stages)
    async with AsyncClient(stages.address) as client:
        await controls.set_limits(setting)
        parts = [arrivals([Phase(part_s, per_s, SIDES, steps)], seed + part) for part in range(3)]
        warm = asyncio.create_task(draw(client, parts[0], steps))
        profile = await controls.profile([(side, side) for side in SIDES])
        await warm
        _, after = await controls.samples(0)
        await draw(client, parts[1], steps)
        before, after = await controls.samples(after)
        await draw(client, parts[2], steps)
        real, _ = await controls.samples(after)
    await controls.close()
    asks = sorted((sample.ask for sample in real), key=lambda ask: ask.at_s)
    plant = Plant(ar_slots=AR_CAPACITY, hop_s=0.01)

    def drawn(seen: Sequence[Sample]) -> list[Sample]:
        around = overheads(seen, plant)  # as the tuner does: what was seen comes first
        costs = written(calibrated(profile, seen).profile, seen, setting, around)
        return replay(costs, setting, asks, around)

    return real, drawn(real), drawn(before)


def figures_of(samples: Sequence[Sample]) -> dict[str, float]:
    """Return what the two are compared by."""
    times = [sample.latency_s for sample in samples]
    return {
        "p50_s": percentile(times, 0.5),
        "p95_s": percentile(times, 0.95),
        "images_per_s": throughput(samples),
        "mean_batch": statistics.fmean(sample.wave_size for sample in samples),
    }


def write_table(spread: Mapping[str, Spread], page: Path) -> None:
    """Replace the page's table of twin / services: the median of the repeats, and between what they lie."""
    lines = ["| twin / services | replayed | foretold |", "|---|---|---|"]
    for label, key in (("p50", "p50_s"), ("p95", "p95_s"), ("images/s", "images_per_s"), ("mean wave", "mean_batch")):
        cells = (spread[f"{side}{key}_ratio"] for side in ("", "foretold_"))
        lines.append(
            f"| {label} | " + " | ".join(f"{lie.p50:.2f} ({lie.min:.2f} to {lie.max:.2f})" for lie in cells) + " |"
        )
    bring_in(page, "bench.twin", "\n".join(lines))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.twin", description=__doc__)
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder of twin.json")
    parser.add_argument("--docs", type=Path, help="folder of the page that shows the plot")
    parser.add_argument("--rate", type=float, default=0.8, help="pictures a second")
    parser.add_argument("--seconds", type=float, default=90.0, help="of each third of the trace")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    runs = []
    flags: dict[str, Any] = {
        "ar_capacity": AR_CAPACITY,
        "dit_capacity": DIT_CAP,
        "exactness": "tolerant",
        "log_level": "warning",
    }
    with pipeline(MODEL, **flags) as stages:
        for repeat in range(options.repeats):
            runs.append(
                asyncio.run(compare(stages, options.rate, options.seconds, options.steps, seed=SEED + 2 * repeat))
            )
            for name, samples in zip(("services", "replayed", "foretold"), runs[-1], strict=True):
                print(
                    name, len(samples), {key: round(value, 3) for key, value in figures_of(samples).items()}, flush=True
                )
    figures = [[figures_of(samples) for samples in run] for run in runs]
    spread = {f"real_{key}": Spread.of([real[key] for real, _, _ in figures]) for key in figures[0][0]}
    for key in figures[0][0]:
        spread[f"{key}_ratio"] = Spread.of([replayed[key] / real[key] for real, replayed, _ in figures])
        spread[f"foretold_{key}_ratio"] = Spread.of([foretold[key] / real[key] for real, _, foretold in figures])
    report.write(
        "twin",
        workload={"model": "emoji", "rate_per_s": options.rate, "seconds": options.seconds, "steps": options.steps, "sides": list(SIDES), "seed": SEED},
        warm_up=1,
        repeats=options.repeats,
        spread=spread,
        figures={name: lie.p50 for name, lie in spread.items() if name.endswith("_ratio")},
        folder=options.results,
    )  # fmt: skip
    if options.docs:
        from bench.tuner_plots import plot_pair

        plot_pair(*runs[-1][:2], options.docs / "images")
        write_table(spread, options.docs / "tuning.md")


if __name__ == "__main__":
    main(sys.argv[1:])
