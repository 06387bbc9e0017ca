"""Translate: bench/results/ar_h200.json to the plot of docs/performance-ar.md and its table.

python -m bench.ar_plots
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.pages import bring_in, pyplot, save

__all__ = ["main", "table"]

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "bench" / "results" / "ar_h200.json"
PAGE = ROOT / "docs" / "performance-ar.md"
PLOT = ROOT / "docs" / "images" / "ar-steps.svg"


def main() -> None:
    """Rewrite the plot, and the table between the marks of the page."""
    rows = json.loads(RESULT.read_text())["rows"]
    plot(rows)
    bring_in(PAGE, "make bench-ar", table(rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| family | KV rows | context | guidance | ms a step | floor | ratio | tokens/s | bits as alone |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(
        rows, key=lambda row: (row["family"] != "preview", row["guidance"], row["context"], row["num_rows"])
    ):
        guidance, equal = ("on" if row["guidance"] else "off"), ("equal" if row["bit_equal_to_solo"] else "NOT equal")
        lines.append(
            f"| {row['family']} | {row['num_rows']} | {row['context']} | {guidance} | {row['fast_ms']:.2f} | "
            f"{row['floor_ms']:.2f} | {row['ratio']:.3f} | {row['tokens_per_s']:.0f} | {equal} |"
        )
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]]) -> None:
    """Draw milliseconds a step and their floor by KV rows, a panel a family, a colour a context."""
    plt = pyplot()
    families = list(dict.fromkeys(row["family"] for row in rows))
    figure, axes = plt.subplots(1, len(families), figsize=(4.2 * len(families), 3), squeeze=False, sharey=True)
    for axis, family in zip(axes.flat, families, strict=True):
        here = [row for row in rows if row["family"] == family and not row["guidance"]]
        contexts = sorted({row["context"] for row in here})
        for context, colour in zip(contexts, ("tab:blue", "tab:green", "tab:red"), strict=False):
            line = sorted((row for row in here if row["context"] == context), key=lambda row: row["num_rows"])
            counts = [row["num_rows"] for row in line]
            axis.plot(
                counts, [row["fast_ms"] for row in line], marker="o", ms=3, color=colour, label=f"context {context}"
            )
            axis.plot(counts, [row["floor_ms"] for row in line], ls=":", color=colour)
            axis.set_xscale("log", base=2)
            axis.set_xticks(counts, [str(count) for count in counts])
        axis.set_title(f"{family}; dotted: floor", fontsize=9)
        axis.set_xlabel("KV rows", fontsize=8)
        axis.tick_params(labelsize=7)
    axes.flat[0].set_ylim(bottom=0)  # once all is drawn: panels share it, and setting it ends its growth
    axes.flat[0].set_ylabel("ms a step", fontsize=8)
    axes.flat[0].legend(fontsize=7)
    save(figure, PLOT)


if __name__ == "__main__":
    main()
