"""Benchmarks as a person starts them: `python -m bench.NAME` at the root of the repository."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADINGS = ["name", "commit", "hardware", "versions", "workload", "warm_up", "repeats", "spread"]


@pytest.fixture
def run_bench(tmp_path: Path):
    """Return a function that runs a benchmark at a small size, checks what all results share, and returns its result."""

    def run(name: str, *flags: str) -> dict[str, Any]:
        command = [sys.executable, "-m", f"bench.{name}", "--results", str(tmp_path / "results"), *flags]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr
        assert f"{name}.json" in done.stdout
        result: dict[str, Any] = json.loads((tmp_path / "results" / f"{name}.json").read_text())
        assert list(result)[: len(HEADINGS)] == HEADINGS
        assert result["versions"].keys() == {"python", "torch", "grpcio", "protobuf", "mammoth-serve"}
        assert all(
            0 < lie["min"] <= lie["p50"] <= lie["p95"] <= lie["max"] < math.inf for lie in result["spread"].values()
        )
        return result

    return run
