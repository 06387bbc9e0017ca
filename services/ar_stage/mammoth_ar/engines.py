"""Decide which engine runs a decoder: the fast one where it can and is exact, else the plain one, never an error."""

from __future__ import annotations

import gc
import logging
from typing import Literal, TypedDict

import torch

from mammoth_ar.conditioning import Scope
from mammoth_ar.engine import Engine, Exactness
from mammoth_ar.fast.weights import Storage
from mammoth_ar.model.decoder import Decoder
from mammoth_wire.errors import EngineFailed

__all__ = ["Kernels", "open_engine"]

Kernels = Literal["auto", "plain", "fast"]

logger = logging.getLogger(__name__)


class _Sizes(TypedDict):
    num_slots: int
    max_context_tokens: int
    prefill_chunk_tokens: int


def open_engine(
    decoder: Decoder,
    scope: Scope,
    *,
    num_slots: int,
    max_context_tokens: int,
    prefill_chunk_tokens: int = 256,
    kernels: Kernels = "auto",
    exactness: Exactness = "strict",
    weights: Storage = "bf16",
) -> Engine:
    """Return an engine over `decoder`. `auto` takes the fast path for bfloat16 on a GPU; `fast` takes it anywhere.

    `weights` is how the fast path stores its matrices; the plain path keeps them as they were loaded.

    What keeps the fast path from starting (no compiler, no room, a row whose bits depend on its company under `strict`) is
    logged, and the plain path runs. Raises CheckpointError when `scope` lies outside the generation vocabulary.
    """
    weight = decoder.norm.weight
    sizes: _Sizes = {
        "num_slots": num_slots,
        "max_context_tokens": max_context_tokens,
        "prefill_chunk_tokens": prefill_chunk_tokens,
    }
    if kernels == "fast" or (kernels == "auto" and weight.is_cuda and weight.dtype is torch.bfloat16):
        if (fast := _fast(decoder, scope, sizes, exactness, weights)) is not None:
            return fast
        gc.collect()  # its launches refer to it: what it had allocated makes room for the plain engine
    return Engine(decoder, scope, **sizes, exactness=exactness)


def _fast(decoder: Decoder, scope: Scope, sizes: _Sizes, exactness: Exactness, weights: Storage) -> Engine | None:
    """Return the fast engine, or None where it does not start or is not exact."""
    try:
        from mammoth_ar.fast.engine import FastEngine  # imports a compiler that a machine without a GPU may lack
        from mammoth_ar.fast.verify import is_exact

        fast = FastEngine(decoder, scope, **sizes, weights=weights)
        if exactness == "tolerant" or is_exact(fast):
            return fast
        logger.error("the plain path runs: on the fast one a row's bits depend on its company here")
    except (RuntimeError, ImportError, EngineFailed) as err:
        logger.warning("the plain path runs: the fast one did not start", exc_info=err)
    return None
