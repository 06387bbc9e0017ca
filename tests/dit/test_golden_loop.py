"""Whole pictures against the authors' modules: AR rows in, latents after every step, image out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mammoth_dit.engine import Engine
from mammoth_dit.jobs import Job, Picture, groups
from mammoth_dit.sampling import Guidance, guided_steps, step_times
from mammoth_dit.selection import select

pytestmark = pytest.mark.golden


def close(actual: Tensor, expected: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=atol)


def recorded(engine: Engine, jobs: Sequence[Job]) -> list[Tensor]:
    """Latents after every step of jobs of one key."""
    drawing = engine.begin([engine.prepare(job) for job in jobs])
    states: list[Tensor] = []
    while drawing.step < drawing.num_steps:
        engine.advance([drawing])
        states.append(engine.latents(drawing).clone())
    return states


def check_pictures(case, engine: Engine) -> None:
    for request, outcome in zip(case.facts["requests"], engine.sample(case.jobs), strict=True):
        assert isinstance(outcome, Picture)
        expected = case.io[f"expected/{request['id']}/image_uint8"]
        assert (torch.from_numpy(outcome.rgb).int() - expected.int()).abs().max() <= 1


def test_rows_and_schedule_are_those_of_the_case(loop_case):
    engine = loop_case.engine()
    tokens = engine.config.tokens
    ids = loop_case.facts["token_ids"]
    assert tokens.gen_vocab_start == ids["gen_vocab_start_index"]
    assert tokens.visual == {value for name, value in ids.items() if name != "gen_vocab_start_index"}
    for request, job in zip(loop_case.facts["requests"], loop_case.jobs, strict=True):
        rows = select(job.hidden_TH, job.token_ids_T, job.answer_start, tokens)
        assert torch.equal(rows.text_LH, loop_case.io[f"expected/{request['id']}/text_cond"])
        assert torch.equal(rows.image_LH, loop_case.io[f"expected/{request['id']}/image_cond"])
        times = step_times(job.params.steps, (job.params.height, job.params.width))
        close(times, torch.tensor(request["timesteps"]), atol=1e-6)
        guidance = Guidance(job.params.guidance, job.params.cfg_range)
        assert [step for [step] in guided_steps([guidance], job.params.steps)] == request["cfg_active_per_step"]


def test_queries_follow_the_text_rows(loop_case):
    engine = loop_case.engine()
    seen: list[Tensor] = []
    embedder = engine._transformer.time_caption_embed.caption_embedder
    embedder.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for job in loop_case.jobs:
        expected = loop_case.io.get(f"expected/{job.id}/prompt_embeds")
        seen.clear()
        engine.prepare(job)
        if expected is not None:
            close(seen[0], expected)


def test_both_velocities_of_the_first_step(loop_case):
    engine = loop_case.engine()
    for job in loop_case.jobs:
        group = engine.group([engine.prepare(job)])
        assert torch.equal(group.x, loop_case.io[f"inputs/{job.id}/initial_latents"])
        t_B = group.schedule.times_N[:1]
        with torch.inference_mode():
            close(group.conditional(group.x, t_B), loop_case.io[f"expected/{job.id}/pred_cond_step0"])
            close(group.unconditional(group.x, t_B), loop_case.io[f"expected/{job.id}/pred_uncond_step0"])


@pytest.mark.parametrize("kernels", ["plain", "fast"])
def test_latents_after_every_step_alone(loop_case, kernels):
    engine = loop_case.engine(kernels=kernels)
    for job in loop_case.jobs:
        states = recorded(engine, [job])
        close(torch.cat(states), loop_case.io[f"expected/{job.id}/latents_after_step"])
        close(engine.decode(states[-1])[None], loop_case.io[f"expected/{job.id}/image"], atol=2e-4)


@pytest.mark.parametrize("kernels", ["plain", "fast"])
def test_latents_after_every_step_in_one_padded_batch(loop_case, kernels):
    engine = loop_case.engine(exactness="tolerant", kernels=kernels)
    jobs = loop_case.jobs
    for places in groups([job.key for job in jobs]):
        states = torch.stack(recorded(engine, [jobs[place] for place in places]))
        for row, place in enumerate(places):
            close(states[:, row], loop_case.io[f"expected/{jobs[place].id}/latents_after_step"])


@pytest.mark.parametrize("kernels", ["plain", "fast"])
@pytest.mark.parametrize("exactness", ["strict", "tolerant"])
def test_pictures_of_the_production_engine(loop_case, exactness, kernels):
    check_pictures(loop_case, loop_case.engine(exactness=exactness, kernels=kernels))
