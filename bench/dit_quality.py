"""Do: measure what fp8 and the step cache cost in quality, on the checkpoint that draws: `make bench-dit-quality`.

    python -m bench.dit_quality

Rows come from the AR stage once; the DiT then draws each picture in full, with fp8 products, and with the step cache at several
thresholds, all from the same noise. PSNR is over the uint8 pixels, against the full run of the same dtype; `reused` is the
share of steps that reused; `other_seed` is how far a picture moves when only its noise changes, for scale. On the CPU, where
e4m3 values and scales are those of the GPU and the sums are float32.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.engines import Engines
from bench.report import RESULTS, Spread, write
from mammoth_dit.fast.engine import FastEngine
from mammoth_dit.fast.step_cache import StepCache
from mammoth_dit.jobs import Job, Picture
from mammoth_dit.model.weights import load
from mammoth_serving.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parent.parent
NAME = "dit_quality"
PROMPTS = (
    "red apple", "rocket", "cat face", "snowman", "pizza", "guitar", "sunflower", "bicycle", "owl", "cactus", "teapot",
    "crown",
)  # fmt: skip
THRESHOLDS = (0.06, 0.12, 0.24, 0.48)
LIMIT_DB = 99.0  # of equal pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "emoji")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    prompts = PROMPTS[: chosen.prompts]
    engines = Engines(chosen.model, num_slots=2, max_context_tokens=512)
    fields = {"guidance": 4.0, "steps": chosen.steps, "seed": 1}
    jobs = [engines.job({"prompt": prompt, **fields}) for prompt in prompts]
    checkpoint = Checkpoint.open(chosen.model)
    model, narrow = (load(checkpoint, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    full, full_bf16 = drawn(FastEngine(model), jobs), drawn(FastEngine(narrow), jobs)
    other = drawn(FastEngine(model), [replace(job, seed=2) for job in jobs])
    spread = {"psnr_other_seed": psnr(other, full), "psnr_bf16_to_float32": psnr(full_bf16, full)}
    spread["psnr_fp8"] = psnr(drawn(FastEngine(narrow, precision="fp8"), jobs), full_bf16)
    table: list[dict[str, Any]] = []
    for threshold in THRESHOLDS:
        engine = FastEngine(model, step_cache="residual")
        engine._cache = cache = StepCache(engine.network, engine.device, threshold=threshold)
        values = psnr(drawn(engine, jobs), full)
        table.append(
            {
                "threshold": threshold,
                "reused": round(cache.num_reused / cache.num_steps, 4),
                "psnr_db": round(statistics.mean(values), 2),
                "psnr_db_min": round(min(values), 2),
            }
        )
        print(table[-1], flush=True)
    write(
        NAME,
        workload={"prompts": list(prompts), **fields},
        warm_up=0,
        repeats=len(prompts),
        spread={name: Spread.of([round(value, 2) for value in values]) for name, values in spread.items()},
        figures={name: round(statistics.mean(values), 2) for name, values in spread.items()},
        tables={"step_cache": table},
        folder=chosen.results,
    )


def drawn(engine: FastEngine, jobs: Sequence[Job]) -> list[Picture]:
    """Draw all jobs; raise the error of one that fails."""
    pictures: list[Picture] = []
    for outcome in engine.sample(jobs):
        if not isinstance(outcome, Picture):
            raise outcome
        pictures.append(outcome)
    return pictures


def psnr(made: Sequence[Picture], expected: Sequence[Picture]) -> list[float]:
    """Return the peak signal-to-noise ratio of each picture in decibels, LIMIT_DB for equal ones."""
    values = []
    for one, other in zip(made, expected, strict=True):
        error = float(np.square(one.rgb.astype(float) - other.rgb).mean())
        values.append(LIMIT_DB if error == 0 else min(LIMIT_DB, 20 * math.log10(255) - 10 * math.log10(error)))
    return values


if __name__ == "__main__":
    main()
