"""Do: time the fast AR engine at real width on a GPU, beside its floor, the plain path and a peer: `make bench-ar`.

A figure of a decode step is the time from one `decode` call of the engine to the next, as its batcher makes them, median of
the repeats; `graph_ms` is the device's own part. `num_rows` counts KV rows: a guided request has two. Every case is also
checked: a probe among the rows has the same bits as alone. Writes bench/results/ar_h200.json.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Sequence as Many
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.ar_model import ROWS, SCOPE, floor_ms, peer_ms, random_decoder, read_rate
from bench.report import RESULTS, Spread, write
from mammoth_ar.batching import Batcher
from mammoth_ar.conditioning import Grid, Sampling
from mammoth_ar.engine import Engine, checked, started
from mammoth_ar.fast.engine import FastEngine
from mammoth_ar.fast.verify import is_exact
from mammoth_ar.model.config import Family
from mammoth_ar.model.decoder import Decoder
from mammoth_ar.sequence import Rows, Running, Sequence
from mammoth_serving.device import DeviceWorker
from mammoth_wire.errors import EngineFailed

NAME = "ar_h200"
CONTEXTS = (100, 2080, 4160)
NUM_ROWS = (1, 8, 32)
GUIDED_ROWS = (2, 8, 32)
WARM_UP, REPEATS = 16, 96
MAX_CONTEXT = 8192
PEER_CONTEXT = 2080
TAIL = tuple(range(1, 11))
SHORT = 8  # tokens of a prompt whose context is made up
LOAD_GRID, LOAD_SHARE = Grid(16, 16), 0.8  # of what full steps and prefills leave room for
Case = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--families", nargs="+", default=["preview", "dev"], choices=["preview", "dev"])
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument(
        "--peer-rows", nargs="*", type=int, default=[1, 8], help="rows of the compiled peer, Preview only"
    )
    parser.add_argument("--load-seconds", type=float, default=20.0)
    parser.add_argument("--long", action=argparse.BooleanOptionalAction, default=True, help="whole 64 x 64 grids")
    parser.add_argument("--fp8", action=argparse.BooleanOptionalAction, default=True, help="weights in fp8 too")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    rate = read_rate()
    rows: list[Case] = []
    families: dict[str, Case] = {}
    for family in chosen.families:
        is_first = family == chosen.families[0]
        decoder = random_decoder(family)
        measured = _family(
            decoder, family, chosen.contexts, rate, chosen.load_seconds * is_first, long=chosen.long and is_first
        )
        first_rows = measured.pop("first_rows")
        torch.cuda.empty_cache()
        measured["fp8"] = _fp8(decoder, measured["rows"], first_rows) if chosen.fp8 else {}
        del decoder
        rows += measured.pop("rows")
        families[family] = measured
        gc.collect()
        torch.cuda.empty_cache()
        _write(chosen, rate, rows, families, [])  # what is measured stands, whatever the peer does
    peer = []
    for count in chosen.peer_rows:
        times = Spread.of(peer_ms(count, PEER_CONTEXT))
        ours = [row["fast_ms"] for row in rows if _label(row) == f"preview_{count}_{PEER_CONTEXT}"]
        case = {"num_rows": count, "context": PEER_CONTEXT, "peer_ms": times.p50, "peer_p95_ms": times.p95}
        peer.append(case | ({"fast_ms": ours[0]} if ours else {}))
    if peer:
        _write(chosen, rate, rows, families, peer)


def _write(
    chosen: argparse.Namespace, rate: float, rows: Many[Case], families: dict[str, Case], peer: Many[Case]
) -> None:
    workload = {
        "contexts": chosen.contexts,
        "max_context": MAX_CONTEXT,
        "weights": "random, bf16",
        "keys and values": "random below the context, alike in every slot",
        "bucket": ROWS,
    }
    first = families[chosen.families[0]]
    write(
        NAME,
        workload=workload,
        warm_up=WARM_UP,
        repeats=REPEATS,
        spread={f"{_label(row)}_ms": Spread(**row["spread"]) for row in rows},
        figures={"read_tb_per_s": rate / 1e12, **{f"{_label(row)}_ratio": row["ratio"] for row in rows}},
        tables={
            "rows": [{key: value for key, value in row.items() if key != "spread"} for row in rows],
            "peer": peer,
            "families": families,
            **{key: first[key] for key in ("prefill", "join_ms", "load", "fp8")},
        },
        folder=chosen.folder,
    )


def _label(row: Case) -> str:
    return f"{row['family']}_{row['num_rows']}_{row['context']}{'_guided' if row['guidance'] else ''}"


def _family(
    decoder: Decoder, family: Family, contexts: Many[int], rate: float, load_seconds: float, *, long: bool
) -> Case:
    plain = _plain_ms(decoder)
    loaded = time.perf_counter()
    engine = FastEngine(decoder, SCOPE, num_slots=ROWS, max_context_tokens=MAX_CONTEXT)
    torch.cuda.synchronize()
    ready = time.perf_counter()
    products = floor_ms(engine.weights)
    config = decoder.config
    kv_bytes = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    found: Case = {
        "exact": is_exact(engine),
        "ready_s": ready - loaded,
        "products_ms": products,
        "plain_ms": plain,
        "prefill": {str(length): _prefill(engine, length) for length in (40, 256, 2048)},
        "rows": [],
        "first_rows": _greedy(engine),
    }
    for context in contexts:
        for guidance, counts in ((False, NUM_ROWS), (True, GUIDED_ROWS)):
            for row in _decode(engine, context, counts, guidance=guidance):
                held = row["tokens_held"]
                row |= {"family": family, "floor_ms": products + held * kv_bytes / rate * 1e3}
                row["ratio"] = row["fast_ms"] / row["floor_ms"]
                found["rows"].append(row)
                print({key: row[key] for key in row if key != "spread"}, flush=True)
    found["join_ms"] = _join(engine)
    if long:
        found["one_64x64_s"] = _whole(engine, 1)
        found["all_64x64_s"] = _whole(engine, ROWS)
        found["images_per_s_64x64"] = ROWS / found["all_64x64_s"]
    step_ms = next(row["fast_ms"] for row in found["rows"] if row["num_rows"] == ROWS)
    picture_s = (found["prefill"]["40"]["ms"] + LOAD_GRID.num_tokens * step_ms / ROWS) / 1e3
    found["load"] = asyncio.run(_load(engine, load_seconds, LOAD_SHARE / picture_s)) if load_seconds else {}
    return found


def _fp8(decoder: Decoder, rows: Many[Case], expected: tuple[torch.Tensor, torch.Tensor]) -> Case:
    """Time steps with fp8 weights beside those of `rows`, and compare what they compute with `expected`, the bf16 engine's.

    Random weights make nearly equal scores, which flip easily: `bench.ar_quality` has the tokens of a trained checkpoint.
    """
    engine = FastEngine(decoder, SCOPE, num_slots=ROWS, max_context_tokens=MAX_CONTEXT, weights="fp8")
    found: Case = {"exact": is_exact(engine), "rows": []}
    usual = {(row["num_rows"], row["context"], row["guidance"]): row["fast_ms"] for row in rows}
    for context in sorted({row["context"] for row in rows}):
        for row in _decode(engine, context, NUM_ROWS, guidance=False):
            row["speed_up"] = usual[row["num_rows"], context, False] / row["fast_ms"]
            found["rows"].append({key: row[key] for key in row if key != "spread"})
            print("fp8", found["rows"][-1], flush=True)
    (ids, hidden), (usual_ids, usual_hidden) = _greedy(engine), expected
    error = (hidden[0] - usual_hidden[0]).float().norm() / usual_hidden[0].float().norm()
    same = ids == usual_ids
    return found | {"first_row_error": float(error), "tokens_before_the_first_other": int(same.int().cumprod(0).sum())}


def _greedy(engine: FastEngine) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [T] and rows [T,H] of one greedy grid."""
    running = started(engine, Sequence(tuple(range(1, 41)), Grid(1, 63), Sampling(0, temperature=0.0)))
    parts: list[Rows] = []
    while not running.is_done:
        parts.append(checked(engine.decode([running])[0]))
    engine.release(running)
    return torch.cat([part.ids for part in parts]), torch.cat([part.hidden for part in parts])


def _request(num_prompt: int, grid: Grid, seed: int, *, guidance: bool = False) -> Sequence:
    sampling = Sampling(seed, ar_guidance=3.0 if guidance else 1.0)
    prompt = tuple(1 + (seed + index) % 50_000 for index in range(num_prompt))
    return Sequence(prompt, grid, sampling, tail_ids=TAIL)


def _check(outcomes: Many[Rows | EngineFailed]) -> None:
    for outcome in outcomes:
        checked(outcome)


def _plain_ms(decoder: Decoder) -> float:
    """Return the milliseconds of the plain path's step for one row after 2080 tokens."""
    engine = Engine(decoder, SCOPE, num_slots=1, max_context_tokens=2200)
    running = started(engine, _request(2080, Grid(1, 30), 0))
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        _check(engine.decode([running]))
        times.append((time.perf_counter() - began) * 1e3)
    engine.release(running)
    return float(np.median(times[2:]))


def _prefill(engine: FastEngine, num_prompt: int) -> Case:
    times = []
    for seed in range(4):
        began = time.perf_counter()
        running = started(engine, _request(num_prompt, Grid(1, 1), seed))
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
        engine.release(running)
    middle = float(np.median(times[1:]))
    return {"ms": middle, "tokens_per_s": num_prompt / middle * 1e3}


def _decode(engine: FastEngine, context: int, counts: Many[int], *, guidance: bool) -> list[Case]:
    """Time steps with each of `counts` KV rows, most first; the rows that stay are the same requests throughout."""
    most, each = max(counts), 2 if guidance else 1
    grid = Grid(32, 64)
    probe = _request(SHORT, grid, 0, guidance=guidance)
    alone = _deep(engine, probe, context)
    expected = _first_rows(engine, alone)
    engine.release(alone)
    others = [_request(SHORT, grid, seed, guidance=guidance) for seed in range(1, most // each)]
    runnings = [_deep(engine, sequence, context) for sequence in others]
    runnings.insert(0, _deep(engine, probe, context))  # into the last slot
    is_equal = torch.equal(expected, _first_rows(engine, runnings[0]))
    cases = []
    for count in sorted(counts, reverse=True):
        while len(runnings) * each > count:
            engine.release(runnings.pop())
        times = _intervals(engine, runnings)
        held = len(runnings) * (context + (len(TAIL) if guidance else 0))
        cases.append(
            {
                "num_rows": count,
                "context": context,
                "guidance": guidance,
                "fast_ms": float(np.median(times)),
                "graph_ms": float(np.median(graph_replays(engine))),
                "tokens_per_s": len(runnings) / float(np.mean(times)) * 1e3,
                "tokens_held": held,
                "bit_equal_to_solo": is_equal,
                "spread": {name: getattr(Spread.of(times), name) for name in ("min", "p50", "p95", "max")},
            }
        )
    for running in runnings:
        engine.release(running)
    return cases


def _deep(engine: FastEngine, sequence: Sequence, context: int) -> Running:
    """Start `sequence` as if its prompt had `context` tokens: its KV row is filled up at random, alike in every slot."""
    running = started(engine, sequence)
    slot, held = running.slots[0], len(sequence.prompt_ids)
    generator = torch.Generator("cuda").manual_seed(0)
    made_up = torch.randn(engine.cache.keys[0][0].shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    for stored in (*engine.cache.keys, *engine.cache.values):
        stored[slot, :, held:context] = made_up[:, held:context]
    engine.state.length[slot] += context - held
    return running


def graph_replays(engine: FastEngine) -> list[float]:
    """Return the milliseconds that the device takes for a step of what is active, which advances it."""
    times = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        engine.decode([])
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times[2:]


def _intervals(engine: FastEngine, runnings: Many[Running]) -> list[float]:
    times, last = [], time.perf_counter()
    for _ in range(WARM_UP + REPEATS):
        _check(engine.decode(runnings))
        now = time.perf_counter()
        times.append((now - last) * 1e3)
        last = now
    return times[WARM_UP:]


def _first_rows(engine: FastEngine, running: Running) -> torch.Tensor:
    """Step all that runs until the first chunk of condition rows of `running` is there; return it."""
    while True:
        (outcome,) = engine.decode([running])
        _check([outcome])
        if isinstance(outcome, Rows) and len(outcome.hidden):
            return outcome.hidden


def _join(engine: FastEngine) -> Case:
    """Return how long 31 rows' steps are held up on the device when another request of 40 tokens joins.

    An interval lies between the ends of two steps; a joining prefill lengthens one.
    """
    runnings = [started(engine, _request(40, Grid(16, 63), seed)) for seed in range(ROWS - 1)]
    ends: list[torch.cuda.Event] = []

    def step() -> None:
        _check(engine.decode(runnings))
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()

    for seed in range(6):
        for _ in range(20):
            step()
        joined = started(engine, _request(40, Grid(4, 63), 100 + seed))
        for _ in range(10):
            step()
        engine.release(joined)
    torch.cuda.synchronize()
    intervals = [before.elapsed_time(after) for before, after in pairwise(ends)]
    usual = float(np.median(intervals))
    added = [max(intervals[start : start + 30]) - usual for start in range(30, len(intervals), 30)]
    for running in runnings:
        engine.release(running)
    return {"usual_step_ms": usual, "added_ms": float(np.median(added)), "worst_added_ms": max(added)}


def _whole(engine: FastEngine, count: int) -> float:
    """Return the seconds of `count` whole 64 x 64 grids together, prefill and delivery included."""
    began = time.perf_counter()
    runnings = [started(engine, _request(40, Grid(64, 64), seed)) for seed in range(count)]
    while going := [running for running in runnings if not running.is_done]:
        _check(engine.decode(going))
    took = time.perf_counter() - began
    for running in runnings:
        engine.release(running)
    return took


async def _load(engine: FastEngine, seconds: float, offered: float) -> Case:
    """Offer `offered` Poisson arrivals a second to a batcher over the engine; return latency and slot use."""
    worker = DeviceWorker("bench")
    batcher = Batcher(engine, worker.run, max_num_seqs=ROWS)
    serving = asyncio.create_task(batcher.run())
    generator = np.random.default_rng(0)
    latencies: list[float] = []
    slots: list[int] = []

    async def one(seed: int) -> None:
        began = time.perf_counter()
        async with batcher.submit(_request(40, LOAD_GRID, seed)) as ticket:
            async for _ in ticket:
                pass
        latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    requests = []
    while time.perf_counter() - began < seconds:
        requests.append(asyncio.create_task(one(len(requests))))
        slots.append(batcher.snapshot().rows_in_use)
        await asyncio.sleep(generator.exponential(1 / offered))
    await asyncio.gather(*requests)
    took = time.perf_counter() - began
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    worker.close()
    return {
        "grid": f"{LOAD_GRID.height}x{LOAD_GRID.width}",
        "offered_per_s": offered,
        "images_per_s": len(latencies) / took,
        "p50_s": float(np.percentile(latencies, 50)),
        "p95_s": float(np.percentile(latencies, 95)),
        "mean_rows": float(np.mean(slots)),
        "num_requests": len(latencies),
    }


if __name__ == "__main__":
    main()
