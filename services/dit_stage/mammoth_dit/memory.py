"""Decide how much memory a picture takes while it is drawn, and whether a device has it. A model, checked by the benchmark.

A step's peak is what its tokens need inside one block; the decoder's is its last, full-size layers. Both can come at once: a
picture is decoded while the next one steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from mammoth_dit.model.config import LATENT_FACTOR, ModelConfig
from mammoth_dit.tiling import Tiling

__all__ = ["Memory", "decode_bytes", "step_bytes"]

STREAM_COPIES = 5  # of a token at model width: stream and branch, before and after, and the normed input of a product
DECODE_COPIES = 7  # of a full-size layer: input, output, their channels-last copies, norm and activation
MIDDLE_COPIES = (
    10  # of a layer of latents in the decoder's middle: beside the above, queries, keys, values of attention
)
IMAGE_ITEM_BYTES = 4  # of the three channels that tiles are summed in
TYPICAL_CAPTION_TOKENS = 1024  # more than captions have: an estimate that errs on the safe side
HELD_BACK = 0.1  # of the free memory: allocator rounding, library workspaces


def step_bytes(config: ModelConfig, height_px: int, width_px: int, *, rows: int = 1, item_bytes: int = 2) -> int:
    """Return the peak of a guided step of `rows` pictures beyond the weights."""
    dit = config.transformer
    num_image = (height_px // dit.side_multiple_px) * (width_px // dit.side_multiple_px)
    num_tokens = rows * (2 * num_image + TYPICAL_CAPTION_TOKENS)
    heads = (2 * dit.num_attention_heads + 2 * dit.num_kv_heads) * dit.head_dim
    return num_tokens * item_bytes * (STREAM_COPIES * dit.hidden_size + heads + 3 * dit.ffn_width)


def decode_bytes(config: ModelConfig, height_px: int, width_px: int, *, item_bytes: int = 2) -> int:
    """Return the peak of decoding one picture beyond the weights; 0 without a decoder.

    A picture in tiles counts as the largest tile there may be, so that a larger picture never needs less. Beside it lie the
    sum of the tiles and what the decoder's middle, which stays whole, made.
    """
    if config.vae is None:
        return 0
    channels = [int(count) for count in config.vae.get("block_out_channels", (64,))]
    num_pixels, tile_pixels = height_px * width_px, Tiling().max_latents * LATENT_FACTOR**2
    at_once = min(num_pixels, tile_pixels) * channels[0] * item_bytes * DECODE_COPIES
    if num_pixels <= tile_pixels:
        return at_once
    middle = num_pixels // LATENT_FACTOR**2 * channels[-1] * item_bytes
    return max(at_once + middle + 3 * num_pixels * IMAGE_ITEM_BYTES, MIDDLE_COPIES * middle)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a device has left for pictures once the weights are loaded."""

    config: ModelConfig
    free_bytes: int
    item_bytes: int = 2

    def fits(self, height_px: int, width_px: int) -> bool:
        """Tell whether one picture of this size can be drawn."""
        size = height_px, width_px
        needed = step_bytes(self.config, *size, item_bytes=self.item_bytes)
        needed += decode_bytes(self.config, *size, item_bytes=self.item_bytes)
        return needed <= (1 - HELD_BACK) * self.free_bytes

    def largest_side_px(self) -> int:
        """Return the side of the largest square picture that fits."""
        multiple = self.config.transformer.side_multiple_px
        low, high = 0, 1
        while self.fits(high * multiple, high * multiple):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle * multiple, middle * multiple) else (low, middle)
        return low * multiple
