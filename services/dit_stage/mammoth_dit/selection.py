"""Decide which hidden rows condition a picture, and lay rows of unequal length out in one batch. Pure.

Axes: T tokens of a request, L rows, H LLM width, B requests.

**Source**: the DiT input contract of vLLM-Omni (PR #7476). Difference from the authors' code: the answer starts at the
prompt's length, so that every grid token conditions the picture, not only the last ten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mammoth_dit.model.config import TokenIds

__all__ = ["Selection", "count_rows", "pad", "select"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows of one request in sequence order, in the dtype and on the device they came in."""

    text_LH: Tensor
    image_LH: Tensor


def count_rows(token_ids: Sequence[int], answer_start: int, tokens: TokenIds) -> tuple[int, int]:
    """Return how many text rows and image rows `select` would find, from the ids alone."""
    question, answer = token_ids[:answer_start], token_ids[answer_start:]
    num_text = sum(token < tokens.gen_vocab_start and token not in tokens.visual for token in question)
    return num_text, sum(token >= tokens.gen_vocab_start for token in answer)


def select(hidden_TH: Tensor, token_ids_T: Tensor, answer_start: int, tokens: TokenIds) -> Selection:
    """Split rows: question tokens that are neither visual markers nor generation tokens; generation tokens of the answer.

    Everything else is dropped. `token_ids_T` is integer, on the CPU: the masks never wait for a device.
    """
    question_T = torch.arange(len(token_ids_T)) < answer_start
    gen_T = token_ids_T >= tokens.gen_vocab_start
    visual_T = torch.isin(token_ids_T, torch.tensor(sorted(tokens.visual), dtype=token_ids_T.dtype))
    text_T = question_T & ~gen_T & ~visual_T
    image_T = ~question_T & gen_T
    text, image = (mask_T.nonzero().squeeze(1).to(hidden_TH.device) for mask_T in (text_T, image_T))
    return Selection(text_LH=hidden_TH[text], image_LH=hidden_TH[image])


def pad(rows: Sequence[Tensor], masks: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Right-pad `rows` [1, L_i, H] with zeros and `masks` bool [1, L_i] with False to [B, Lmax, H] and [B, Lmax].

    Each mask must be a valid prefix, so compact rows before padding them. One item comes back unchanged. Raises ValueError for
    an empty list, unequal counts, a wrong rank, unequal widths, lengths that disagree, or a hole in a mask.
    """
    if not rows or len(rows) != len(masks):
        raise ValueError(f"{len(rows)} tensors of rows and {len(masks)} masks: equal counts above 0 are expected")
    for row, mask in zip(rows, masks, strict=True):
        if row.ndim != 3 or row.shape[0] != 1 or mask.shape != row.shape[:2] or row.shape[2] != rows[0].shape[2]:
            raise ValueError(
                f"rows {list(row.shape)} and mask {list(mask.shape)}: [1, L, {rows[0].shape[-1]}] and [1, L]"
            )
        if mask.device.type == "cpu" and not bool((mask.int().diff(dim=1) <= 0).all()):
            raise ValueError("a mask has a hole: valid rows come first")
    if len(rows) == 1:
        return rows[0], masks[0]
    longest = max(row.shape[1] for row in rows)
    padded = [functional.pad(row, (0, 0, 0, longest - row.shape[1])) for row in rows]
    padded_masks = [functional.pad(mask, (0, longest - mask.shape[1])) for mask in masks]
    return torch.cat(padded), torch.cat(padded_masks)
