"""Do: time the way from latents to a file: the decoder, whole and in tiles, the PNG encoder, and what the next picture waits."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.dit_model import SIZE, job
from mammoth_dit import png
from mammoth_dit.fast.decoder import FastFinisher
from mammoth_dit.fast.engine import FastEngine
from mammoth_dit.jobs import Job, Picture
from mammoth_dit.memory import decode_bytes
from mammoth_dit.model.weights import Model
from mammoth_dit.tiling import Tiling

__all__ = ["finishing", "tiles"]

LARGE = 2048
FINISH_REPEATS = 3
WHOLE = Tiling(max_latents=2**62)


def finishing(results: Any, model: Model, measure: Callable[..., list[float]]) -> None:
    """Time the decoder, the file, and what a finished picture costs the next one."""
    assert model.vae is not None
    latents = _latents(SIZE)
    torch.cuda.synchronize()
    vae = model.vae
    results.figures["vae_plain_ms"] = round(statistics.median(measure(lambda: vae(latents), repeats=3)), 2)
    finisher = FastFinisher(vae, torch.device("cuda"))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    finisher.decode(latents)
    torch.cuda.synchronize()
    results.figures["vae_peak_bytes"] = torch.cuda.max_memory_allocated() - before
    made = [finisher.begin(latents, 0.0).outcome() for _ in range(5)]
    assert all(isinstance(picture, Picture) for picture in made)
    results.figures["vae_ms"] = round(1000 * statistics.median(picture.decode_s for picture in made[2:]), 2)
    results.figures["vae_model_bytes"] = decode_bytes(model.config, SIZE, SIZE)
    began = time.perf_counter()
    png.encode(made[0].rgb)
    results.figures["png_noise_ms"] = round(1000 * (time.perf_counter() - began), 1)
    engine = FastEngine(model)
    for size, num_steps in ((SIZE, 20), (256, 50)):
        jobs = [job(model, (size, size), steps=num_steps, seed=seed) for seed in range(4)]
        engine.sample(jobs[:2])
        pairs = [(_drawn_s(engine, jobs), _stepped_s(engine, jobs)) for _ in range(FINISH_REPEATS)]
        picture_ms = 1000 * statistics.median(drawn_s - stepped_s for drawn_s, stepped_s in pairs) / len(jobs)
        steps_ms = 1000 * statistics.median(stepped_s for _, stepped_s in pairs) / len(jobs)
        results.figures[f"finish_{size}_ms"] = round(picture_ms, 2)
        results.figures[f"finish_{size}_share_of_50_steps"] = round(picture_ms / (50 * steps_ms / num_steps), 4)
    print({name: value for name, value in results.figures.items() if "finish" in name or "vae" in name})


def _drawn_s(engine: FastEngine, jobs: Sequence[Job]) -> float:
    """Return the seconds that pictures take one after the other, from rows to pixels."""
    began = time.perf_counter()
    engine.sample(jobs)
    return time.perf_counter() - began


def _stepped_s(engine: FastEngine, jobs: Sequence[Job]) -> float:
    """Return the seconds of the same without pixels."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for each in jobs:
        drawing = engine.begin([engine.prepare(each)])
        for _ in range(drawing.num_steps):
            engine.advance([drawing])
    torch.cuda.synchronize()
    return time.perf_counter() - began


def tiles(results: Any, model: Model, measure: Callable[..., list[float]]) -> None:
    """Decode a large picture whole and in tiles: time, peak, how far apart the two are. Weights are random."""
    assert model.vae is not None
    latents = _latents(LARGE)
    table, images = [], []
    for name, tiling in (("whole", WHOLE), ("tiles", Tiling())):
        finisher = FastFinisher(model.vae, torch.device("cuda"), tiling=tiling)
        finisher.decode(latents)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        image = finisher.decode(latents)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        table.append({"decoded": name, "size": LARGE, "peak_bytes": peak})
        table[-1]["ms"] = round(
            statistics.median(measure(lambda made=finisher: made.decode(latents), repeats=3, warm_up=0)), 2
        )
        images.append(image.float().clamp(-1, 1))
        print(table[-1], flush=True)
    results.tables["tiles"] = table
    results.figures["tiles_psnr_db"] = round(-10 * math.log10(float((images[0] - images[1]).square().mean()) / 4), 2)
    results.figures["tiles_model_bytes"] = decode_bytes(model.config, LARGE, LARGE)
    print(results.figures["tiles_psnr_db"], results.figures["tiles_model_bytes"])


def _latents(size: int) -> Tensor:
    return torch.randn(1, 16, size // 8, size // 8, device="cuda", dtype=torch.bfloat16)
