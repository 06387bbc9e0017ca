"""Decide the visual codes: k-means over the leading principal components of 16 x 16 pixel patches. Only training needs it.

The LLM writes a code a patch, the DiT never sees one: it reads the LLM's hidden states. So the codes need not be
decodable, only name what lies where.

P patches, F features, K codes, N pictures, G patches a picture.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["grids"]

PATCH_PX = 16
NUM_COMPONENTS = 48
NUM_ROUNDS = 25


def grids(pictures: npt.NDArray[np.uint8], num_codes: int, seed: int = 0) -> npt.NDArray[np.int16]:
    """Return the code of every patch, [N, 64] in reading order, for uint8 pictures [N, 128, 128, 3]."""
    features_PF = _components(_patches(pictures))
    distinct_PF = torch.unique((features_PF * 100).round(), dim=0) / 100  # plain background would take every seed
    order = torch.randperm(len(distinct_PF), generator=torch.Generator().manual_seed(seed))
    centres_KF = distinct_PF[order[:num_codes]]
    for _ in range(NUM_ROUNDS):
        centres_KF = _mean_of_members(distinct_PF, _nearest(distinct_PF, centres_KF), centres_KF)
    return _nearest(features_PF, centres_KF).view(len(pictures), -1).numpy().astype(np.int16)


def _patches(pictures: npt.NDArray[np.uint8]) -> Tensor:
    x = torch.from_numpy(pictures).float() / 255
    num, side = len(x), x.shape[1] // PATCH_PX
    return x.view(num, side, PATCH_PX, side, PATCH_PX, 3).transpose(2, 3).reshape(num * side * side, -1)


def _components(x_PF: Tensor) -> Tensor:
    centred_PF = x_PF - x_PF.mean(0)
    _, vectors = torch.linalg.eigh(centred_PF.T @ centred_PF / len(x_PF))
    leading_PF: Tensor = centred_PF @ vectors[:, -NUM_COMPONENTS:]
    return leading_PF


def _nearest(x_PF: Tensor, centres_KF: Tensor) -> Tensor:
    half_norm_K = centres_KF.square().sum(-1) / 2
    return torch.cat([(part @ centres_KF.T - half_norm_K).argmax(-1) for part in torch.split(x_PF, 8192)])


def _mean_of_members(x_PF: Tensor, code_P: Tensor, centres_KF: Tensor) -> Tensor:
    """A centre without members stays where it is."""
    sums_KF = torch.zeros_like(centres_KF).index_add_(0, code_P, x_PF)
    counts_K1 = torch.bincount(code_P, minlength=len(centres_KF)).unsqueeze(-1)
    return torch.where(counts_K1 > 0, sums_KF / counts_K1.clamp(min=1), centres_KF)
