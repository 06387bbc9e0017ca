"""Do stage 4: write the trained parts as one checkpoint in the upstream format, bfloat16, two shards and an index.

The parameters for image editing (`ref_image_*`, `image_index_embedding`) are left out: text to image never reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints.emoji.train import dit, llm, recipe, vae
from checkpoints.emoji.train.data import TOKENIZER
from mammoth_ar.model.weights import shapes
from mammoth_dit.model.weights import PREFIXES
from mammoth_serving.checkpoint import write_index

__all__ = ["MAX_BYTES", "SHARDS", "run"]

MAX_BYTES = 16_000_000
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def run(work: Path, folder: Path) -> None:
    """Write the checkpoint into `folder`; files of other names there stay."""
    folder.mkdir(parents=True, exist_ok=True)
    factors = json.loads((work / dit.SCALING).read_text())
    _write_json(folder / "config.json", recipe.config(**factors))
    _write_json(folder / "t2i_generation_config.json", recipe.generation_config())
    for name in ("mammothu.tiktoken", "mammothu_vision_tokens.txt"):
        shutil.copyfile(work / TOKENIZER / name, folder / name)
    decoder = llm.load(work, "cpu")
    _write_shard(folder / SHARDS[0], dict(zip(shapes(decoder), decoder.state_dict().values(), strict=True)))
    parts = load_file(work / dit.WEIGHTS)
    diffusion = {_renamed(name): tensor for name, tensor in parts.items()}
    diffusion |= {PREFIXES["vae"] + name: tensor for name, tensor in load_file(work / vae.WEIGHTS).items()}
    _write_shard(folder / SHARDS[1], diffusion)
    write_index(folder)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".md" and path.is_file())
    print(f"{folder}: {num_bytes} bytes")
    assert num_bytes <= MAX_BYTES, f"{num_bytes} bytes are more than {MAX_BYTES}"


def _renamed(name: str) -> str:
    part, _, rest = name.partition(".")
    return {"transformer": PREFIXES["transformer"], "refiner": PREFIXES["refiner"]}[part] + rest


def _write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}, path)
    path.chmod(0o644)  # safetensors leaves it to its owner alone


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
