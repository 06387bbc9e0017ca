"""Do: judge the tuner and the planner on seeded traces in the twin, against every static pair of knobs.

    python -m bench.tuner

Each trace is drawn once under every pair of max_num_seqs (1 to 8) and wait (0 to 100 ms), and once with the tuner acting
from the defaults. A static pair is judged with hindsight: the best one is picked after the trace is known. The plots and
the table of docs/tuning.md are written by the same run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import report
from bench.scenarios import CEILING, SCENARIOS, Scenario, profile_of
from bench.tuner_checks import convergence, planner, step_in_load, wrong_profiles
from bench.tuner_cost import decision_cost
from bench.tuner_plots import plot_traces, write_table
from mammoth_operator.tuning.closed_loop import Course, reversals, run_tuned
from mammoth_operator.tuning.objective import Goal
from mammoth_operator.tuning.profile import Costs
from mammoth_operator.tuning.samples import Sample, percentile, throughput
from mammoth_operator.tuning.trial import Asked
from mammoth_operator.tuning.twin import Plant

CAPS, WAITS_MS = tuple(range(1, 9)), (0.0, 10.0, 20.0, 50.0, 100.0)
Pair = tuple[int, float]


def figures_of(samples: Sequence[Sample]) -> tuple[float, float]:
    """Return (p95 in seconds, images a second)."""
    return percentile([sample.latency_s for sample in samples], 0.95), throughput(samples)


def grid(scenario: Scenario, caps: Sequence[int], waits_ms: Sequence[float]) -> dict[Pair, tuple[float, float]]:
    """Return how every static pair does on a trace."""
    trial = Asked(scenario.asks(), Costs(profile_of(scenario.profile)), Goal(), Plant())
    outcomes = {
        (cap, wait): trial.score(replace(scenario.start, dit_max_num_seqs=cap, wait_ms=wait))
        for cap in caps
        for wait in (waits_ms if cap > 1 else waits_ms[:1])  # a wave of one never waits
    }
    return {pair: (outcome.p95_s, outcome.images_per_s) for pair, outcome in outcomes.items()}


def row_of(scenario: Scenario, static: Mapping[Pair, tuple[float, float]], course: Course) -> dict[str, Any]:
    """Return the row of a trace."""
    p95_s, images_per_s = figures_of(course.samples)
    best = min(static, key=lambda pair: static[pair][0])
    best_speed = max(speed for _, speed in static.values())
    return {
        "name": scenario.name,
        "profile": scenario.profile,
        "seed": scenario.seed,
        "shifts": scenario.shifts,
        "pictures": len(course.samples),
        "tuner_p95_s": p95_s,
        "best_static_p95_s": static[best][0],
        "best_static": {"max_num_seqs": best[0], "request_batch_max_wait_ms": best[1]},
        "tuner_images_per_s": images_per_s,
        "best_static_images_per_s": best_speed,
        "default_static_p95_s": static.get((8, 20.0), (float("inf"), 0.0))[0],
        "decisions": len(course.records),
        "reversals_in_10_min": reversals(course.records, 600.0),
        "last_setting": {"max_num_seqs": course.settings[-1][1].dit_max_num_seqs, "request_batch_max_wait_ms": course.settings[-1][1].wait_ms},
    }  # fmt: skip


def together(rows: Sequence[Mapping[str, Any]], grids: Sequence[Mapping[Pair, tuple[float, float]]]) -> dict[str, Any]:
    """Return the tuner against every static pair over all traces: the mean of p95 / best static p95 of the trace."""
    best = [row["best_static_p95_s"] for row in rows]
    pairs = {
        pair: statistics.fmean(static.get(pair, static[pair[0], 0.0])[0] / base for static, base in zip(grids, best, strict=True))
        for pair in grids[0]
    }  # fmt: skip
    winner = min(pairs, key=lambda pair: pairs[pair])
    return {
        "tuner_mean_p95_ratio": statistics.fmean(row["tuner_p95_s"] / row["best_static_p95_s"] for row in rows),
        "best_single_pair_mean_p95_ratio": pairs[winner],
        "best_single_pair": f"{winner[0]}, {winner[1]:g} ms",
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.tuner", description=__doc__)
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder of tuner.json")
    parser.add_argument("--docs", type=Path, help="folder of the page whose table and plots are written")
    parser.add_argument("--only", nargs="*", help="names of traces; all unless given")
    parser.add_argument("--share", type=float, default=1.0, help="share of each trace that is drawn, for a quick look")
    options = parser.parse_args(argv)
    chosen = [
        replace(s, parts=[replace(part, hours=part.hours * options.share) for part in s.parts])
        for s in SCENARIOS
        if not options.only or s.name in options.only
    ]
    rows, grids, courses = [], [], []
    for scenario in chosen:
        began = time.perf_counter()
        grids.append(grid(scenario, CAPS, WAITS_MS))
        courses.append(run_tuned(profile_of(scenario.profile), scenario.asks(), scenario.start))
        rows.append(row_of(scenario, grids[-1], courses[-1]))
        row = rows[-1]
        print(f"{scenario.name}: p95 {row['tuner_p95_s']:.2f} s against {row['best_static_p95_s']:.2f} s, {row['decisions']} decisions ({time.perf_counter() - began:.0f} s)", flush=True)  # fmt: skip
    checks = {} if options.only else {**convergence(), **step_in_load(), **wrong_profiles(), **decision_cost()}
    plans = [] if options.only else planner()
    shifting = [row["best_static_p95_s"] / row["tuner_p95_s"] for row in rows if row["shifts"]]
    report.write(
        "tuner",
        workload={"profile": CEILING, "caps": list(CAPS), "waits_ms": list(WAITS_MS), "start": "8, 20 ms", "share": options.share},
        warm_up=0,
        repeats=1,
        spread={},
        figures={
            "num_traces": len(rows),
            "worst_p95_ratio": max(row["tuner_p95_s"] / row["best_static_p95_s"] for row in rows),
            "worst_throughput_ratio": min(row["tuner_images_per_s"] / row["best_static_images_per_s"] for row in rows),
            **({"gain_where_the_load_shifts": min(shifting) - 1} if shifting else {}),
            **together(rows, grids),
            **checks,
        },
        tables={"traces": rows, "planner": plans},
        folder=options.results,
    )  # fmt: skip
    if options.docs:
        plot_traces(chosen, courses, grids, options.docs / "images")
        write_table(rows, plans, checks, options.docs / "tuning.md")


if __name__ == "__main__":
    main(sys.argv[1:])
