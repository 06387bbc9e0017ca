"""The diffusion transformer, plain path: short, dtype-generic, the definition that a fast path is tested against.

Work is split by what it depends on: `caption` once per request, `pack` once per group of rows, `forward` once per step.

Axes: B rows, C caption tokens, n image tokens, S = C + n joint tokens (padded), D width, H LLM width, T time width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mammoth_dit.model.blocks import ContextBlock, ModulatedBlock, OutputHead
from mammoth_dit.model.config import ModelConfig
from mammoth_dit.model.embeddings import TimeCaptionEmbed, patchify, unpatchify
from mammoth_dit.model.rotary import Rotation, caption_positions, image_positions, rotation

__all__ = ["Context", "DiffusionTransformer"]


@dataclass(frozen=True, slots=True)
class Context:
    """What a group of rows conditions on in every step, and where each token of a joint row comes from and goes to.

    A joint row is [C valid caption tokens][n image tokens][padding]. `source_BS` indexes the row's
    [padded caption | image | one zero token]; `image_Bn` says where its image tokens lie. `keep_BS` is None when no row
    is padded. Everything lies on the model's device, so that a step needs nothing from the host.
    """

    caption_BCD: Tensor
    source_BS: Tensor
    image_Bn: Tensor
    keep_BS: Tensor | None
    joint_rotation: Rotation
    image_rotation: Rotation
    num_rows: int
    num_columns: int


class DiffusionTransformer(nn.Module):
    """Predict the velocity (image - noise) of latents at a time, under the caption of each row.

    Parameters that serve only image editing (`ref_image_*`, `image_index_embedding`) are not part of it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dit = config.transformer
        self.patch_size = dit.patch_size
        self.rotary = config.rotary
        self.x_embedder = nn.Linear(dit.patch_size**2 * dit.in_channels, dit.hidden_size)
        self.time_caption_embed = TimeCaptionEmbed(dit, config.refiner, config.llm_width)
        self.noise_refiner = nn.ModuleList(ModulatedBlock(dit) for _ in range(dit.num_refiner_layers))
        self.context_refiner = nn.ModuleList(ContextBlock(dit) for _ in range(dit.num_refiner_layers))
        self.layers = nn.ModuleList(ModulatedBlock(dit) for _ in range(dit.num_layers))
        self.norm_out = OutputHead(dit)

    @property
    def dtype(self) -> torch.dtype:
        return self.x_embedder.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.x_embedder.weight.device

    def caption(self, text_CH: Tensor, image_CH: Tensor | None = None) -> Tensor:
        """Return the caption tokens [C, D] of one row, after the context refiner.

        `text_CH` goes through the projection (Preview appends its queries to it before); `image_CH` are Dev's image rows
        for the nested Q-Former. No rows at all give [0, D]: the caption path is skipped.
        """
        if text_CH.shape[0] == 0 and image_CH is None:
            return text_CH.new_zeros((0, self.x_embedder.out_features))
        tokens_BCD = self.time_caption_embed.caption(text_CH[None], None if image_CH is None else image_CH[None])
        by = self._rotation(caption_positions(tokens_BCD.shape[1]))
        for block in self.context_refiner:
            tokens_BCD = block(tokens_BCD, by)
        return tokens_BCD[0]

    def pack(self, captions: Sequence[Tensor], num_rows: int, num_columns: int) -> Context:
        """Lay out rows of unequal caption length [C, D] over one grid of num_rows x num_columns patches."""
        lengths = [caption.shape[0] for caption in captions]
        num_image, longest = num_rows * num_columns, max(lengths)
        zero = longest + num_image
        sources = [torch.cat((torch.arange(length), torch.arange(longest, zero))) for length in lengths]
        positions = [
            torch.cat((caption_positions(length), image_positions(num_rows, num_columns, shift=length)))
            for length in lengths
        ]
        source_BS = pad_sequence(sources, batch_first=True, padding_value=zero).to(self.device)
        image_Bn = torch.tensor(lengths)[:, None] + torch.arange(num_image)
        joint = self._rotation(pad_sequence(positions, batch_first=True))
        image = self._rotation(torch.stack([row[length:] for row, length in zip(positions, lengths, strict=True)]))
        return Context(
            caption_BCD=pad_sequence(list(captions), batch_first=True),
            source_BS=source_BS,
            image_Bn=image_Bn.to(self.device),
            keep_BS=None if min(lengths) == longest else source_BS != zero,
            joint_rotation=joint,
            image_rotation=image,
            num_rows=num_rows,
            num_columns=num_columns,
        )

    def forward(self, x: Tensor, t_B: Tensor, context: Context) -> Tensor:
        """Return velocities of latents `x` [B, channels, h, w] at per-row times `t_B` (0 noise, 1 image), same shape."""
        temb_BT = self.time_caption_embed.timestep_embedder(t_B)
        image_BnD = self.x_embedder(patchify(x, self.patch_size))
        for block in self.noise_refiner:
            image_BnD = block(image_BnD, context.image_rotation, None, temb_BT)
        joint_BSD = self._join(image_BnD, context)
        for block in self.layers:
            joint_BSD = block(joint_BSD, context.joint_rotation, context.keep_BS, temb_BT)
        out_BS = self.norm_out(joint_BSD, temb_BT)
        out_Bn = torch.take_along_dim(out_BS, context.image_Bn[..., None], dim=1)
        return unpatchify(out_Bn, self.patch_size, context.num_rows, context.num_columns)

    def _join(self, image_BnD: Tensor, context: Context) -> Tensor:
        zero_B1D = torch.zeros_like(image_BnD[:, :1])
        source = torch.cat((context.caption_BCD, image_BnD, zero_B1D), dim=1)
        return torch.take_along_dim(source, context.source_BS[..., None], dim=1)

    def _rotation(self, positions: Tensor) -> Rotation:
        return rotation(positions, self.rotary.widths, self.dtype, self.device)
