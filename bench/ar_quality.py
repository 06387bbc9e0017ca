"""Do: measure what fp8 weights of the LLM cost in quality, on the checkpoint that draws: `make bench-ar-quality`.

    python -m bench.ar_quality

The plain engine writes every grid twice under the same seed: with the weights as they are, and with the numbers that fp8 words
stand for, in prefill too, which the fast path spares. Tokens are sampled as in serving, so that one other token changes those
after it; `tokens` counts those before the first difference as a share of all. `hidden_error` is relative, over the rows up to
there, and `psnr_db` that of the pictures that the DiT draws from both. On the CPU, sums in float32.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from bench.engines import Engines
from bench.report import RESULTS, Spread, write
from mammoth_ar.fast.weights import narrowed, read_back
from mammoth_dit.jobs import Job, Picture

ROOT = Path(__file__).resolve().parent.parent
NAME = "ar_quality"
PROMPTS = (
    "red apple", "rocket", "cat face", "snowman", "pizza", "guitar", "sunflower", "bicycle", "owl", "cactus", "teapot", "crown",
    "an octopus", "draw a penguin", "picture of a tractor", "umbrella", "a drawing of a dragon", "house", "flower", "clown face",
    "a hot dog", "snowflake", "violin", "an anchor",
)  # fmt: skip
LIMIT_DB = 99.0  # of equal pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "emoji")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    prompts, fields = PROMPTS[: chosen.prompts], {"guidance": 4.0, "steps": 20, "seed": 1}
    engines = Engines(chosen.model, num_slots=1, max_context_tokens=512)
    usual = [engines.job({"prompt": prompt, **fields}) for prompt in prompts]
    with torch.no_grad():
        for layer in engines.decoder.layers:
            for parameter in layer.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(read_back(narrowed(parameter)))
    narrow = [engines.job({"prompt": prompt, **fields}) for prompt in prompts]
    same = [_same_tokens(*pair) for pair in zip(usual, narrow, strict=True)]
    grids = [len(job.token_ids_T) - job.answer_start for job in usual]
    errors = [_error(*pair, num) for *pair, num in zip(usual, narrow, same, strict=True)]
    decibels = [_psnr_db(engines.sample(one), engines.sample(other)) for one, other in zip(usual, narrow, strict=True)]
    write(
        NAME,
        workload={"prompts": list(prompts), **fields},
        warm_up=0,
        repeats=len(prompts),
        spread={"hidden_error": Spread.of(errors), "psnr_db": Spread.of(decibels)},
        figures={
            "tokens": sum(same) / sum(grids),
            "whole_grids": sum(one == all_of for one, all_of in zip(same, grids, strict=True)) / len(prompts),
        },
        folder=chosen.results,
    )


def _same_tokens(usual: Job, narrow: Job) -> int:
    """Return how many grid tokens are equal before the first that is not."""
    start = usual.answer_start
    return int((usual.token_ids_T[start:] == narrow.token_ids_T[start:]).int().cumprod(0).sum())


def _error(usual: Job, narrow: Job, num_same: int) -> float:
    """Return |narrow - usual| / |usual| over the rows of the prompt and of the grid tokens that are the same."""
    rows = slice(0, usual.answer_start + num_same)
    difference: Tensor = narrow.hidden_TH[rows] - usual.hidden_TH[rows]
    return float(difference.norm() / usual.hidden_TH[rows].norm())


def _psnr_db(usual: Picture, narrow: Picture) -> float:
    error = float(((usual.rgb.astype(float) - narrow.rgb) ** 2).mean())
    return min(LIMIT_DB, 10 * math.log10(255**2 / error)) if error else LIMIT_DB


if __name__ == "__main__":
    main()
