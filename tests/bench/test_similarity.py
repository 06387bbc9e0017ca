"""How near two pictures are, where the answer is known."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `bench` runs from the root and is never installed

from bench.similarity import LIMIT_DB, psnr_db, ssim

NOISE = np.random.default_rng(1).integers(0, 256, (24, 32, 3), dtype=np.uint8)


def flat(value: int) -> np.ndarray:
    return np.full((24, 32, 3), value, np.uint8)


def test_equal_pictures():
    assert psnr_db(NOISE, NOISE) == LIMIT_DB
    assert ssim(NOISE, NOISE) == pytest.approx(1)


def test_flat_pictures_differ_in_luminance_alone():
    assert psnr_db(flat(100), flat(110)) == pytest.approx(28.13, abs=0.01)
    assert ssim(flat(100), flat(110)) == pytest.approx((2 * 100 * 110 + 6.5025) / (100**2 + 110**2 + 6.5025))


def test_the_negative_of_a_picture_has_the_opposite_structure():
    assert ssim(NOISE, 255 - NOISE) < -0.8
