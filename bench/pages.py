"""Translate: figures to the pages of docs/. Equal results give equal files."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["bring_in", "pyplot", "save"]

END = "<!-- end of table -->"


def bring_in(page: Path, command: str, table: str) -> None:
    """Rewrite what stands on `page` between the mark of the command that measures it and the end of its table."""
    begin = f"<!-- table: {command} -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{begin}\n{table}\n{END}{after}")


def pyplot() -> ModuleType:
    """Return matplotlib's pyplot, drawing to files. Imported here: a benchmark without plots runs without it."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "mammoth"
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    """Write a figure as SVG and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot().close(figure)
