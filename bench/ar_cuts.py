"""Do: find the best cut of each product of a decode step on the GPU at hand, for `mammoth_ar.fast.cuts`.

    python -m bench.ar_cuts --families preview dev --weights bf16 fp8 --out build/ar_cuts.json

Every candidate runs the product of LAYERS layers, whose weights are far more than the L2 holds, in one graph; milliseconds
a layer, median of the replays. `--compile PART OF` only compiles that part of the candidates, so that several processes can.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.ar_model import ROWS, SCOPE, config, graph_ms
from mammoth_ar.cache import KVCache
from mammoth_ar.fast.cuts import Cut, Tiles, best
from mammoth_ar.fast.state import RowState
from mammoth_ar.fast.step import Step
from mammoth_ar.fast.weights import LayerWeights, Matrix, StepWeights, Storage, narrowed
from mammoth_ar.model.config import Family, LLMConfig

LAYERS = 6
SHARED_BYTES = 227 * 1024  # of an SM
MOST_STAGES = 8
NUM_SMS = 132
PRODUCTS = ("heads", "out", "gated", "down")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--families", nargs="+", default=["preview", "dev"], choices=["preview", "dev"])
    parser.add_argument("--weights", nargs="+", default=["bf16", "fp8"], choices=["bf16", "fp8"])
    parser.add_argument("--compile", nargs=2, type=int, metavar=("PART", "OF"))
    parser.add_argument("--out", type=Path, default=Path("build/ar_cuts.json"))
    chosen = parser.parse_args()
    part, of = chosen.compile or (0, 1)
    table: list[dict[str, Any]] = []
    for family, storage in product(chosen.families, chosen.weights):
        bench = _Bench(family, storage, num_layers=1 if chosen.compile else LAYERS)
        for name in PRODUCTS:
            rows = []
            for tiles in list(candidates(name, bench.weights, best(family, storage)))[part::of]:
                try:
                    times = bench.times_ms(name, tiles, only_once=chosen.compile is not None)
                except Exception as err:  # a cut that the compiler refuses is no candidate
                    print(family, storage, name, tiles, repr(err)[:200], flush=True)
                    continue
                rows.append({"ms": statistics.median(times) / LAYERS, "tiles": asdict(tiles)})
            if chosen.compile is None:
                rows.sort(key=lambda row: row["ms"])
                table.append({"family": family, "weights": storage, "product": name, "cuts": rows})
                for row in rows[:3]:
                    print(family, storage, name, f"{row['ms']:.4f}", tuple(row["tiles"].values()), flush=True)
                chosen.out.parent.mkdir(parents=True, exist_ok=True)
                chosen.out.write_text(json.dumps(table))


def candidates(name: str, weights: StepWeights, known: Cut) -> Iterator[Tiles]:
    """Yield the cut in force, then others that fill every SM with one, two or three programs."""
    in_force: Tiles = getattr(known, name)
    yield in_force
    matrix: Matrix = getattr(weights.layers[0], name)
    num_outputs, bytes_each = matrix.shape[0], 4 if matrix.is_words else 2
    together = 2 if name == "gated" else 1  # gate and up are read side by side
    for block_n, columns, residents, num_warps in product((64, 128), (64, 128), (1, 2, 3), (2, 4, 8)):
        if (name == "heads" and block_n == 64) or (block_n == 64 and num_warps == 8):
            continue
        if num_warps == 2 and not (matrix.is_words and block_n == 64):  # products warp by warp, without Hopper's wgmma
            continue
        block_k = columns // 2 if matrix.is_words else columns
        stage_bytes = block_k * (together * block_n * bytes_each + ROWS * 2 * (4 if matrix.is_words else 1))
        num_stages = min(MOST_STAGES, SHARED_BYTES // residents // stage_bytes)
        num_tiles = -(-num_outputs // (block_n * together))
        most = 1 if name == "gated" else max(1, residents * NUM_SMS // num_tiles)
        for split in sorted({most, max(1, most - 1)}):
            tiles = Tiles(block_n, block_k, split, num_warps, num_stages)
            if num_stages >= 2 and tiles != in_force:
                yield tiles


class _Bench:
    def __init__(self, family: Family, storage: Storage, *, num_layers: int) -> None:
        self.config, self.known = config(family), best(family, storage)
        self.weights = _weights(self.config, storage, num_layers)
        device = torch.device("cuda")
        shape = {"dtype": torch.bfloat16, "device": device}
        self.cache = KVCache(replace(self.config, num_layers=num_layers), num_slots=32, num_positions=256, **shape)
        self.state = RowState(32, SCOPE.visual_end - SCOPE.visual_start, self.config.hidden_size, 64, **shape)

    def times_ms(self, name: str, tiles: Tiles, *, only_once: bool) -> list[float]:
        """Return the milliseconds of the product `name` in all layers, cut into `tiles`; nothing is active."""
        changed: dict[str, Any] = {name: tiles}
        if name in ("out", "down"):  # whose tiles are equally high: both leave sums of squares
            other = "down" if name == "out" else "out"
            changed[other] = replace(getattr(self.known, other), block_n=tiles.block_n)
        step = Step(self.config, self.weights, SCOPE, self.cache, self.state, replace(self.known, **changed))
        rows = slice(0, step.num_rows)

        def run() -> None:
            for index, layer in enumerate(self.weights.layers):
                match name:
                    case "heads":
                        step.heads(index, rows)
                    case "gated":
                        step.gate(layer.gated)
                    case "out":
                        step.back(step.mixed, layer.out, layer.out_bias, layer.post_norm, tiles)
                    case _:
                        step.back(step.gated, layer.down, None, layer.input_norm, tiles)

        if only_once:
            run()
            torch.cuda.synchronize()
            return [0.0]
        return graph_ms(run, repeats=15)


def _weights(config: LLMConfig, storage: Storage, num_layers: int) -> StepWeights:
    width, q_width = config.hidden_size, config.num_heads * config.head_dim
    all_heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * shape[-1] ** -0.5

    def matrix(num: int, inner: int) -> Matrix:
        return narrowed(draw(num, inner)) if storage == "fp8" else Matrix(draw(num, inner))

    has_norm, norm = config.family == "dev", draw(width)
    head_norm = draw(config.head_dim) if has_norm else None
    inner = config.intermediate_size
    layers = [
        LayerWeights(
            input_norm=norm,
            heads=matrix(all_heads, width),
            heads_bias=draw(all_heads),
            q_norm=head_norm,
            k_norm=head_norm,
            out=matrix(width, q_width),
            out_bias=None,
            post_norm=norm,
            gated=matrix(2 * inner, width),
            down=matrix(width, inner),
        )
        for _ in range(num_layers)
    ]
    return StepWeights(draw(16, width), 0, layers, norm, Matrix(draw(SCOPE.visual_end - SCOPE.visual_start, width)))


if __name__ == "__main__":
    main()
