"""The memory model against what an H200 needed, and what admission makes of it."""

from __future__ import annotations

import dataclasses

import pytest

from mammoth_dit.admission import IDLE, Ask, Limits, refusal
from mammoth_dit.memory import Memory, decode_bytes, step_bytes
from mammoth_dit.model.config import ModelConfig
from mammoth_serving.tiny import tiny_config
from mammoth_wire.errors import ShapeTooLarge
from mammoth_wire.params import Diffusion

REAL_WIDTHS = {
    "hidden_size": 2520, "num_attention_heads": 21, "num_kv_heads": 7, "num_layers": 16, "multiple_of": 256,
    "axes_dim_rope": [40, 40, 40],
}  # fmt: skip
GIB = 2**30
TINY = tiny_config("preview")
CONFIG = ModelConfig.parse(
    TINY
    | {"gen_axes_dim_rope": [40, 40, 40], "gen_dit_config": TINY["gen_dit_config"] | REAL_WIDTHS}
    | {"gen_vae_config": TINY["gen_vae_config"] | {"block_out_channels": [128, 256, 512, 512]}}
)
MEASURED_DECODE_BYTES = 1.611e9  # of 1024 x 1024 pixels on an H200, fused
MEASURED_TILED_BYTES = 1.941e9  # of 2048 x 2048 pixels, in four tiles


def test_the_decoder_needs_what_was_measured():
    assert MEASURED_DECODE_BYTES <= decode_bytes(CONFIG, 1024, 1024) <= 1.25 * MEASURED_DECODE_BYTES
    assert decode_bytes(dataclasses.replace(CONFIG, vae=None), 1024, 1024) == 0


def test_a_decoder_in_tiles_needs_little_more_and_never_less_for_a_larger_picture():
    assert MEASURED_TILED_BYTES <= decode_bytes(CONFIG, 2048, 2048) <= 1.6 * MEASURED_TILED_BYTES
    sides = range(1024, 8192, 16)
    needed = [decode_bytes(CONFIG, side, side) for side in sides]
    assert needed == sorted(needed)


def test_a_step_needs_memory_by_the_token():
    one, four = (step_bytes(CONFIG, 1024, 1024, rows=rows) for rows in (1, 4))
    assert four == 4 * one
    assert 0.8 * GIB < one < 1.2 * GIB
    assert step_bytes(CONFIG, 2048, 2048) < 4 * one


@pytest.mark.parametrize(
    ("free_gib", "side_px", "fits"),
    [(2, 1024, False), (4, 1024, True), (4, 2048, False), (16, 2048, True), (100, 4096, True)],
)
def test_what_fits(free_gib, side_px, fits):
    assert Memory(CONFIG, free_gib * GIB).fits(side_px, side_px) is fits


@pytest.mark.parametrize("free_gib", [1, 4, 16])
def test_the_limit_is_told_and_holds(free_gib):
    memory = Memory(CONFIG, free_gib * GIB)
    side_px = memory.largest_side_px()
    assert memory.fits(side_px, side_px)
    assert not memory.fits(side_px + 16, side_px + 16)
    limits = Limits.of(CONFIG, memory=memory)
    params = Diffusion(side_px + 16, side_px + 16, guidance=1.0, cfg_range=(0.0, 1.0), steps=1)
    refused = refusal(Ask("a", params, synthetic=True), IDLE, limits)
    assert isinstance(refused, ShapeTooLarge)
    assert refused.metadata["limit"] == f"{side_px}x{side_px} pixels"
    assert (
        refusal(Ask("a", dataclasses.replace(params, height=side_px, width=side_px), synthetic=True), IDLE, limits)
        is None
    )
