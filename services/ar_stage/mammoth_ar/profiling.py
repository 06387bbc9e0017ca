"""Do: time the engine on synthetic sequences, for the boot profile and the operator."""

from __future__ import annotations

import time

from mammoth_ar.conditioning import Grid, Sampling
from mammoth_ar.engine import Engine
from mammoth_ar.sequence import Running, Sequence
from mammoth_wire.errors import EngineFailed, Overloaded

__all__ = ["measure"]


def measure(engine: Engine, *, num_seqs: int, num_prompt_tokens: int, num_steps: int) -> list[float]:
    """Return the milliseconds of each of `num_steps` decode steps with `num_seqs` rows after a prompt of that length.

    Takes free slots and gives them back. Raises Overloaded when there are too few, InvalidRequest when a row would not
    fit its context, EngineFailed when the engine cannot run it.
    """
    if num_seqs > engine.num_free_slots:
        raise Overloaded(f"{num_seqs} rows are asked for, {engine.num_free_slots} are free")
    sequence = Sequence((0,) * num_prompt_tokens, Grid(1, num_steps), Sampling(0))
    runnings: list[Running] = []
    try:
        for _ in range(num_seqs):
            runnings.append(engine.admit(sequence))
            _prefill(engine, runnings[-1])
        return [_step_ms(engine, runnings) for _ in range(num_steps)]
    finally:
        for running in runnings:
            engine.release(running)


def _prefill(engine: Engine, running: Running) -> None:
    while not running.is_prefilled:
        outcome = engine.prefill(running)
        if isinstance(outcome, EngineFailed):
            raise outcome


def _step_ms(engine: Engine, runnings: list[Running]) -> float:
    started_s = time.perf_counter()
    for outcome in engine.decode(runnings):
        if isinstance(outcome, EngineFailed):
            raise outcome
    return (time.perf_counter() - started_s) * 1e3
