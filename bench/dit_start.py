"""Do: time what comes first: the weights from disk to a picture, and the first steps of a shape until its graph is there."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.dit_model import SIZE, job, real_config
from mammoth_dit.engine import Drawing, Engine
from mammoth_dit.fast.engine import FastEngine
from mammoth_dit.model.weights import PREFIXES, Model, load
from mammoth_serving.checkpoint import Checkpoint

__all__ = ["graphs", "loading"]


def loading(results: Any, model: Model, measure: Callable[..., list[float]]) -> None:
    """Write the weights to the local disk as a checkpoint, and time the way from there to the first picture."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        state: dict[str, Tensor] = {}
        for part, module in (("transformer", model.transformer), ("refiner", model.refiner), ("vae", model.vae)):
            if module is not None:
                state |= {PREFIXES[part] + name: value.cpu() for name, value in module.state_dict().items()}
        save_file(state, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(real_config("preview")))
        num_bytes = (path / "model.safetensors").stat().st_size
        torch.cuda.reset_peak_memory_stats()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        loaded = load(Checkpoint.open(path), dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        load_s = time.perf_counter() - began
        results.figures["load_peak_to_weights"] = round((torch.cuda.max_memory_allocated() - before) / num_bytes, 3)
        engine = FastEngine(loaded)
        del loaded
        gc.collect()
        engine.release()
        results.figures["weights_held_to_file"] = round((torch.cuda.memory_allocated() - before) / num_bytes, 3)
        engine.sample([job(model, (SIZE, SIZE), steps=1)])
        first_s = time.perf_counter() - began
    results.figures |= {
        "load_s": round(load_s, 2),
        "load_gb_per_s": round(num_bytes / load_s / 1e9, 2),
        "start_to_first_picture_s": round(first_s, 2),
    }
    print(
        {name: value for name, value in results.figures.items() if "load" in name or "start" in name or "held" in name}
    )


def graphs(results: Any, model: Model, measure: Callable[..., list[float]]) -> None:
    """Time the first steps of a shape: libraries and compilers still choose, operation by operation, recorded beside, replayed.

    Wall clock from the call to the device's end. `recording_ms` is what a first step takes longer because a graph is recorded.
    """
    table = []
    for size in (320, 640, 896):  # shapes that no other part has drawn
        made = job(model, (size, size), steps=8)
        eager, graphed = FastEngine(model, graphs=False), FastEngine(model)
        by_operation, recorded = (engine.begin([engine.prepare(made)]) for engine in (eager, graphed))
        cold_ms, *warm_ms = (_step_ms(eager, by_operation) for _ in range(4))
        first_ms, *replayed_ms = (_step_ms(graphed, recorded) for _ in range(4))
        table.append(
            {
                "size": size,
                "cold_ms": round(cold_ms, 2),
                "by_operation_ms": round(min(warm_ms), 2),
                "recording_ms": round(first_ms - min(warm_ms), 2),
                "replayed_ms": round(min(replayed_ms), 2),
                "bit_equal": torch.equal(eager.latents(by_operation), graphed.latents(recorded)),
            }
        )
        print(table[-1], flush=True)
    results.tables["graphs"] = table


def _step_ms(engine: Engine, drawing: Drawing) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    engine.advance([drawing])
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - began)
