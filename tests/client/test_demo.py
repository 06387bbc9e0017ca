"""What the demo asks for, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from mammoth_client.demo import main, wishes


@pytest.mark.parametrize(
    ("model", "shipped", "sides_px", "steps", "guidance"),
    [
        pytest.param("emoji", "emoji", {128}, {20}, {4.0}, id="the-shipped-one"),
        pytest.param("x/../emoji", "emoji", {128}, {20}, {4.0}, id="the-shipped-one-by-another-path"),
        pytest.param("tiny", "emoji", {128, 192, 256}, {12}, {None}, id="another"),
        pytest.param(None, None, {128, 192, 256}, {12}, {None}, id="none-ships"),
    ],
)
def test_wishes_suit_the_model(model, shipped, sides_px, steps, guidance):
    found = wishes(model and Path(model), shipped and Path(shipped))
    assert {side for wish in found for side in (wish.width, wish.height)} == sides_px
    assert {wish.steps for wish in found} == steps
    assert {wish.guidance for wish in found} == guidance
    assert len(found) == 8


def test_an_output_folder_that_cannot_be_made_is_bad_input():
    done = CliRunner().invoke(main, ["--out", "/proc/x"])
    assert (done.exit_code, done.stderr) == (2, "demo: out: cannot write into /proc/x: No such file or directory\n")
