"""Do: write down what the AR stage streams for every picture: the rows that the DiT is conditioned on in serving.

Each picture appears with several wordings and sampled grids. Which rows count is decided as in `mammoth_dit.selection`,
here for a whole batch at once.

M entries, T text rows (padded), G image rows, H LLM width, L tokens, V entries a picture.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoints.emoji.train import recipe
from checkpoints.emoji.train.llm import NUM_GRID, Sequences, hidden, joined, write_grids
from mammoth_ar.model.decoder import Decoder
from mammoth_dit.model.config import TokenIds

__all__ = ["Bank", "select"]

TEMPERATURE = 0.7  # a little below the serving temperature: nearly always the picture asked for
SAME_PICTURE = 0.8  # share of equal codes
ENCODE_BATCH = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Bank:
    """Text rows are padded on the right; `picture_M` says whose rows an entry holds."""

    text_MTH: Tensor
    num_text_M: Tensor
    image_MGH: Tensor
    picture_M: Tensor

    @classmethod
    def fill(cls, decoder: Decoder, sequences: Sequences, per_picture: int) -> Bank:
        """Every picture in `per_picture` random wordings, with a sampled grid for each.

        Where the LLM drew another picture, as it may when only a word of the name was given, the picture's own grid stands.
        """
        device = sequences.grids_NG.device
        generator = torch.Generator(device).manual_seed(2)
        num_pictures, num_wordings = sequences.lengths_NW.shape
        picture_M = torch.arange(num_pictures, device=device).repeat_interleave(per_picture)
        order_NW = torch.rand((num_pictures, num_wordings), generator=generator, device=device).argsort(-1)
        wording_M = order_NW[:, :per_picture].flatten()
        prompt_ML, length_M = (x[picture_M, wording_M] for x in (sequences.prompts_NWL, sequences.lengths_NW))
        written_MG, own_MG = (
            write_grids(decoder, prompt_ML, length_M, TEMPERATURE, generator),
            sequences.grids_NG[picture_M],
        )
        is_own_M1 = (written_MG == own_MG).float().mean(-1, keepdim=True) > SAME_PICTURE
        grid_MG = torch.where(is_own_M1, written_MG, own_MG)
        parts = zip(*(torch.split(x, ENCODE_BATCH) for x in (prompt_ML, length_M, grid_MG)), strict=True)
        text, num_text, image = zip(*(select(decoder, *part) for part in parts), strict=True)
        return cls(torch.cat(text), torch.cat(num_text), torch.cat(image), picture_M)


@torch.no_grad()
def select(decoder: Decoder, prompt_BL: Tensor, length_B: Tensor, grid_BG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return text rows [B,T,H] (compact, zeros after them), how many there are [B], and image rows [B,G,H]."""
    normed_BLH = hidden(decoder, joined(prompt_BL, length_B, grid_BG))
    place_BG = length_B.unsqueeze(-1) + torch.arange(NUM_GRID, device=length_B.device)
    tokens = TokenIds.parse(recipe.config()["llm_config"])
    visual = torch.tensor(sorted(tokens.visual), device=prompt_BL.device)
    is_text_BL = (prompt_BL < tokens.gen_vocab_start) & ~torch.isin(prompt_BL, visual)
    is_text_BL &= torch.arange(prompt_BL.shape[1], device=prompt_BL.device) < length_B.unsqueeze(-1)
    order_BL1 = (~is_text_BL).int().argsort(dim=-1, stable=True).unsqueeze(-1)
    num_text_B = is_text_BL.sum(-1)
    text_BLH = torch.take_along_dim(normed_BLH, order_BL1, dim=1)
    valid_BL1 = torch.arange(prompt_BL.shape[1], device=prompt_BL.device) < num_text_B.unsqueeze(-1)
    return (
        text_BLH * valid_BL1.unsqueeze(-1),
        num_text_B,
        torch.take_along_dim(normed_BLH, place_BG.unsqueeze(-1), dim=1),
    )
