"""Translate: what a benchmark measured to `bench/results/NAME.json` and a table. The one place where results are written.

A result says where it comes from (commit, hardware, versions), what was done (workload, warm-up, repeats), how the repeats
lie (spread), and then its figures, each under its own name at the top.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

__all__ = ["RESULTS", "Figure", "Spread", "write"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("torch", "grpcio", "protobuf", "mammoth-serve")
Figure = float | int | bool | str


@dataclass(frozen=True, slots=True)
class Spread:
    """How the repeats of one quantity lie. `p95` is a value that was measured, the next higher one, never a mean of two."""

    min: float
    p50: float
    p95: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        p95 = np.percentile(values, 95, method="higher")
        return cls(min(values), float(np.median(values)), float(p95), max(values))


def write(
    name: str,
    *,
    workload: Mapping[str, Any],
    warm_up: int,
    repeats: int,
    spread: Mapping[str, Spread],
    figures: Mapping[str, Figure],
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    folder: Path = RESULTS,
) -> Path:
    """Write `folder`/`name`.json, print its figures as a table, and return the path.

    `warm_up` and `repeats` count what was run untimed and timed; `spread` has an entry for every figure that repeats.
    `tables` are written as they are, and not printed.
    """
    head = {
        "name": name,
        "commit": _commit(),
        "hardware": _hardware(),
        "versions": _versions(),
        "workload": dict(workload),
        "warm_up": warm_up,
        "repeats": repeats,
        "spread": {key: asdict(value) for key, value in spread.items()},
    }
    assert not head.keys() & figures.keys(), "a figure has the name of a heading"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**head, **figures, **(tables or {})}, indent=2, allow_nan=False) + "\n")
    _show(path, figures, spread)
    return path


def _show(path: Path, figures: Mapping[str, Figure], spread: Mapping[str, Spread]) -> None:
    table = Table("figure", "value", "min", "p50", "p95", "max", box=None)
    for key in (*figures, *(key for key in spread if key not in figures)):
        lie = [_text(value) for value in asdict(spread[key]).values()] if key in spread else []
        table.add_row(key, _text(figures[key]) if key in figures else "", *lie)
    console = Console()
    console.print(table)
    console.print(f"written to {path}", soft_wrap=True)


def _text(value: Figure) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _commit() -> dict[str, Any]:
    """Return the commit and whether the tree differs from it (results aside); None where git does not say."""
    changes = _git("status", "--porcelain", "--", ".", ":!bench/results")
    return {"id": _git("rev-parse", "--verify", "HEAD"), "dirty": None if changes is None else bool(changes)}


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _hardware() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "accelerator": _accelerator(),
        "load_average": os.getloadavg()[0],  # of the last minute: above the benchmark's own processes, neighbours ran
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _accelerator() -> str | None:
    import torch  # here, so that a benchmark that needs no torch measures without it

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
