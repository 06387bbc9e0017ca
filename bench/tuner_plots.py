"""Translate: what bench.tuner measured to plots and to the table of docs/tuning.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.pages import bring_in, pyplot, save
from bench.scenarios import Scenario
from mammoth_operator.tuning.closed_loop import Course
from mammoth_operator.tuning.samples import Sample, percentile

__all__ = ["plot_pair", "plot_traces", "write_table"]

BIN_S = 120.0


def plot_traces(
    scenarios: Sequence[Scenario],
    courses: Sequence[Course],
    grids: Sequence[Mapping[Any, tuple[float, float]]],
    folder: Path,
) -> None:
    """Write one picture a trace: p95 by time with the tuner, its cap by time, and every static pair's p95."""
    plt = pyplot()

    rows = (len(scenarios) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(12, 2.4 * rows), squeeze=False)
    for axis, scenario, course, static in zip(axes.flat, scenarios, courses, grids, strict=False):
        hours, p95s = _by_time(course.samples)
        axis.plot(hours, p95s, linewidth=1.0, label="p95 of 2 min, tuner")
        axis.axhline(
            min(p95 for p95, _ in static.values()),
            color="grey",
            linestyle="--",
            linewidth=0.8,
            label="best static, whole trace",
        )
        axis.set_title(scenario.name, fontsize=9)
        axis.set_ylabel("s", fontsize=8)
        caps = axis.twinx()
        at = [when / 3600 for when, _ in course.settings] + [max(hours, default=0.0)]
        values = [setting.dit_max_num_seqs for _, setting in course.settings]
        caps.step(at, [*values, values[-1]], where="post", color="tab:orange", linewidth=1.0)
        caps.set_ylim(0, 9)
        caps.set_ylabel("cap", fontsize=8, color="tab:orange")
        axis.tick_params(labelsize=7)
        caps.tick_params(labelsize=7)
    axes.flat[0].legend(fontsize=7)
    figure.supxlabel("hours", fontsize=8)
    save(figure, folder / "tuner-traces.svg")


def _by_time(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    bins: dict[int, list[float]] = {}
    for sample in samples:
        bins.setdefault(int(sample.ask.at_s // BIN_S), []).append(sample.latency_s)
    return [index * BIN_S / 3600 for index in sorted(bins)], [percentile(bins[index], 0.95) for index in sorted(bins)]


def write_table(
    rows: Sequence[Mapping[str, Any]], plans: Sequence[Mapping[str, Any]], checks: Mapping[str, Any], page: Path
) -> None:
    """Replace what stands between the two marks of the page: traces, planner, and what a decision takes."""
    lines = [
        "| trace | seed | pictures | tuner p95 | best static p95 | static pair | tuner images/s | best static images/s | changes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        pair = row["best_static"]
        lines.append(
            f"| {row['name']} | {row['seed']} | {row['pictures']} | {row['tuner_p95_s']:.2f} s | {row['best_static_p95_s']:.2f} s "
            f"| {pair['max_num_seqs']}, {pair['request_batch_max_wait_ms']:g} ms | {row['tuner_images_per_s']:.3f} "
            f"| {row['best_static_images_per_s']:.3f} | {row['decisions']} |"
        )
    if plans:
        lines += [
            "",
            "| planner trace | seed | promise | p95 | mean GPUs | exhaustive search | ratio | scalings | flaps |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
    for row in plans:
        lines.append(
            f"| {row['name']} | {row['seed']} | {row['promise_s']:.1f} s | {row['p95_s']:.1f} s | {row['mean_gpus']:.2f} "
            f"| {row['exhaustive_gpus']} | {row['gpu_ratio']:.2f} | {row['scalings']} | {row['flaps']} |"
        )
    if checks:
        lines += [
            "",
            f"| of {checks['objects']} objects, CPU time | decisions | p50 | p95 | slowest |",
            "|---|---|---|---|---|",
        ]
        for name in ("tuner", "planner"):
            figures = " | ".join(
                f"{checks[f'{name}_decision_cpu_ms_{label}']:.1f} ms" for label in ("p50", "p95", "max")
            )
            lines.append(f"| {name} | {checks[f'{name}_decisions']} | {figures} |")
    bring_in(page, "make bench-tuner", "\n".join(lines))


def plot_pair(real: Sequence[Sample], foretold: Sequence[Sample], folder: Path) -> None:
    """Write latencies and wave sizes of one trace side by side, as the services drew it and as the twin said."""
    plt = pyplot()

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
    for label, samples in (("services", real), ("twin", foretold)):
        times = sorted(sample.latency_s for sample in samples)
        left.step(times, [(index + 1) / len(times) for index in range(len(times))], where="post", label=label)
    left.set_xlabel("seconds to a picture")
    left.set_ylabel("share of pictures")
    left.legend()
    largest = max(sample.wave_size for sample in (*real, *foretold))
    for offset, (label, samples) in ((-0.2, ("services", real)), (0.2, ("twin", foretold))):
        sizes = [sample.wave_size for sample in samples]
        right.bar(
            [size + offset for size in range(1, largest + 1)],
            [sizes.count(size) for size in range(1, largest + 1)],
            0.4,
            label=label,
        )
    right.set_xlabel("pictures in a wave")
    right.set_ylabel("pictures")
    save(figure, folder / "twin-services.svg")
