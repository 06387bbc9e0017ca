"""Do: attention of every row of a stream over itself, with the library kernel that measured fastest on this device.

The mask of padding tokens lies in the spare channel of queries and keys (`ops.HeadLayout`), so no kernel sees a mask.

B rows, S tokens of a row, H heads (queries, then keys, then values), E padded head width, Q query heads.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mammoth_dit.fast.ops import HeadLayout

__all__ = ["CANDIDATES", "Attention", "fastest"]

CANDIDATES = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
NUM_WARM, NUM_TIMED = 3, 7

logger = logging.getLogger(__name__)


class Attention:
    """Grouped-query attention with one backend: the same one for every shape, so that a receipt can name it."""

    def __init__(self, heads: HeadLayout, backend: SDPBackend | None = None) -> None:
        """`backend` None leaves the choice to torch, as on the CPU."""
        self.heads = heads
        self.backend = backend

    @property
    def name(self) -> str:
        return "torch" if self.backend is None else self.backend.name.removesuffix("_ATTENTION").lower()

    def __call__(self, heads_BSHE: Tensor) -> Tensor:
        """Return softmax(q k^T / sqrt(head width)) v as [B * S, Q * E]; not causal."""
        q_BSQE, k_BSKE, v_BSKE = heads_BSHE.split(
            [self.heads.num_queries, self.heads.num_keys, self.heads.num_keys], dim=2
        )
        q, k, v = (x.transpose(1, 2) for x in (q_BSQE, k_BSKE, v_BSKE))
        scale, grouped = self.heads.width**-0.5, self.heads.num_queries != self.heads.num_keys
        if self.backend is None:
            out = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)
        else:
            with sdpa_kernel(self.backend):
                out = scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)


def fastest(
    heads: HeadLayout, num_tokens: int, dtype: torch.dtype, device: torch.device,
    candidates: Sequence[SDPBackend] = CANDIDATES,
) -> Attention:  # fmt: skip
    """Time every candidate over one row of `num_tokens` random tokens and return the fastest; torch's choice off the GPU.

    Raises RuntimeError when no candidate takes these heads.
    """
    if device.type != "cuda":
        return Attention(heads)
    x = torch.randn(1, num_tokens, heads.num_heads, heads.padded, dtype=dtype, device=device)
    took_ms: dict[SDPBackend, float] = {}
    for backend in candidates:
        try:
            took_ms[backend] = _time_ms(Attention(heads, backend), x)
        except RuntimeError as err:  # the backend does not take these heads
            logger.info("attention backend left out", extra={"backend": backend.name, "reason": str(err)[:200]})
    if not took_ms:
        raise RuntimeError(f"no attention backend takes heads of {heads.padded} channels")
    logger.info("attention", extra={"took_ms": {backend.name: round(ms, 3) for backend, ms in took_ms.items()}})
    return Attention(heads, min(took_ms, key=lambda backend: took_ms[backend]))


def _time_ms(attention: Attention, x: Tensor) -> float:
    for _ in range(NUM_WARM):
        attention(x)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_TIMED + 1)]
    marks[0].record()
    for mark in marks[1:]:
        attention(x)
        mark.record()
    torch.cuda.synchronize()
    took_ms: float = median(now.elapsed_time(later) for now, later in pairwise(marks))
    return took_ms
