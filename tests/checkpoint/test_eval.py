"""The features of the evaluation, and the evaluation itself at a small size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from bench.retrieval import Gallery

ROOT = Path(__file__).resolve().parents[2]
NUM = 48


@pytest.fixture(scope="module")
def shapes() -> np.ndarray:
    """Coloured ellipses and boxes over white, each picture its own."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(NUM):
        image = Image.new("RGB", (128, 128), "white")
        draw = ImageDraw.Draw(image)
        for kind in (draw.ellipse, draw.rectangle, draw.ellipse):
            x, y = random.integers(0, 80, 2).tolist()
            kind((x, y, x + 40, y + 40), fill=tuple(random.integers(0, 256, 3).tolist()))
        found.append(np.asarray(image))
    return np.stack(found)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda x: x, id="none"),
        pytest.param(lambda x: x + np.random.default_rng(1).normal(0, 10, x.shape), id="noise"),
        pytest.param(lambda x: np.roll(x, (2, -2), (1, 2)), id="shift"),
        pytest.param(lambda x: (x + np.roll(x, 1, 1) + np.roll(x, 1, 2) + np.roll(x, (1, 1), (1, 2))) / 4, id="blur"),
    ],
)
def test_a_picture_is_found_again_after_mild_damage(shapes, damage):
    damaged = np.clip(damage(shapes.astype(float)).round(), 0, 255).astype(np.uint8)
    assert not Gallery.of(shapes).ranks(damaged, np.arange(NUM)).any()


def test_another_picture_is_not_taken_for_it(shapes):
    assert Gallery.of(shapes).ranks(shapes, np.roll(np.arange(NUM), 1)).all()


def test_twins_are_no_nearer_than_each_other(shapes):
    twins = np.concatenate((shapes, shapes[:1]))
    assert Gallery.of(twins).ranks(shapes[:1], np.array([NUM])) == 0


@pytest.mark.timeout(600)
def test_the_evaluation_writes_its_figures_and_a_sheet(package, tmp_path):
    command = [sys.executable, "-m", "bench.eval_checkpoint", "--work", str(package), "--names", "3", "--steps", "2"]
    command += ["--results", str(tmp_path), "--sheet", str(tmp_path / "images" / "sheet.png")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "checkpoint.json").read_text())
    wanted = {"top1", "top5", "top1_unseen_wording", "psnr_db", "bytes", "ar_s", "dit_s"}
    assert wanted <= result.keys()
    assert all(0 <= result[name] <= 1 for name in ("top1", "top5", "top1_unseen_wording"))
    assert 0 < result["ar_s"] < 60
    assert (tmp_path / "images" / "sheet.png").stat().st_size > 0
