"""Do: measure what the two services add to their engines: the same requests through both processes and in this one.

    python -m bench.overhead

Requests go one after the other, in pairs (service, engines; the next pair the other way round), so that a machine that
slows down slows both. The figure of a stage is the median over pairs of service time / engine time:

- ar: what Done says from the moment the order is queued to its last row (queue, prefill, decode, batcher, thread hops) over
  the engine's own prefill and decode calls;
- dit: all the rest of the call as the client sees it, but for the DiT's queue (admission, hand-over, conditioning, denoise,
  VAE, PNG, step events, the picture's way back through both stages) over the engine's sample() and the PNG;
- total: the whole call as the client sees it over both engines;
- ar_cpu, dit_cpu: the CPU time that each stage's process burnt during the call over the engine's own. Neighbours on the
  machine disturb these much less than the times above.

The engines run on one worker thread, as in the services: torch and the allocator behave a little differently on the main one.
Every process computes with one thread, so that the three do not fight over cores. The pictures of a pair must be equal.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.engines import Drawn, Engines
from bench.processes import cpu_s
from bench.report import Spread
from mammoth_ar import tiny as ar_tiny
from mammoth_client import Client, GenerateFields
from mammoth_client.pipeline import Pipeline, pipeline
from mammoth_dit import tiny as dit_tiny

PROMPT = "a mammoth in the snow"
CAPACITY, MAX_CONTEXT = 4, 4096


@dataclass(frozen=True, slots=True)
class Served:
    """What a picture took by way of the services, as described above, and its digest."""

    ar_s: float
    ar_cpu_s: float
    dit_s: float
    dit_cpu_s: float
    total_s: float
    rgb_sha256: str


def serve(client: Client, stages: Pipeline, fields: GenerateFields) -> Served:
    """Draw one picture by way of the services."""
    pids = (stages.ar.pid, stages.dits[0].pid)
    burnt_s = [cpu_s(pid) for pid in pids]
    began_at = time.perf_counter()
    [picture] = client.generate(PROMPT, **fields)
    total_s = time.perf_counter() - began_at
    ar_cpu_s, dit_cpu_s = (cpu_s(pid) - before_s for pid, before_s in zip(pids, burnt_s, strict=True))
    ar_s = picture.times.ar_queue_s + picture.times.ar_s
    return Served(
        ar_s=ar_s,
        ar_cpu_s=ar_cpu_s,
        dit_s=total_s - ar_s - picture.times.queue_s,
        dit_cpu_s=dit_cpu_s,
        total_s=total_s,
        rgb_sha256=picture.receipt.rgb_sha256,
    )


def pairs(
    client: Client, stages: Pipeline, engines: Engines, workload: GenerateFields, num_pairs: int
) -> list[tuple[Served, Drawn]]:
    """Draw pictures of seeds 0, 1, ... both ways, alternating which comes first."""
    found = []
    with ThreadPoolExecutor(max_workers=1) as worker:
        for seed in range(num_pairs):
            fields: GenerateFields = {**workload, "seed": seed}
            ours = {"prompt": PROMPT, **fields}
            if seed % 2:
                drawn, served = worker.submit(engines.draw, ours).result(), serve(client, stages, fields)
            else:
                served, drawn = serve(client, stages, fields), worker.submit(engines.draw, ours).result()
            assert served.rgb_sha256 == drawn.rgb_sha256, f"seed {seed}: the services drew another picture"
            found.append((served, drawn))
    return found


def run(workload: GenerateFields, *, warm_up: int, repeats: int, folder: Path) -> Path:
    """Measure `repeats` pairs on a tiny checkpoint after `warm_up` others and write overhead.json into `folder`."""
    os.environ["OMP_NUM_THREADS"] = "1"  # for the stages, which inherit it
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mammoth-bench-") as name:
        model = Path(name)
        ar_tiny.write_files(model, "preview")
        ar_tiny.write(model)
        dit_tiny.write(model)
        engines = Engines(model, num_slots=CAPACITY, max_context_tokens=MAX_CONTEXT)
        flags: dict[str, Any] = {"ar_capacity": CAPACITY, "ar_max_context": MAX_CONTEXT}
        flags |= {"dit_request_batch_max_wait_ms": 0, "log_level": "warning"}
        with pipeline(model, **flags) as stages, Client(stages.address) as client:
            found = pairs(client, stages, engines, workload, warm_up + repeats)[warm_up:]
    spread = {name: Spread.of(values) for name, values in _values(found).items()}
    figures = {name: value.p50 for name, value in spread.items()}
    return report.write(
        "overhead",
        workload={"prompt": PROMPT, **workload, "threads_per_process": 1},
        warm_up=warm_up,
        repeats=repeats,
        spread=spread,
        figures={**figures, "equal_pictures": len(found), "last_rgb_sha256": found[-1][1].rgb_sha256},
        folder=folder,
    )


def _values(found: list[tuple[Served, Drawn]]) -> dict[str, list[float]]:
    """Return every quantity as a list, a value a pair."""
    return {
        "ar_ratio": [served.ar_s / drawn.ar_s for served, drawn in found],
        "dit_ratio": [served.dit_s / drawn.dit_s for served, drawn in found],
        "ar_cpu_ratio": [served.ar_cpu_s / drawn.ar_cpu_s for served, drawn in found],
        "dit_cpu_ratio": [served.dit_cpu_s / drawn.dit_cpu_s for served, drawn in found],
        "total_ratio": [served.total_s / (drawn.ar_s + drawn.dit_s) for served, drawn in found],
        "ar_service_s": [served.ar_s for served, _ in found],
        "ar_engine_s": [drawn.ar_s for _, drawn in found],
        "dit_service_s": [served.dit_s for served, _ in found],
        "dit_engine_s": [drawn.dit_s for _, drawn in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--side-px", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--grid", type=int, default=16, help="visual tokens on a side")
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7, help="pairs")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder of overhead.json")
    args = parser.parse_args()
    workload: GenerateFields = {
        "height": args.side_px, "width": args.side_px, "steps": args.steps, "ar_height": args.grid, "ar_width": args.grid,
    }  # fmt: skip
    run(workload, warm_up=args.warm_up, repeats=args.repeats, folder=args.results)


if __name__ == "__main__":
    main()
