"""Do: write the tiny random checkpoint: configuration and tokenizer files, then the AR stage's shard.

    python -m mammoth_ar.tiny DIR --family preview

`python -m mammoth_dit.tiny DIR` adds the other shard.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from mammoth_ar.model.config import LLMConfig
from mammoth_ar.model.decoder import Decoder
from mammoth_ar.model.weights import shapes
from mammoth_serving.checkpoint import write_index
from mammoth_serving.tiny import FAMILIES, Family, checkpoint_files, write_shard

__all__ = ["SHARD", "main", "write", "write_files"]

SHARD = "model-00001-of-00002.safetensors"


def write_files(path: Path, family: Family) -> None:
    """Write everything but the shards into the folder `path`, which is made when it is not there."""
    path.mkdir(parents=True, exist_ok=True)
    for name, text in checkpoint_files(family).items():
        (path / name).write_text(text)


def write(path: Path) -> None:
    """Write the AR shard that the config.json in `path` describes, and the index of all shards there."""
    config = LLMConfig.parse(json.loads((path / "config.json").read_text()))
    with torch.device("meta"):
        decoder = Decoder(config)
    write_shard(path / SHARD, shapes(decoder))
    write_index(path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mammoth_ar.tiny", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, metavar="DIR")
    parser.add_argument("--family", choices=FAMILIES, default="preview")
    args = parser.parse_args(argv)
    write_files(args.path, args.family)
    write(args.path)


if __name__ == "__main__":
    main()
