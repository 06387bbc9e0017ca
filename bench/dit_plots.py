"""Translate: bench/results/dit_h200.json to the plot of docs/performance.md and its table.

python -m bench.dit_plots
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.pages import bring_in, pyplot, save

__all__ = ["main", "table"]

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "bench" / "results" / "dit_h200.json"
PAGE = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "images" / "dit-steps.svg"


def main() -> None:
    """Rewrite the plot, and the table between the marks of the page."""
    rows = json.loads(RESULT.read_text())["rows"]
    plot(rows)
    bring_in(PAGE, "make bench-dit", table(rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| family | px | batch | plain | fast | ceiling | fast / ceiling | bits as alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = " | ".join(f"{row[name]:.1f}" for name in ("plain_ms", "fast_ms", "ceiling_ms"))
        equal = "equal" if row["bit_equal_to_solo"] else "not equal: rows run alone"
        lines.append(
            f"| {row['family']} | {row['size']} | {row['batch']} | {times} | {row['fast_to_ceiling']:.3f} | {equal} |"
        )
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]]) -> None:
    """Draw milliseconds a picture and step by batch, a panel a size."""
    plt = pyplot()
    preview = [row for row in rows if row["family"] == "preview"]
    sizes = sorted({row["size"] for row in preview}, reverse=True)
    figure, axes = plt.subplots(1, len(sizes), figsize=(3 * len(sizes), 2.8), squeeze=False)
    for axis, size in zip(axes.flat, sizes, strict=True):
        here = [row for row in preview if row["size"] == size]
        batches = [row["batch"] for row in here]
        for name, style in (("plain", "tab:grey"), ("fast", "tab:blue"), ("ceiling", "tab:orange")):
            values = [row[f"{name}_ms"] / row["batch"] for row in here]
            axis.plot(batches, values, marker="o", markersize=3, color=style, label=name)
        axis.set_title(f"{size} px", fontsize=9)
        axis.set_xscale("log", base=2)
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
        axis.set_xlabel("batch", fontsize=8)
    axes.flat[0].set_ylabel("ms a step and picture", fontsize=8)
    axes.flat[0].legend(fontsize=7)
    save(figure, PLOT)


if __name__ == "__main__":
    main()
