"""Decide which engine runs a model: the fast one where it can, else the plain one, never an error for want of a kernel."""

from __future__ import annotations

import logging
from typing import Literal

import torch

from mammoth_dit.engine import Engine, Exactness
from mammoth_dit.fast.engine import FastEngine, Precision, StepCaching
from mammoth_dit.model.weights import Model

__all__ = ["Kernels", "open_engine"]

Kernels = Literal["auto", "plain", "fast"]

logger = logging.getLogger(__name__)


def open_engine(
    model: Model,
    *,
    kernels: Kernels = "auto",
    exactness: Exactness = "strict",
    precision: Precision = "bf16",
    step_cache: StepCaching = "off",
) -> Engine:
    """Return an engine over `model`. `auto` takes the fast path for bfloat16 on a GPU; `fast` takes it anywhere.

    What keeps the fast path from starting (no compiler, no kernel for these widths) is logged, and the plain path runs.
    """
    assert model.transformer is not None, "an engine draws"
    on_gpu = model.transformer.device.type == "cuda" and model.transformer.dtype == torch.bfloat16
    if kernels == "fast" or (kernels == "auto" and on_gpu):
        try:
            return FastEngine(model, exactness=exactness, precision=precision, step_cache=step_cache)
        except (RuntimeError, ImportError) as err:
            logger.warning("the plain path runs: the fast one did not start", exc_info=err)
    return Engine(model, exactness=exactness)
