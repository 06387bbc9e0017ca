"""What README promises a newcomer: a handful of commands, typed as they stand there, and a picture."""

from __future__ import annotations

import numpy as np
import pytest
from harness.errors import Unavailable
from PIL import Image
from playing.newcomer import first_picture, readme_commands

PROGRAMS = {"pip", "helm", "kubectl", "mammoth"}


def test_readme_needs_five_commands():
    commands = readme_commands()
    assert len(commands) <= 5
    assert {command.split()[0] for command in commands} == PROGRAMS


@pytest.mark.node
def test_a_newcomer_gets_a_picture(shell, images):
    if not images.published:
        raise Unavailable("README's commands name the published images, and this cluster has others")
    if shell("helm list --namespace mammoth-system --short"):
        raise Unavailable("the operator is installed already")
    path, took = first_picture(shell)
    picture = Image.open(path)
    assert (picture.format, picture.size) == ("PNG", (128, 128))
    pixels = np.asarray(picture.convert("RGB"), dtype=float)
    red = (pixels[..., 0] > 120) & (pixels[..., 1] < 90) & (pixels[..., 2] < 90)
    assert red.mean() > 0.1, "an apple is red"
    print(f"{images.kind} images: {len(readme_commands())} commands, {sum(took.values()):.0f} s: {took}")
