"""Decide what the DiT benchmark runs on: both families at real width, with random weights that are nowhere zero.

Widths are those of the published checkpoints as far as they are known; where they are not (Dev), those of its documentation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from mammoth_dit.jobs import Job, synthetic_job
from mammoth_dit.model.config import ModelConfig
from mammoth_dit.model.qformer import QFormer
from mammoth_dit.model.transformer import DiffusionTransformer
from mammoth_dit.model.vae import ImageDecoder
from mammoth_dit.model.weights import Model, build
from mammoth_serving.tiny import Family, tiny_config
from mammoth_wire.params import Diffusion

__all__ = ["CAPTION_TOKENS", "SIZE", "job", "real_config", "real_model"]

CAPTION_TOKENS = 205  # 77 of text, 128 queries
NUM_QUERIES = 128
SEED = 7
SIZE = 1024  # pixels of a side, where a part takes one size


def real_config(family: Family) -> dict[str, Any]:
    """Return config.json of `family` at real width."""
    config = tiny_config(family)
    llm = config["llm_config"]
    (llm.get("text_config") or llm)["hidden_size"] = 3584 if family == "preview" else 4096
    config["gen_dit_config"] |= {
        "hidden_size": 2520, "num_attention_heads": 21, "num_kv_heads": 7, "num_layers": 16, "num_refiner_layers": 2,
        "multiple_of": 256, "axes_dim_rope": [40, 40, 40],
    }  # fmt: skip
    config["gen_axes_dim_rope"] = [40, 40, 40]
    config["gen_image_condition_refiner_config"]["num_queries"] = NUM_QUERIES
    config["gen_vae_config"] |= {
        "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32, "sample_size": 1024,
    }  # fmt: skip
    return config


def real_model(family: Family, *, device: str, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Return a model of `family` with random weights on `device`."""
    config = ModelConfig.parse(real_config(family))
    transformer, refiner, vae = (
        _filled(build(part, config), device, dtype) for part in ("transformer", "refiner", "vae")
    )
    assert isinstance(transformer, DiffusionTransformer)
    assert refiner is None or isinstance(refiner, QFormer)
    assert isinstance(vae, ImageDecoder)
    return Model(config=config, transformer=transformer, refiner=refiner, vae=vae)


def job(model: Model, size_px: tuple[int, int], *, steps: int, seed: int = 1, guidance: float = 4.0) -> Job:
    """Return a guided job with random rows whose caption has CAPTION_TOKENS tokens."""
    params = Diffusion(*size_px, guidance=guidance, cfg_range=(0.0, 1.0), steps=steps)
    num_image = (size_px[0] // 16) * (size_px[1] // 16 + 1)
    config = model.config
    made = synthetic_job(
        params, llm_width=config.llm_width, gen_id=config.tokens.gen_vocab_start,
        num_text=CAPTION_TOKENS - NUM_QUERIES, num_image=num_image,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(made.hidden_TH.shape, generator=generator)
    return Job(f"bench-{seed}", params, seed, rows, made.token_ids_T, made.answer_start)


def _filled(module: nn.Module | None, device: str, dtype: torch.dtype) -> nn.Module | None:
    if module is None:
        return None
    module = module.to(dtype).to_empty(device=device).requires_grad_(False).eval()
    generator = torch.Generator(device).manual_seed(SEED)
    for name, parameter in module.named_parameters():
        parameter.copy_(_draw(name, parameter, generator))
    return module


def _draw(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Norm weights near one, biases near zero, the rest scaled by the inputs of a unit."""
    noise = torch.randn(like.shape, generator=generator, device=like.device)
    if like.dim() == 1:
        return 0.1 * noise if name.endswith("bias") else 1 + 0.1 * noise
    return noise / math.sqrt(math.prod(like.shape[1:]))
