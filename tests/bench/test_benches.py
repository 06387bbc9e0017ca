"""Every benchmark runs at a small size and writes what it promises. How fast anything is, is never tested here."""

from __future__ import annotations

import math

CODEC = ["encode", "decode", "codec", "digest", "codec_and_digest", "memcpy"]


def test_handover_says_how_long_the_last_rows_take_and_how_much_memory(run_bench):
    result = run_bench("handover", "--grid-rows", "200", "--width", "256", "--pace-ms", "1", "--repeats", "3")
    assert result["bytes"] == (38 + 200) * 256 * 2
    assert 0 < result["p50_ms"] <= result["p95_ms"] <= result["max_ms"] < math.inf
    assert result["sender_rise_bytes"] + result["receiver_rise_bytes"] == result["peak_rise_bytes"] >= 0
    assert result["peak_extra_bytes"] == result["peak_rise_bytes"] - result["bytes"]
    assert all(result[f"{part}_gb_per_s"] > 0 for part in CODEC)
    assert result["codec_to_memcpy"] > 0
    assert (result["warm_up"], result["repeats"]) == (3, 3)
    assert (result["workload"]["num_grid_rows"], result["workload"]["pace_ms"]) == (200, 1.0)


def test_overhead_compares_equal_pictures(run_bench):
    result = run_bench("overhead", "--side-px", "32", "--steps", "2", "--grid", "3", "--warm-up", "1", "--repeats", "2")
    assert all(0 < result[f"{part}_ratio"] < math.inf for part in ("ar", "dit", "ar_cpu", "dit_cpu", "total"))
    assert result["equal_pictures"] == 2
    assert len(result["last_rgb_sha256"]) == 64
    assert result["workload"]["ar_height"] == 3


def test_tuner_is_held_against_every_static_pair(run_bench):
    result = run_bench("tuner", "--only", "steady-small", "bursts", "--share", "0.03")
    assert [row["name"] for row in result["traces"]] == ["steady-small", "bursts"]
    for row in result["traces"]:
        assert 0 < row["best_static_p95_s"] < math.inf
        assert 0 < row["tuner_p95_s"] < math.inf
        assert row["best_static_p95_s"] <= row["default_static_p95_s"]
        assert row["tuner_images_per_s"] > 0 < row["best_static_images_per_s"]
    assert result["num_traces"] == 2
    assert result["worst_p95_ratio"] >= result["tuner_mean_p95_ratio"] > 0
