"""The step cache: per row, paired passes, no part in pictures without guidance; off it leaves no trace."""

from __future__ import annotations

import math

import pytest
import torch

from mammoth_dit.engine import Engine
from mammoth_dit.fast.engine import FastEngine
from mammoth_dit.fast.step_cache import MAX_REUSED, NUM_WARM_UP, StepCache, may_reuse
from mammoth_dit.jobs import Job


def caching(engine: Engine, threshold: float) -> tuple[FastEngine, list[int]]:
    """An engine with a step cache of that threshold, and the number of tokens of every run through the first block."""
    made = FastEngine(engine._model, step_cache="residual")
    made._cache = StepCache(made.network, made.device, threshold=threshold)
    tokens: list[int] = []
    norm = made.network.ops.norm

    def counted(x_TP, scale_BD, rows_T):
        tokens.append(len(x_TP))
        return norm(x_TP, scale_BD, rows_T)

    made.network.ops.norm = counted  # type: ignore[method-assign]
    return made, tokens


def latents(engine: Engine, jobs: list[Job]) -> torch.Tensor:
    drawing = engine.begin([engine.prepare(job) for job in jobs])
    while drawing.step < drawing.num_steps:
        engine.advance([drawing])
    return engine.latents(drawing)


@pytest.mark.parametrize(
    ("change", "step", "num_reused", "reuses"),
    [
        pytest.param(0.1, NUM_WARM_UP, 0, True, id="little change"),
        pytest.param(0.5, NUM_WARM_UP, 0, False, id="much change"),
        pytest.param(0.1, NUM_WARM_UP - 1, 0, False, id="too early"),
        pytest.param(0.1, NUM_WARM_UP, MAX_REUSED, False, id="too often in a row"),
        pytest.param(math.nan, NUM_WARM_UP, 0, False, id="not a number"),
    ],
)
def test_when_a_step_reuses(change, step, num_reused, reuses):
    assert may_reuse(change, step=step, num_reused=num_reused) is reuses


def test_a_cache_that_never_reuses_draws_the_full_picture(strict):
    engine, _ = caching(strict, threshold=0.0)
    jobs = [strict.job("a", steps=6), strict.job("b", steps=6, seed=2, cfg_range=(0.2, 0.6))]
    torch.testing.assert_close(latents(engine, jobs), latents(strict, jobs), rtol=0, atol=1e-12)
    assert engine._cache.num_reused == 0


def test_a_cache_that_reuses_skips_the_other_blocks(strict):
    engine, _ = caching(strict, threshold=math.inf)
    job = strict.job("a", steps=12)
    reused, full = latents(engine, [job]), latents(strict, [job])
    assert engine._cache.num_reused == 6  # of the eight after the warm-up every fourth runs in full
    assert (reused - full).abs().max() > 1e-6
    assert (reused - full).norm() < 0.5 * full.norm()
    assert engine.facts()["reused_steps"] == "6 of 12"


def test_decisions_are_a_rows_own(strict):
    jobs = [strict.job(str(seed), steps=9, seed=seed, guidance=1.5 + seed) for seed in range(3)]
    engine, _ = caching(strict, threshold=0.2)
    together = latents(engine, jobs)
    for row, job in enumerate(jobs):
        alone, _ = caching(strict, threshold=0.2)
        assert torch.equal(latents(alone, [job])[0], together[row])


def test_both_passes_run_in_every_step_of_a_guided_picture(strict):  # F13
    num_image = 6
    engine, tokens = caching(strict, threshold=0.0)
    latents(engine, [strict.job("a", steps=5, cfg_range=(0.3, 0.5))])
    main = [count for count in tokens if count != num_image]
    assert len(set(main)) == 1
    assert main[0] > 2 * num_image  # both streams of the row, in steps with guidance and without


def test_without_guidance_the_cache_leaves_no_trace(strict):  # F13
    job = strict.job("a", steps=8, guidance=1.0)
    engine, tokens = caching(strict, threshold=math.inf)
    assert torch.equal(latents(engine, [job]), latents(FastEngine(strict._model), [job]))
    assert engine._cache.num_steps == 0
    assert set(tokens) == {6, 6 + 16}  # the image; the image and its caption: one pass
