"""Pixels survive their file, whatever the size, for a reader that is not ours."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from mammoth_dit import png


@pytest.mark.parametrize(("height", "width"), [(1, 1), (4, 5), (16, 2048), (128, 16), (129, 16), (300, 200)], ids=str)
@pytest.mark.parametrize("kind", ["noise", "flat", "ramp"])
def test_pixels_survive_their_file(height, width, kind):
    rgb = {
        "noise": np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8),
        "flat": np.full((height, width, 3), 200, np.uint8),
        "ramp": np.arange(height * width * 3, dtype=np.int64).reshape(height, width, 3).astype(np.uint8),
    }[kind]
    data = png.encode(rgb)
    assert data == png.encode(rgb.copy())
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        assert (image.format, image.mode) == ("PNG", "RGB")
        assert np.array_equal(np.asarray(image), rgb)


def test_flat_pictures_become_small_files():
    assert len(png.encode(np.zeros((512, 512, 3), np.uint8))) < 8_000


def test_rows_may_be_a_view():
    rgb = np.random.default_rng(2).integers(0, 256, (40, 60, 3), np.uint8)
    assert png.encode(rgb[::2, :30]) == png.encode(np.ascontiguousarray(rgb[::2, :30]))
