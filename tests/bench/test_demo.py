"""`make demo` at a small size, and how it tells waves apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from mammoth_client import Receipt
from mammoth_client.demo import waves


@pytest.mark.parametrize(
    ("joined", "found"),
    [
        pytest.param([], [], id="nothing-was-drawn"),
        pytest.param([(2.0, 1, 1), (1.0, 1, 2)], [[2], [1]], id="alone-in-order-of-joining"),
        pytest.param([(1.2, 2, 1), (5.0, 1, 2), (1.1, 2, 3)], [[1, 3], [2]], id="two-and-one"),
        pytest.param(
            [(1.0, 2, 4), (1.0, 2, 1), (3.0, 2, 3), (3.0, 2, 2)], [[1, 4], [2, 3]], id="two-waves-of-one-size"
        ),
        pytest.param([(1.0, 3, 1), (1.0, 3, 2)], [[1, 2]], id="one-of-the-wave-is-not-ours"),
    ],
)
def test_a_wave_is_told_from_when_its_pictures_joined(joined, found):
    assert waves(joined) == found


def sides_px(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def test_the_demo_draws_saves_and_accounts_for_its_pictures(tiny_checkpoint, tmp_path: Path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "mammoth_client.demo", "--model", str(tiny_checkpoint), "--out", str(out)]
    done = subprocess.run([*command, "--pictures", "2"], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 pictures are as their receipts say" in done.stdout
    assert "picture 1: tokens 72/72" in done.stderr
    assert "picture 2: steps 12/12" in done.stderr
    for seed, stem in [(1, "01-128x128-seed1"), (2, "02-128x128-seed2")]:
        assert sides_px(out / f"{stem}.png") == (128, 128)
        assert Receipt.from_json((out / f"{stem}.receipt.json").read_text()).diffusion.seed == seed
    assert sides_px(out / "contact-sheet.png") == (2 * 136, 136)


def test_a_model_that_cannot_be_served_ends_the_demo_with_its_reason(tmp_path: Path):
    command = [sys.executable, "-m", "mammoth_client.demo", "--model", str(tmp_path), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr
