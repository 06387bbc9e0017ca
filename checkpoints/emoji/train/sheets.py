"""Do: draw what training produced: sheets of pictures and loss curves, as PNG files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

__all__ = ["save_curve", "save_sheet"]

CURVE_SIZE = (640, 400)
MARGIN_PX = 48


def save_sheet(pictures: Sequence[npt.NDArray[np.uint8]], path: Path, columns: int = 16) -> None:
    """Write equal-sized uint8 pictures [H,W,3] side by side, row by row."""
    height, width, _ = pictures[0].shape
    sheet = Image.new("RGB", (columns * width, math.ceil(len(pictures) / columns) * height), "white")
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        sheet.paste(Image.fromarray(picture), (column * width, row * height))
    sheet.save(path, optimize=True)


def save_curve(points: Sequence[tuple[int, float]], path: Path) -> None:
    """Write loss over step, both ends of both axes labelled; the loss axis is logarithmic."""
    image = Image.new("RGB", CURVE_SIZE, "white")
    draw = ImageDraw.Draw(image)
    if len(points) > 1:
        steps, losses = zip(*points, strict=True)
        low, high = min(losses), max(losses)
        x = np.interp(steps, (steps[0], steps[-1]), (MARGIN_PX, CURVE_SIZE[0] - MARGIN_PX))
        y = np.interp(np.log(losses), (math.log(low), math.log(high) + 1e-9), (CURVE_SIZE[1] - MARGIN_PX, MARGIN_PX))
        draw.line(list(zip(x, y, strict=True)), fill="black", width=2)
        draw.text((4, MARGIN_PX - 16), f"{high:.4g}", fill="black")
        draw.text((4, CURVE_SIZE[1] - MARGIN_PX), f"{low:.4g}", fill="black")
        draw.text((MARGIN_PX, CURVE_SIZE[1] - 24), f"step {steps[0]}", fill="black")
        draw.text((CURVE_SIZE[0] - 2 * MARGIN_PX, CURVE_SIZE[1] - 24), f"{steps[-1]}", fill="black")
    image.save(path)
