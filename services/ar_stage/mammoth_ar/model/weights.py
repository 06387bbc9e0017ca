"""Do the loading: the `llm_model.` tensors of a checkpoint become a Decoder, or nothing does.

Names and shapes are checked against the shard headers before any data is read. Dropped knowingly: the vision tower
(`llm_model.model.visual.`), which text to image never runs, and stored rope frequencies, which are computed.
"""

from __future__ import annotations

import torch

from mammoth_ar.model.config import LLMConfig
from mammoth_ar.model.decoder import Decoder
from mammoth_serving.checkpoint import Checkpoint, CheckpointError

__all__ = ["PREFIX", "canonical", "load", "shapes"]

PREFIX = "llm_model."
BODY = "llm_model.model.language_model."
VISION = "llm_model.model.visual."
HEADS = ("lm_head.", "gen_head.")


def load(
    checkpoint: Checkpoint, config: LLMConfig, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Decoder:
    """Return a Decoder in `dtype` on `device`, holding exactly the checkpoint's tensors.

    Raises CheckpointError naming every missing, unexpected, duplicate or misshapen key.
    """
    with torch.device("meta"):
        decoder = Decoder(config)
    name_of = checkpoint.check(shapes(decoder), prefixes=(PREFIX,), ignored=is_ignored, canonical=canonical)
    twice = sorted(to for to in set(name_of.values()) if list(name_of.values()).count(to) > 1)
    if twice:
        raise CheckpointError(f"{checkpoint.path}: stored under an old and a new name: {', '.join(twice)}")
    state = {
        _parameter(name_of[name]): tensor.to(dtype) for name, tensor in checkpoint.tensors(list(name_of), device=device)
    }
    decoder.load_state_dict(state, strict=True, assign=True)
    return decoder.eval().requires_grad_(False)


def shapes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Return {checkpoint name: shape} of every tensor of `decoder`, which may live on the meta device."""
    return {_checkpoint_name(name): tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}


def canonical(name: str) -> str:
    """Translate an old-style name (`model.layers...`, `visual...`) to the current one; leave others alone."""
    if name.startswith("llm_model.visual."):
        return VISION + name.removeprefix("llm_model.visual.")
    if name.startswith("llm_model.model.") and not name.startswith((BODY, VISION)):
        return BODY + name.removeprefix("llm_model.model.")
    return name


def is_ignored(name: str) -> bool:
    return name.startswith(VISION) or name.endswith(".inv_freq")


def _checkpoint_name(parameter: str) -> str:
    return (PREFIX if parameter.startswith(HEADS) else BODY) + parameter


def _parameter(name: str) -> str:
    return name.removeprefix(BODY).removeprefix(PREFIX)
