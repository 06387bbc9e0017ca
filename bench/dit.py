"""Do: time the DiT engine at real width on a GPU, beside its plain path, its library ceiling and a peer: `make bench-dit`.

Steps are guided (both passes), of random weights and noise; a figure is the median of the repeats, by device events. Every
part that fails is reported and left out, so that one run gives what it can. Writes bench/results/dit_h200.json.

- plain_ms, fast_ms, ceiling_ms: a step of a batch; the batch of the plain path in one product, rows of the fast path together.
- bit_equal_to_solo: whether every row's bits are those that it has alone.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from bench import dit_parts
from bench.dit_ceiling import ceiling
from bench.dit_model import job, real_model
from bench.dit_peer import peer, peer_step
from bench.report import RESULTS, Spread, write
from mammoth_dit.engine import Engine
from mammoth_dit.fast.engine import FastEngine
from mammoth_dit.model.weights import Model
from mammoth_serving.tiny import Family

NAME = "dit_h200"
SIZES, BATCHES = (1024, 768, 512, 256), (1, 2, 4, 8)
WARM_UP, REPEATS = 2, 5
Row = dict[str, Any]


class Results:
    """Everything measured so far, written after every part."""

    def __init__(self, folder: Path) -> None:
        self.rows: list[Row] = []
        self.tables: dict[str, list[Row]] = {"rows": self.rows}
        self.figures: dict[str, float | int | bool | str] = {}
        self.spread: dict[str, Spread] = {}
        self._folder = folder

    def write(self) -> None:
        workload = {"guidance": "on", "caption_tokens": 205, "weights": "random", "sizes": SIZES, "batches": BATCHES}
        write(
            NAME, workload=workload, warm_up=WARM_UP, repeats=REPEATS, spread=self.spread, figures=self.figures,
            tables=self.tables, folder=self._folder,
        )  # fmt: skip

    def part(self, name: str, run: Callable[[], None]) -> None:
        """Run a part, report what it raises, write what there is."""
        began = time.perf_counter()
        try:
            run()
        except Exception:
            print(f"{name} failed:\n{traceback.format_exc()[-2000:]}")
            self.figures[f"failed_{name}"] = traceback.format_exc().strip().splitlines()[-1][:200]
        gc.collect()
        torch.cuda.empty_cache()
        print(f"-- {name}: {time.perf_counter() - began:.1f} s", flush=True)
        self.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--families", nargs="+", default=["preview", "dev"], choices=["preview", "dev"])
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--skip", nargs="*", default=[], help="parts to leave out")
    parser.add_argument("--profile", action="store_true", help="print where the time of a step goes")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    results = Results(chosen.results)
    with torch.inference_mode():
        for number, family in enumerate(chosen.families):
            _family(results, family, chosen, main=number == 0)
        if "peer" not in chosen.skip:
            results.part("peer", partial(peers, results))


def _family(results: Results, family: Family, chosen: argparse.Namespace, *, main: bool) -> None:
    """Time a family: the main one at every batch, with all parts; the other, of the same widths, at batch 1."""
    model = real_model(family, device="cuda")
    batches = chosen.batches if main else [1]
    results.part(f"steps_{family}", partial(steps, results, family, model, chosen.sizes, batches))
    if not main:
        return
    for name, run in dit_parts.PARTS.items():
        if name not in chosen.skip:
            results.part(name, partial(run, results, model, measure))
    if chosen.profile:
        results.part("profile", partial(dit_parts.profile, results, model))


def steps(results: Results, family: str, model: Model, sizes: list[int], batches: list[int]) -> None:
    """Time every size and batch: plain, fast, ceiling."""
    plain, fast = Engine(model, exactness="tolerant"), FastEngine(model)
    for size in sizes:
        for batch in batches:
            fast.take_times((size, size), {1: float(batch), batch: 1.0})
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            fast_ms = measure(drawn(fast, model, size, batch))
            peak = torch.cuda.max_memory_allocated() - before
            # beside the whole table of the first family the slow path needs fewer repeats: it varies little
            plain_ms = measure(drawn(plain, model, size, batch), repeats=3, warm_up=1)
            ceiling_ms = measure(ceiling(size, batch, SDPBackend.CUDNN_ATTENTION))
            exact = batch == 1 or [
                is_exact for shape, is_exact in fast.exact_units.items()
                if (shape.num_rows, shape.batch) == (size // 16, batch)
            ] == [True]  # fmt: skip
            row: Row = {"family": family, "size": size, "batch": batch}
            for name, values in (("plain", plain_ms), ("fast", fast_ms), ("ceiling", ceiling_ms)):
                row[f"{name}_ms"] = round(statistics.median(values), 3)
                results.spread[f"{family}_{size}_{batch}_{name}_ms"] = Spread.of([round(ms, 3) for ms in values])
            row["fast_to_ceiling"] = round(row["fast_ms"] / row["ceiling_ms"], 4)
            row["bit_equal_to_solo"] = exact
            row["peak_bytes"] = peak
            results.rows.append(row)
            print(row, flush=True)
        fast.take_times((size, size), {})
        fast.release()


def drawn(engine: Engine, model: Model, size: int, batch: int) -> Callable[[], None]:
    """Return what takes the next step of a batch of pictures."""
    num_steps = 2 * (WARM_UP + REPEATS)
    jobs = [job(model, (size, size), steps=num_steps, seed=seed) for seed in range(batch)]
    drawing = engine.begin([engine.prepare(each) for each in jobs])
    return lambda: engine.advance([drawing])


def measure(step: Callable[[], object], *, repeats: int = REPEATS, warm_up: int = WARM_UP) -> list[float]:
    """Return the milliseconds of each of `repeats` steps, by device events, after `warm_up` untimed ones."""
    for _ in range(warm_up):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [now.elapsed_time(later) for now, later in pairwise(marks)]


def peers(results: Results) -> None:
    """Time the peer, eager, then with its blocks compiled."""
    rows: list[Row] = []
    results.tables["peer"] = rows
    model = peer()
    for size, batch in ((1024, 1), (512, 1), (1024, 8)):
        eager_ms = statistics.median(measure(peer_step(model, size, batch), repeats=3))
        rows.append({"size": size, "batch": batch, "eager_ms": round(eager_ms, 2)})
        print(rows[-1], flush=True)
    results.write()
    for block in (*model.layers, *model.noise_refiner):
        block.compile(dynamic=False)  # a program a length: what serves a few sizes would choose
    for row in rows[:2]:
        compiled_ms = statistics.median(measure(peer_step(model, row["size"], row["batch"]), repeats=3, warm_up=3))
        row["compiled_ms"] = round(compiled_ms, 2)
        print(row, flush=True)
        results.write()


if __name__ == "__main__":
    main()
