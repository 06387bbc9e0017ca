"""Do: time the engine on synthetic sequences, for warm-up, the boot profile and the operator.

Every device call is one prefill chunk or one decode step, so that requests run in between and leaving stops it soon.
"""

from __future__ import annotations

import time

from mammoth_ar.batching import Run
from mammoth_ar.conditioning import Grid, Sampling
from mammoth_ar.engine import Engine, checked
from mammoth_ar.sequence import Running, Sequence
from mammoth_wire.errors import Overloaded

__all__ = ["measure"]


async def measure(engine: Engine, run: Run, *, num_seqs: int, num_prompt_tokens: int, num_steps: int) -> list[float]:
    """Return the milliseconds of each of `num_steps` decode steps with `num_seqs` rows after a prompt of that length.

    `run` calls a function on the device thread. Takes free slots and gives them back, also when it is cancelled. Raises
    Overloaded when there are too few, InvalidRequest when a row would not fit its context, EngineFailed when the engine
    cannot run it.
    """
    if num_seqs > engine.num_free_slots:
        raise Overloaded(f"{num_seqs} rows are asked for, {engine.num_free_slots} are free", retry_after_s=1.0)
    sequence = Sequence((0,) * num_prompt_tokens, Grid(1, num_steps), Sampling(0))
    runnings: list[Running] = []
    try:
        for _ in range(num_seqs):
            await run(_admit, engine, sequence, runnings)
            while not runnings[-1].is_prefilled:
                checked(await run(engine.prefill, runnings[-1]))
        return [await run(_step_ms, engine, runnings) for _ in range(num_steps)]
    finally:
        for running in runnings:
            engine.release(running)


def _admit(engine: Engine, sequence: Sequence, runnings: list[Running]) -> None:
    runnings.append(engine.admit(sequence))


def _step_ms(engine: Engine, runnings: list[Running]) -> float:
    started_s = time.perf_counter()
    for outcome in engine.decode(runnings):
        checked(outcome)
    engine.synchronize()
    return (time.perf_counter() - started_s) * 1e3
