"""Decide a padded batch of captions: the production modules of the DiT stage, run with gradients and one static shape.

Serving computes each caption alone and without padding; training needs hundreds at once. Text rows of unequal number, then
the Q-Former's queries, are packed to the left and padded on the right under a mask, which gives the same numbers.

B rows, T text rows (padded), Q queries, C caption tokens (padded), n image tokens, S = C + n, H LLM width, D width, G image rows,
P rotated pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mammoth_dit.model.blocks import ContextBlock
from mammoth_dit.model.config import ModelConfig
from mammoth_dit.model.qformer import QFormer
from mammoth_dit.model.rotary import Rotation, caption_positions, image_positions, rotation
from mammoth_dit.model.transformer import Context, DiffusionTransformer

__all__ = ["Captions", "Conditioned"]


@dataclass(frozen=True, slots=True, eq=False)
class Captions:
    """What a batch is conditioned on. A row of which `is_dropped_B` holds gets no caption at all: the unconditional branch."""

    text_BTH: Tensor
    num_text_B: Tensor
    image_BGH: Tensor
    is_dropped_B: Tensor


class Conditioned(nn.Module):
    """Transformer and Q-Former together; `max_text` is T, `side` the number of patches on a side."""

    caption_cos: Tensor
    caption_sin: Tensor
    joint_cos: Tensor
    joint_sin: Tensor

    def __init__(
        self, transformer: DiffusionTransformer, refiner: QFormer, config: ModelConfig, max_text: int, side: int
    ) -> None:
        super().__init__()
        assert config.num_queries is not None, "the emoji checkpoint has a Q-Former"
        self.transformer, self.refiner = transformer, refiner
        self.side, self.max_caption = side, max_text + config.num_queries
        lengths = range(self.max_caption + 1)
        positions = torch.stack([_joint_positions(length, side, self.max_caption) for length in lengths])
        for name, where in (("caption", caption_positions(self.max_caption)), ("joint", positions)):
            by = rotation(where, config.rotary.widths, torch.float32, torch.device("cpu"))
            self.register_buffer(f"{name}_cos", by.cos, persistent=False)
            self.register_buffer(f"{name}_sin", by.sin, persistent=False)

    def forward(self, x: Tensor, t_B: Tensor, captions: Captions) -> Tensor:
        """Return velocities of latents `x` at times `t_B`."""
        velocity: Tensor = self.transformer(x, t_B, self.context(captions))
        return velocity

    def context(self, captions: Captions) -> Context:
        """Return the padded context of a batch; its gradients reach both modules."""
        num_B = captions.num_text_B + self.refiner.query.shape[1]
        caption_BCD = self._caption(captions, num_B)
        num_B = num_B.masked_fill(captions.is_dropped_B, 0)
        num_image = self.side * self.side
        place_BS = torch.arange(self.max_caption + num_image, device=num_B.device).expand(len(num_B), -1)
        past_BS = place_BS - num_B.unsqueeze(-1)
        source_BS = torch.where(past_BS < 0, place_BS, self.max_caption + past_BS)
        source_BS = source_BS.clamp(max=self.max_caption + num_image)  # the one zero token
        image_Bn = num_B.unsqueeze(-1) + torch.arange(num_image, device=num_B.device)
        joint = Rotation(self.joint_cos[num_B], self.joint_sin[num_B])
        image = Rotation(
            *(torch.take_along_dim(table, image_Bn.unsqueeze(-1), dim=1) for table in (joint.cos, joint.sin))
        )
        keep_BS = past_BS < num_image
        return Context(caption_BCD, source_BS, image_Bn, keep_BS, joint, image, self.side, self.side)

    def _caption(self, captions: Captions, num_B: Tensor) -> Tensor:
        queries_BQH = self.refiner(captions.image_BGH)
        rows_BRH = functional.pad(
            torch.cat((captions.text_BTH.to(queries_BQH.dtype), queries_BQH), dim=1), (0, 0, 0, 1)
        )
        max_text = captions.text_BTH.shape[1]
        place_C = torch.arange(self.max_caption, device=num_B.device)
        past_text_BC = place_C - captions.num_text_B.unsqueeze(-1)
        source_BC = torch.where(past_text_BC < 0, place_C, max_text + past_text_BC).clamp(max=self.max_caption)
        tokens_BCD = self.transformer.time_caption_embed.caption(
            torch.take_along_dim(rows_BRH, source_BC.unsqueeze(-1), dim=1), None
        )
        by, keep_BC = Rotation(self.caption_cos, self.caption_sin), place_C < num_B.unsqueeze(-1)
        for block in self.transformer.context_refiner:
            assert isinstance(block, ContextBlock)
            tokens_BCD = _masked(block, tokens_BCD, by, keep_BC)
        return tokens_BCD


def _masked(block: ContextBlock, x_BCD: Tensor, by: Rotation, keep_BC: Tensor) -> Tensor:
    """Return what `block` gives for rows that carry padding."""
    x_BCD = x_BCD + block.norm2(block.attn(block.norm1(x_BCD), by, keep_BC))
    out_BCD: Tensor = x_BCD + block.ffn_norm2(block.feed_forward(block.ffn_norm1(x_BCD)))
    return out_BCD


def _joint_positions(num_caption: int, side: int, max_caption: int) -> Tensor:
    """Return [S,3]: caption, image, then position 0 for the padding."""
    positions = torch.cat((caption_positions(num_caption), image_positions(side, side, shift=num_caption)))
    return functional.pad(positions, (0, 0, 0, max_caption - num_caption))
