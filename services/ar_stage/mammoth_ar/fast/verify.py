"""Do: show on the device at hand that a request's bits do not depend on its company."""

from __future__ import annotations

import torch

from mammoth_ar.conditioning import Grid, Sampling
from mammoth_ar.engine import Engine, checked, started
from mammoth_ar.sequence import Rows, Sequence

__all__ = ["is_exact"]

NUM_PROMPT = 300  # more than one piece of attention


def is_exact(engine: Engine, *, grid: Grid = Grid(2, 15), num_prompt: int = NUM_PROMPT) -> bool:
    """Return whether a probe has the same ids and rows alone in the first slot and among others in the last one.

    The others fill all remaining slots, differ in everything, and half of them join while the probe runs. Every slot must
    be free. Raises EngineFailed when the engine cannot run the probe.
    """
    assert engine.num_free_slots == engine.num_slots, "somebody is being served"
    num_prompt = min(num_prompt, engine.max_context_tokens - grid.num_tokens - 1)
    probe = Sequence(_text(engine, num_prompt), grid, Sampling(seed=1))
    alone = _run(engine, [probe])
    others = [_other(engine, index, num_prompt, grid) for index in range(engine.num_slots - 1)]
    among = _run(engine, [*others, probe])
    return all(torch.equal(one, other) for one, other in zip(alone, among, strict=True))


def _other(engine: Engine, index: int, num_prompt: int, grid: Grid) -> Sequence:
    length = 1 + (index * 37) % num_prompt
    sampling = Sampling(
        seed=index, temperature=0.5 + index % 4, top_k=(0, 50, 2048)[index % 3], top_p=1.0 - 0.1 * (index % 3)
    )
    return Sequence(_text(engine, length), Grid(grid.height + index % 2, grid.width), sampling)


def _text(engine: Engine, length: int) -> tuple[int, ...]:
    return tuple(1 + index % (engine.decoder.config.vocab_size - 1) for index in range(length))


def _run(engine: Engine, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run all; return ids [T] and rows [T, H] of the last one. Half of the others join while it runs."""
    late = sequences[: len(sequences) // 2]
    runnings = [started(engine, sequence) for sequence in sequences[len(late) :]]
    probe = runnings[-1]
    parts: list[Rows] = []
    try:
        while not probe.is_done:
            if late:
                runnings.append(started(engine, late.pop()))
            first, *_ = engine.decode(
                [probe, *(other for other in runnings if other is not probe and not other.is_done)]
            )
            parts.append(checked(first))
    finally:
        for running in runnings:
            engine.release(running)
    return torch.cat([part.ids for part in parts]), torch.cat([part.hidden for part in parts])
