"""The DiT benchmarks: what needs no GPU runs at a small size, and the recorded result says what the page says."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULT = json.loads((ROOT / "bench" / "results" / "dit_h200.json").read_text())


def test_quality_is_measured_on_the_checkpoint_that_draws(run_bench):
    result = run_bench("dit_quality", "--prompts", "1", "--steps", "6")
    assert result["psnr_fp8"] > 20
    assert 0.5 < result["ssim_fp8"] <= 1
    assert [row["threshold"] for row in result["step_cache"]] == [0.06, 0.12, 0.24, 0.48]
    assert all(0 <= row["reused"] < 1 and row["psnr_db"] > 10 and 0 < row["ssim"] <= 1 for row in result["step_cache"])


def test_the_recorded_table_is_complete():
    rows = {(row["family"], row["size"], row["batch"]): row for row in RESULT["rows"]}
    assert {(size, batch) for family, size, batch in rows if family == "preview"} == {
        (size, batch) for size in (256, 512, 768, 1024) for batch in (1, 2, 4, 8)
    }
    for row in rows.values():
        assert row["fast_ms"] < row["plain_ms"]
        assert isinstance(row["bit_equal_to_solo"], bool)
    page = (ROOT / "docs" / "performance.md").read_text()
    assert all(f"| {row['fast_ms']:.1f} | {row['ceiling_ms']:.1f} |" in page for row in RESULT["rows"])


def test_the_recorded_run_has_every_part():
    assert not [name for name in RESULT if name.startswith("failed_")]
    assert all(row["bit_equal"] for row in RESULT["graphs"])
    assert all(row.keys() >= {"eager_ms", "compiled_ms"} for row in RESULT["peer"] if row["batch"] == 1)
    whole, tiled = RESULT["tiles"]
    assert tiled["peak_bytes"] <= RESULT["tiles_model_bytes"] < whole["peak_bytes"]
    request, step = RESULT["modes"]
    assert step["mean_latency_s"] <= request["mean_latency_s"]
    assert step["pictures_per_s"] >= 0.98 * request["pictures_per_s"]
    assert RESULT["weights_held_to_file"] < 1.1
