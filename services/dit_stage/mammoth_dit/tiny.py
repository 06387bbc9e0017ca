"""Translate: `python -m mammoth_dit.tiny DIR` adds this stage's shard to a tiny checkpoint.

The folder's config.json decides the shapes (`python -m mammoth_ar.tiny` writes it and the other shard).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mammoth_dit.model.config import ModelConfig
from mammoth_dit.model.weights import ALL_PARTS, PREFIXES, build, shapes
from mammoth_serving.checkpoint import write_index
from mammoth_serving.tiny import write_shard

__all__ = ["main", "write"]

SHARD_NAME = "model-00002-of-00002.safetensors"


def write(path: Path) -> None:
    """Write random weights of every module that `path`/config.json describes, and the index over all shards there."""
    config = ModelConfig.parse(json.loads((path / "config.json").read_text()))
    expected: dict[str, tuple[int, ...]] = {}
    for part in ALL_PARTS:
        module = build(part, config)
        expected |= {} if module is None else shapes(module, PREFIXES[part])
    write_shard(path / SHARD_NAME, expected)
    write_index(path)


def main() -> None:
    """Add the shard to the folder named on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mammoth_dit.tiny", description="Add the DiT shard to a tiny checkpoint."
    )
    parser.add_argument("path", type=Path, metavar="DIR", help="folder with the tiny config.json")
    write(parser.parse_args().path)


if __name__ == "__main__":
    main()
