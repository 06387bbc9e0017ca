"""Do: the parts of the DiT benchmark beside its table of steps; each fills in figures or a table of its own."""

from __future__ import annotations

import asyncio
import copy
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled

from bench.dit_finishing import finishing, tiles
from bench.dit_model import SIZE, job
from bench.dit_start import graphs, loading
from mammoth_dit import sampling
from mammoth_dit.batching import Batcher
from mammoth_dit.engine import Engine
from mammoth_dit.fast.engine import FastEngine
from mammoth_dit.fast.kernels import TritonOps
from mammoth_dit.fast.ops import MASKED, HeadLayout, Quantized, ReferenceOps
from mammoth_dit.fast.rows import inputs_of
from mammoth_dit.fast.step_cache import StepCache
from mammoth_dit.jobs import Job, Picture
from mammoth_dit.memory import step_bytes
from mammoth_dit.model.embeddings import patchify, unpatchify
from mammoth_dit.model.weights import Model
from mammoth_dit.step_batching import StepBatcher
from mammoth_dit.stepper import Stepper
from mammoth_serving.device import DeviceWorker
from mammoth_wire.errors import DeadlineExceeded, ShapeTooLarge

__all__ = ["PARTS", "profile"]

Measure = Callable[..., list[float]]
PARITY_SIZE = (512, 512)
NUM_JOBS, MEAN_GAP_S, SERVED_SIZES = 200, 0.085, (256, 512)
WAITS = ("Synchronize", "_local_scalar_dense", "Memcpy DtoH")


def kernels(results: Any, model: Model, measure: Measure) -> None:
    """Compare every kernel with its reference at real width; relative L2 errors."""
    width, padded, tokens = 2520, 2560, 2048
    x, y = (torch.zeros(tokens, padded, device="cuda") for _ in range(2))
    for each in (x, y):
        each[:, :width].normal_()
    x, y = x.bfloat16(), y.bfloat16()
    vectors = torch.randn(2, 5, width, device="cuda")
    gate, scale = vectors[:, 1], vectors[:, 3]
    rows = torch.arange(tokens, device="cuda", dtype=torch.int32) % 2
    heads = HeadLayout(21, 7, 120)
    values = torch.randn(tokens, heads.num_heads, heads.padded, device="cuda").bfloat16()
    values[..., heads.width :] = 0
    weights, angles = torch.randn(2, heads.padded, device="cuda"), torch.randn(tokens, 2, 64, device="cuda")
    mask = torch.zeros(tokens, device="cuda").masked_fill(torch.rand(tokens, device="cuda") < 0.1, MASKED)

    def rotate(ops: Any) -> Tensor:
        turned = values.clone()
        ops.rotate(turned, weights, angles, mask, heads)
        return turned[:, : heads.num_rotated, : heads.width]

    runs: dict[str, Callable[[Any], Any]] = {
        "norm": lambda ops: ops.norm(x, scale, rows),
        "add_norm": lambda ops: ops.add_norm(x, y, gate, scale, rows)[1],
        "add": lambda ops: ops.add(x, y, gate, rows),
        "add_layer_norm": lambda ops: ops.add_layer_norm(x, y, gate, scale, rows),
        "layer_norm": lambda ops: ops.layer_norm(x, scale, rows),
        "silu_mul": lambda ops: ops.silu_mul(torch.cat((x, y), dim=1)),
        "rotate": rotate,
    }
    table = []
    for quantizes in (False, True):
        ours, reference = TritonOps(1e-5, quantizes=quantizes), ReferenceOps(1e-5, quantizes=quantizes)
        for name, run in runs.items():
            made, expected = (_plain(run(ops)) for ops in (ours, reference))
            table.append({"kernel": name, "quantizes": quantizes, "error": _relative(made, expected)})
    results.tables["kernels"] = table
    results.figures["kernel_error_max"] = max(row["error"] for row in table if not row["quantizes"])
    print(table)


def parity(results: Any, model: Model, measure: Measure) -> None:
    """Compare the conditional velocity of both paths, and of fp8, with float32 at real width, along a schedule."""
    wide = copy.deepcopy(model.transformer)
    assert wide is not None
    exact = Engine(Model(model.config, wide.float(), _float(model.refiner), None))
    engines = {"plain": Engine(model), "fast": FastEngine(model), "fp8": FastEngine(model, precision="fp8")}
    made = job(model, PARITY_SIZE, steps=8)
    group = exact.group([exact.prepare(made)])
    x, table = group.x, []
    for step in range(8):
        x = x.bfloat16().float()  # all start from the same latents and the same rounded time
        t_B = group.schedule.times_N[step : step + 1].bfloat16()
        expected = group.conditional(x, t_B.float())
        errors = {name: _relative(_velocity(engine, made, x, step), expected) for name, engine in engines.items()}
        table.append({"step": step, **errors})
        x = sampling.advance(x, group.schedule, step, group.conditional, group.unconditional)
    print(table)
    results.tables["parity"] = table
    for name in engines:
        results.figures[f"velocity_error_{name}"] = statistics.mean(row[name] for row in table)


def fp8(results: Any, model: Model, measure: Measure) -> None:
    """Time steps with block products in e4m3."""
    table = []
    for size in (1024, 512, 256):
        took = {}
        for precision in ("bf16", "fp8"):
            engine = FastEngine(model, precision=precision)
            drawing = engine.begin([engine.prepare(job(model, (size, size), steps=20))])
            took[precision] = statistics.median(measure(partial(engine.advance, [drawing])))
        table.append({"size": size, **{f"{name}_ms": round(ms, 3) for name, ms in took.items()}})
        table[-1]["speed_up"] = round(took["bf16"] / took["fp8"], 3)
        print(table[-1], flush=True)
    results.tables["fp8"] = table


def step_cache(results: Any, model: Model, measure: Measure) -> None:
    """Time a step that runs in full and one that reuses; their mix is the checkpoint's matter (bench.dit_quality)."""
    table = []
    for size in (1024, 512):
        took = {}
        for name, threshold in (("full", 0.0), ("reused", float("inf"))):
            engine = FastEngine(model, step_cache="residual")
            engine._cache = StepCache(engine.network, engine.device, threshold=threshold)
            drawing = engine.begin([engine.prepare(job(model, (size, size), steps=24))])
            for _ in range(5):  # the warm-up steps and the first that may reuse
                engine.advance([drawing])
            took[name] = measure(partial(engine.advance, [drawing]), repeats=8, warm_up=0)
        full, reused = statistics.median(took["full"]), min(took["reused"])
        table.append({"size": size, "full_ms": round(full, 3), "reused_ms": round(reused, 3)})
        print(table[-1], flush=True)
    results.tables["step_cache"] = table


def syncs(results: Any, model: Model, measure: Measure) -> None:
    """Count what makes the host wait inside the step loop."""
    engine = FastEngine(model)
    drawing = engine.begin([engine.prepare(job(model, (512, 512), steps=12))])
    for _ in range(3):
        engine.advance([drawing])
    torch.cuda.synchronize()
    with profiled(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(6):
            engine.advance([drawing])
    names = [event.name for event in seen.events() if any(wait in event.name for wait in WAITS)]
    own = names.count("cudaDeviceSynchronize")  # the profiler's own, at its end
    results.figures["host_waits_in_loop"] = len(names) - own
    print("waits", names)


def faults(results: Any, model: Model, measure: Measure) -> None:
    """Run out of memory on purpose: the large picture is told so, the small one keeps its bits, memory comes back."""
    engine = FastEngine(model)
    small, large = job(model, (256, 256), steps=3), job(model, (SIZE, SIZE), steps=3)
    [expected] = engine.sample([small])
    engine.release()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    reserved, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((reserved + 500e6) / total)
    try:
        [refused, drawn] = engine.sample([large, small])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert isinstance(expected, Picture)
    results.figures["oom_is_told"] = isinstance(refused, ShapeTooLarge)
    results.figures["oom_neighbour_keeps_bits"] = isinstance(drawn, Picture) and drawn.rgb_sha256 == expected.rgb_sha256
    engine.release()
    results.figures["oom_memory_left_bytes"] = torch.cuda.memory_allocated() - base
    [again] = engine.sample([large])
    results.figures["oom_recovers"] = isinstance(again, Picture)
    results.figures["step_model_bytes"] = step_bytes(model.config, SIZE, SIZE)
    print({name: value for name, value in results.figures.items() if "oom" in name}, refused)


def modes(results: Any, model: Model, measure: Measure) -> None:
    """Serve the same 200 random jobs in request mode and in step mode, with one engine and its measured units."""
    engine = FastEngine(model)
    sizes = SERVED_SIZES
    engine.warm_up([(size, size) for size in sizes])
    dice, at, jobs = random.Random(5), 0.0, []
    for number in range(NUM_JOBS):
        size, steps = dice.choice(sizes), dice.choice((4, 8, 12))
        at += dice.expovariate(1 / MEAN_GAP_S)
        deadline_s = at + dice.uniform(2, 8) if dice.random() < 0.3 else None
        jobs.append((at, replace(job(model, (size, size), steps=steps, seed=number), id=str(number)), deadline_s))
    for size in sizes:  # captures and compiles what both modes need
        for steps in (4, 8, 12):
            engine.sample([job(model, (size, size), steps=steps)])
    table = []
    for mode in ("request", "step"):
        latencies_s, num_missed, took_s = asyncio.run(_served(mode, engine, jobs))
        table.append(
            {
                "mode": mode,
                "mean_latency_s": round(statistics.mean(latencies_s), 3),
                "p95_latency_s": round(sorted(latencies_s)[int(0.95 * len(latencies_s))], 3),
                "max_latency_s": round(max(latencies_s), 3),
                "missed_deadlines": num_missed,
                "pictures_per_s": round((len(jobs) - num_missed) / took_s, 3),
            }
        )
        print(table[-1], flush=True)
    results.tables["modes"] = table


async def _served(
    mode: str, engine: Engine, jobs: Sequence[tuple[float, Job, float | None]]
) -> tuple[list[float], int, float]:
    """Return every job's latency, how many missed their deadline, and the seconds until all were done."""
    worker, loop = DeviceWorker("bench"), asyncio.get_running_loop()
    batcher = (
        StepBatcher(Stepper(engine), worker.run, max_queue=NUM_JOBS)
        if mode == "step"
        else Batcher(engine, worker.run, max_queue=NUM_JOBS)
    )
    serving, start = asyncio.create_task(batcher.run()), loop.time()

    async def one(at: float, made: Job, deadline_s: float | None) -> tuple[float, bool]:
        await asyncio.sleep(start + at - loop.time())
        ticket = batcher.submit(made, deadline_at=None if deadline_s is None else start + deadline_s)
        try:
            await ticket.result()
        except DeadlineExceeded:
            return loop.time() - start - at, True
        return loop.time() - start - at, False

    ends = await asyncio.gather(*(one(*each) for each in jobs))
    took_s = loop.time() - start
    batcher.drain()
    await serving
    worker.close()
    return [latency_s for latency_s, _ in ends], sum(missed for _, missed in ends), took_s


def profile(results: Any, model: Model) -> None:
    """Print where the time of a step goes, kernel by kernel."""
    engine = FastEngine(model)
    for size in (1024, 256):
        drawing = engine.begin([engine.prepare(job(model, (size, size), steps=12))])
        for _ in range(3):
            engine.advance([drawing])
        torch.cuda.synchronize()
        with profiled(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(3):
                engine.advance([drawing])
            torch.cuda.synchronize()
        took: dict[str, float] = {}
        for event in seen.events():
            if event.self_device_time_total:
                kind = _kind(event.name)
                took[kind] = took.get(kind, 0.0) + event.self_device_time_total / 3000
        results.tables[f"profile_{size}"] = [
            {"kind": kind, "ms": round(ms, 3)} for kind, ms in sorted(took.items(), key=lambda item: -item[1])
        ]
        print(size, results.tables[f"profile_{size}"])


def _kind(name: str) -> str:
    kinds = {
        "nvjet": "products", "cutlass": "products", "gemm": "products", "splitK": "products", "sdpa": "attention",
        "flash": "attention", "_silu_mul": "silu_mul", "_token": "norms, gates, sums", "_rotate": "head norms, rotation",
    }  # fmt: skip
    return next((kind for part, kind in kinds.items() if part in name), "copies, guidance, Euler")


def _velocity(engine: Engine, made: Job, x: Tensor, step: int) -> Tensor:
    """Return the conditional velocity of latents `x` at the time of `step`."""
    prepared = engine.prepare(made)
    if not isinstance(engine, FastEngine):
        group = engine.group([prepared])
        return group.conditional(x.bfloat16(), group.schedule.times_N[step : step + 1])
    [row] = engine.begin([prepared]).rows
    patch = engine.config.transformer.patch_size
    row.step = step
    row.x_nF.copy_(patchify(x.bfloat16(), patch)[0])
    shape = replace(row.shape, guided=False, negative=0)
    [velocity_BnF] = engine.network.velocities(
        inputs_of([row], shape), shape, shape.rows_T(engine.device), shape.image_rows_T(engine.device)
    )
    return unpatchify(velocity_BnF, patch, *row.grid)


def _float(module: Any) -> Any:
    return None if module is None else copy.deepcopy(module).float()


def _plain(made: Any) -> Tensor:
    return made.values.float() * made.scale if isinstance(made, Quantized) else made


def _relative(made: Tensor, expected: Tensor) -> float:
    return ((made.float() - expected.float()).norm() / expected.float().norm()).item()


PARTS: Mapping[str, Callable[[Any, Model, Measure], None]] = {
    "kernels": kernels,
    "syncs": syncs,
    "finishing": finishing,
    "tiles": tiles,
    "graphs": graphs,
    "fp8": fp8,
    "step_cache": step_cache,
    "parity": parity,
    "faults": faults,
    "loading": loading,
    "modes": modes,
}
