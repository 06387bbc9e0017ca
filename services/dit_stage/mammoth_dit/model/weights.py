"""Load this stage's modules from a checkpoint: every key accounted for before a byte of tensor data is read.

The stage reads three prefixes. What it knowingly leaves in the file: the parameters of image editing and the VAE encoder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import nn

from mammoth_dit.model.config import ModelConfig
from mammoth_dit.model.qformer import QFormer, choose_num_heads, propose_num_heads
from mammoth_dit.model.transformer import DiffusionTransformer
from mammoth_dit.model.vae import ImageDecoder
from mammoth_serving.checkpoint import Checkpoint, CheckpointError

__all__ = ["ALL_PARTS", "PREFIXES", "Model", "Part", "build", "load", "load_module", "shapes"]

Part = Literal["transformer", "refiner", "vae"]
PREFIXES: Mapping[Part, str] = {
    "transformer": "gen_transformer.",
    "refiner": "gen_image_condition_refiner.",
    "vae": "gen_vae.",
}
ALL_PARTS: Collection[Part] = tuple(PREFIXES)
LEFT_OUT = (
    "gen_transformer.ref_image_patch_embedder.",
    "gen_transformer.ref_image_refiner.",
    "gen_transformer.image_index_embedding",
    "gen_vae.encoder.",
    "gen_vae.quant_conv.",
)
Built = TypeVar("Built", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Model:
    """The modules of one checkpoint, in evaluation mode, on one device. `refiner` is Preview's standalone Q-Former."""

    config: ModelConfig
    transformer: DiffusionTransformer | None
    refiner: QFormer | None
    vae: ImageDecoder | None


def build(part: Part, config: ModelConfig) -> nn.Module | None:
    """Return the module of `part` on the meta device (shapes, no storage), or None when the config has none."""
    refiner = config.refiner
    with torch.device("meta"):
        if part == "transformer":
            return DiffusionTransformer(config)
        if part == "vae":
            if config.vae is None:
                raise CheckpointError("gen_vae_config: missing; without it no picture can be decoded")
            return ImageDecoder(config.vae)
        if refiner is None or refiner.nested:
            return None
        width = config.llm_width
        proposed = propose_num_heads(width) if refiner.num_heads is None else refiner.num_heads
        return QFormer(width, width, refiner, choose_num_heads(width, proposed))


def shapes(module: nn.Module, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return {checkpoint name: shape} of every parameter of `module`."""
    return {prefix + name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def load(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    parts: Collection[Part] = ALL_PARTS,
) -> Model:
    """Load `parts` of the checkpoint, casting tensor by tensor; what is not asked for is None and its keys go unread.

    Raises CheckpointError, naming each key, when a parameter is missing or misshapen, when an unknown key lies under a
    prefix asked for, or when config.json does not describe this model.
    """
    config = ModelConfig.parse(checkpoint.config)
    built = {part: build(part, config) for part in parts}
    expected: dict[str, tuple[int, ...]] = {}
    for part, module in built.items():
        expected |= {} if module is None else shapes(module, PREFIXES[part])
    checkpoint.check(expected, prefixes=[PREFIXES[part] for part in built], ignored=_left_out)
    for part, module in built.items():
        if module is not None:
            load_module(checkpoint, module, PREFIXES[part], dtype=dtype, device=device)
    transformer, refiner, vae = (built.get(part) for part in ("transformer", "refiner", "vae"))
    assert transformer is None or isinstance(transformer, DiffusionTransformer)
    assert refiner is None or isinstance(refiner, QFormer)
    assert vae is None or isinstance(vae, ImageDecoder)
    return Model(config=config, transformer=transformer, refiner=refiner, vae=vae)


def load_module(
    checkpoint: Checkpoint, module: Built, prefix: str, *, dtype: torch.dtype, device: str = "cpu"
) -> Built:
    """Fill a module built on the meta device from the keys under `prefix`, strictly, and return it ready to evaluate."""
    stored = checkpoint.check(shapes(module, prefix), prefixes=[prefix], ignored=_left_out)
    state = {
        stored[name].removeprefix(prefix): tensor.to(dtype)
        for name, tensor in checkpoint.tensors(list(stored), device=device)
    }
    module.load_state_dict(state, strict=True, assign=True)
    return module.requires_grad_(False).eval()


def _left_out(name: str) -> bool:
    return name.startswith(LEFT_OUT)
