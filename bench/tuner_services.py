"""Do: let the tuner act on the two real services, and play the same arrivals under a few static pairs of knobs.

    python -m bench.tuner_services

The checkpoint that ships is served on loopback. Everything goes through Control, as the operator does it: `Profile` once,
`GetState` for the pictures that ended, `SetLimits` for a change. A run is short, so the tuner's windows are counted in
pictures (`Guard.min_samples`, the default), not in minutes, and it starts from a bad pair: 8 at once, 100 ms. Rates follow from the profile that was
measured. p95 is told for all pictures, the bad beginning included, and for those of the second half of a trace alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import report
from bench.pages import bring_in
from bench.twin import AR_CAP, AR_CAPACITY, MODEL, Controls, draw
from mammoth_client import AsyncClient
from mammoth_client.pipeline import Pipeline, pipeline
from mammoth_operator.tuning.planner import capacity_per_s
from mammoth_operator.tuning.profile import Costs, Profile
from mammoth_operator.tuning.records import Record
from mammoth_operator.tuning.samples import Ask, Sample, percentile, throughput
from mammoth_operator.tuning.traces import Phase, arrivals
from mammoth_operator.tuning.tuner import Guard, Limits, Measured, moved, tune
from mammoth_operator.tuning.twin import Plant, Setting

DIT_CAPACITY = 8
SMALL, LARGE = 64, 128
STEPS = 10
SHARE = 0.7  # of what the slower of the two stages could do
POLL_S = 1.0
GUARD = Guard(cooldown_s=5.0)
LIMITS = Limits(dit=(1, DIT_CAPACITY), ar=(AR_CAP, AR_CAP))
PLANT = Plant(ar_slots=AR_CAPACITY)
BAD_START = Setting(AR_CAP, 8, 100.0)
STATIC = (Setting(AR_CAP, 1, 0.0), Setting(AR_CAP, 4, 0.0), Setting(AR_CAP, 8, 20.0), BAD_START)


@dataclass(frozen=True, slots=True)
class Trace:
    """A load: the sides that are asked for, one after another in equal stretches."""

    name: str
    sides: tuple[int, ...]
    seed: int

    def asks(self, profile: Profile, seconds: float) -> list[Ask]:
        """Return its pictures, at rates that the measured stages can carry."""
        phases = [Phase(seconds / len(self.sides), SHARE * best_rate(profile, side), {side: 1.0}, STEPS) for side in self.sides]  # fmt: skip
        return arrivals(phases, self.seed)


TRACES = (Trace("small", (SMALL,), 61), Trace("shift", (SMALL, LARGE), 62))


@dataclass(slots=True)
class Run:
    """Pictures of one run, and what the tuner did in it."""

    samples: list[Sample] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    setting: Setting = BAD_START

    def p95_s(self, *, half: bool = False) -> float:
        """Return the 95th percentile of all pictures, or of those that were asked for in the second half of the time."""
        first_s, last_s = (pick(sample.ask.at_s for sample in self.samples) for pick in (min, max))
        since_s = (first_s + last_s) / 2 if half else first_s
        return percentile([sample.latency_s for sample in self.samples if sample.ask.at_s >= since_s], 0.95)


def best_rate(profile: Profile, side: int) -> float:
    """Return the pictures a second of a side that both stages could do, each at its best."""
    return min(capacity_per_s(Costs(profile), [Ask(0.0, side, side, STEPS)], BAD_START, PLANT))


class Player:
    """Plays a trace to the services, under one pair of knobs or under the tuner."""

    def __init__(self, controls: Controls, client: AsyncClient, profile: Profile) -> None:
        self._controls, self._client, self._profile = controls, client, profile

    async def static(self, asks: Sequence[Ask], setting: Setting) -> Run:
        """Return how the pictures fare under one setting."""
        await self._controls.set_limits(setting)
        _, after = await self._controls.samples(0)
        await draw(self._client, asks, STEPS)
        samples, _ = await self._controls.samples(after)
        return Run(samples, setting=setting)

    async def tuned(self, asks: Sequence[Ask]) -> Run:
        """Return how they fare while the tuner acts, from a bad start."""
        run = Run()
        await self._controls.set_limits(run.setting)
        _, after = await self._controls.samples(0)
        drawing = asyncio.create_task(draw(self._client, asks, STEPS))
        history: tuple[Record, ...] = ()
        num_weighed = 0
        while not drawing.done():
            await asyncio.wait((drawing,), timeout=POLL_S)
            told, after = await self._controls.samples(after)
            run.samples += sorted(told, key=lambda sample: sample.done_s)
            if len(run.samples) - num_weighed < GUARD.min_samples or drawing.done():
                continue
            answer = tune(
                Measured(time.monotonic(), run.samples), run.setting, LIMITS, self._profile, history,
                guard=GUARD, plant=PLANT,
            )  # fmt: skip
            history = answer.history
            num_weighed = len(run.samples) if answer.weighed else num_weighed
            if answer.record:
                run.records.append(answer.record)
                run.setting = moved(run.setting, answer.record.knob, answer.record.new)
                await self._controls.set_limits(run.setting)
        await drawing
        return run


async def measure(stages: Pipeline, seconds: float) -> list[dict[str, Any]]:
    """Return a row a trace."""
    controls = Controls(stages)
    rows = []
    async with AsyncClient(stages.address) as client:
        profile = await controls.profile([(side, side) for side in (LARGE, SMALL)], DIT_CAPACITY)
        player = Player(controls, client, profile)
        for trace in TRACES:
            asks = trace.asks(profile, seconds)
            tuned = await player.tuned(asks)
            statics = [await player.static(asks, setting) for setting in STATIC]
            rows.append(row_of(trace, len(asks), tuned, statics))
            print(rows[-1], flush=True)
    await controls.close()
    return rows


def row_of(trace: Trace, pictures: int, tuned: Run, statics: Sequence[Run]) -> dict[str, Any]:
    """Return what a trace showed."""
    best = min(statics, key=Run.p95_s)
    best_later = min(run.p95_s(half=True) for run in statics)
    bad = next(run for run in statics if run.setting == BAD_START)
    return {
        "name": trace.name,
        "seed": trace.seed,
        "pictures": pictures,
        "tuner_p95_s": tuned.p95_s(),
        "best_static_p95_s": best.p95_s(),
        "best_static": _pair(best.setting),
        "bad_start_p95_s": bad.p95_s(),
        "tuner_second_half_p95_s": tuned.p95_s(half=True),
        "best_static_second_half_p95_s": best_later,
        "tuner_images_per_s": throughput(tuned.samples),
        "best_static_images_per_s": max(throughput(run.samples) for run in statics),
        "changes": [f"{record.knob} {record.old:g} to {record.new:g} ({record.outcome})" for record in tuned.records],
        "last_setting": _pair(tuned.setting),
        "static": {_pair(run.setting): run.p95_s() for run in statics},
    }


def _pair(setting: Setting) -> str:
    return f"{setting.dit_max_num_seqs}, {setting.wait_ms:g} ms"


def write_table(rows: Sequence[dict[str, Any]], page: Path) -> None:
    """Replace the table of the page."""
    lines = [
        "| trace | seed | pictures | tuner p95 | best static | of the bad start kept | second half: tuner | best static | changes | ends at |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['seed']} | {row['pictures']} | {row['tuner_p95_s']:.2f} s | {row['best_static_p95_s']:.2f} s ({row['best_static']}) "
            f"| {row['bad_start_p95_s']:.2f} s | {row['tuner_second_half_p95_s']:.2f} s | {row['best_static_second_half_p95_s']:.2f} s "
            f"| {len(row['changes'])} | {row['last_setting']} |"
        )
    bring_in(page, "make bench-twin", "\n".join(lines))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tuner_services", description=__doc__)
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder of tuner_services.json")
    parser.add_argument("--docs", type=Path, help="folder of the page whose table is written")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each trace; each is played five times")
    options = parser.parse_args(argv)
    flags: dict[str, Any] = {"ar_capacity": AR_CAPACITY, "dit_capacity": DIT_CAPACITY, "exactness": "tolerant", "log_level": "warning"}  # fmt: skip
    with pipeline(MODEL, **flags) as stages:
        rows = asyncio.run(measure(stages, options.seconds))
    report.write(
        "tuner_services",
        workload={"model": "emoji", "seconds": options.seconds, "steps": STEPS, "share": SHARE, "start": _pair(BAD_START), "min_samples": GUARD.min_samples},
        warm_up=0,
        repeats=1,
        spread={},
        figures={
            "worst_p95_ratio": max(row["tuner_p95_s"] / row["best_static_p95_s"] for row in rows),
            "worst_second_half_p95_ratio": max(row["tuner_second_half_p95_s"] / row["best_static_second_half_p95_s"] for row in rows),
            "worst_throughput_ratio": min(row["tuner_images_per_s"] / row["best_static_images_per_s"] for row in rows),
            "worst_p95_against_the_bad_start": max(row["tuner_p95_s"] / row["bad_start_p95_s"] for row in rows),
        },
        tables={"traces": rows},
        folder=options.results,
    )  # fmt: skip
    if options.docs:
        write_table(rows, options.docs / "tuning.md")


if __name__ == "__main__":
    main(sys.argv[1:])
