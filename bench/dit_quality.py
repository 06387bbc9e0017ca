"""Do: measure what fp8 and the step cache cost in quality, on the checkpoint that draws: `make bench-dit-quality`.

    python -m bench.dit_quality

Rows come from the AR stage once; the DiT then draws each picture in full, with fp8 products, and with the step cache at several
thresholds, all from the same noise. PSNR and SSIM are over the uint8 pixels, against the full run of the same dtype; `reused` is the
share of steps that reused; `other_seed` is how far a picture moves when only its noise changes, for scale. On the CPU, where
e4m3 values and scales are those of the GPU and the sums are float32.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.engines import Engines
from bench.report import RESULTS, Spread, write
from bench.similarity import Rgb, psnr_db, ssim
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
    narrow = replace(narrow, vae=model.vae)  # the transformer is what is compared; CPUs decode bfloat16 slowly
    full, full_bf16 = drawn(FastEngine(model), jobs), drawn(FastEngine(narrow), jobs)
    pairs = {
        "other_seed": (drawn(FastEngine(model), [replace(job, seed=2) for job in jobs]), full),
        "bf16_to_float32": (full_bf16, full),
        "fp8": (drawn(FastEngine(narrow, precision="fp8"), jobs), full_bf16),
    }
    spread = {
        f"{name}_{kind}": compared(*pair, score)
        for name, score in (("psnr", psnr_db), ("ssim", ssim))
        for kind, pair in pairs.items()
    }
    table: list[dict[str, Any]] = []
    for threshold in THRESHOLDS:
        engine = FastEngine(model, step_cache="residual")
        engine._cache = cache = StepCache(engine.network, engine.device, threshold=threshold)
        made = drawn(engine, jobs)
        decibels, similarities = compared(made, full, psnr_db), compared(made, full, ssim)
        table.append(
            {
                "threshold": threshold,
                "reused": round(cache.num_reused / cache.num_steps, 4),
                "psnr_db": round(statistics.mean(decibels), 2),
                "psnr_db_min": round(min(decibels), 2),
                "ssim": round(statistics.mean(similarities), 4),
                "ssim_min": round(min(similarities), 4),
            }
        )
        print(table[-1], flush=True)
    write(
        NAME,
        workload={"prompts": list(prompts), **fields},
        warm_up=0,
        repeats=len(prompts),
        spread={name: Spread.of([round(value, 4) for value in values]) for name, values in spread.items()},
        figures={name: round(statistics.mean(values), 4) for name, values in spread.items()},
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


def compared(made: Sequence[Picture], expected: Sequence[Picture], score: Callable[[Rgb, Rgb], float]) -> list[float]:
    """Return the score of each picture against the expected one."""
    return [score(one.rgb, other.rgb) for one, other in zip(made, expected, strict=True)]


if __name__ == "__main__":
    main()
