"""Translate: pixels to PNG bytes. Runs on a thread of its own, never on the device's."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image

__all__ = ["encode"]


def encode(rgb: npt.NDArray[np.uint8]) -> bytes:
    """Return uint8 [H, W, 3] as a PNG file without metadata: equal pixels give equal bytes."""
    buffer = io.BytesIO()
    Image.fromarray(rgb).save(buffer, format="PNG", compress_level=3)
    return buffer.getvalue()
