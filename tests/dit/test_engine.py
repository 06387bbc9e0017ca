"""The engine's promises: one outcome a job, failures stay where they belong, warm-up and measurement run for real."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from mammoth_dit.engine import Engine
from mammoth_dit.isolation import DeviceLost, isolate
from mammoth_dit.jobs import Outcome, Picture, Watch, synthetic_job
from mammoth_dit.model.weights import Model
from mammoth_dit.selection import select
from mammoth_dit.testing import TinyEngine
from mammoth_wire.errors import Cancelled, EngineFailed, InvalidRequest, MammothError, ShapeTooLarge

DRAWN = Picture(np.zeros((1, 1, 3), np.uint8), "", 0.0, 0.0)


def run(rows: Sequence[str], draw, *, usable: bool = True) -> list[Outcome]:
    def draw_all(part: Sequence[str]) -> list[Outcome]:
        draw(part)
        return [DRAWN for _ in part]

    return isolate(rows, draw_all, limit="1024x1024 pixels", usable=lambda: usable)


def failing(bad: str, error: BaseException, calls: list[str]):
    def draw(part: Sequence[str]) -> None:
        calls.append("".join(part))
        if bad in part:
            raise error

    return draw


def test_a_failed_group_is_drawn_row_by_row(caplog):
    calls: list[str] = []
    outcomes = run("abc", failing("b", RuntimeError("boom"), calls))
    assert calls == ["abc", "a", "b", "c"]
    assert [type(outcome) for outcome in outcomes] == [Picture, EngineFailed, Picture]
    assert "boom" not in str(outcomes[1])
    assert outcomes[1].metadata["error_id"] in caplog.records[-1].error_id


def test_a_refusal_found_late_keeps_its_words():
    [outcome] = run("a", failing("a", InvalidRequest([("rows", "bad")]), []))
    assert isinstance(outcome, InvalidRequest)


def test_a_group_that_does_not_fit_is_halved_until_it_does():
    calls: list[str] = []

    def draw(part: Sequence[str]) -> None:
        calls.append("".join(part))
        if len(part) > 2:
            raise torch.OutOfMemoryError

    assert run("abcde", draw) == [DRAWN] * 5
    assert calls == ["abcde", "ab", "cde", "c", "de"]


def test_a_picture_too_large_alone_names_the_limit():
    def draw(part: Sequence[str]) -> None:
        raise torch.OutOfMemoryError

    outcomes = run("ab", draw)
    assert [type(outcome) for outcome in outcomes] == [ShapeTooLarge] * 2
    assert outcomes[0].metadata["limit"] == "1024x1024 pixels"


def test_an_unusable_device_is_nobodys_outcome():
    with pytest.raises(DeviceLost):
        run("ab", failing("a", RuntimeError("CUDA error: device-side assert triggered"), []), usable=False)


def test_a_bug_of_another_kind_stays_loud():
    with pytest.raises(NameError):
        run("ab", failing("a", NameError("typo"), []))


def test_memory_of_the_failed_attempt_is_free_before_the_retry():
    alive: list[int] = []

    class Tensorish:
        count = 0

        def __init__(self) -> None:
            Tensorish.count += 1

        def __del__(self) -> None:
            Tensorish.count -= 1

    def draw(part: Sequence[str]) -> list[Outcome]:
        alive.append(Tensorish.count)
        held = Tensorish()
        if len(part) > 1:
            raise torch.OutOfMemoryError
        return [DRAWN] if held else []

    isolate("ab", draw, limit="", usable=lambda: True)
    assert alive == [0, 0, 0]


def poison(job):
    return dataclasses.replace(job, hidden_TH=torch.full_like(job.hidden_TH, math.nan))


@pytest.mark.parametrize("exactness", ["strict", "tolerant"])
def test_a_row_that_is_not_finite_fails_alone(exactness, request):
    engine = TinyEngine(request.getfixturevalue("tmp_path"), exactness=exactness)
    good = engine.job("good")
    outcomes = engine.sample([poison(engine.job("bad", seed=2)), good])
    assert isinstance(outcomes[0], EngineFailed)
    assert outcomes[1].rgb_sha256 == engine.sample([good])[0].rgb_sha256


def test_a_row_that_raises_fails_alone_and_so_does_its_group(tolerant):
    misfit = dataclasses.replace(tolerant.job("misfit"), hidden_TH=torch.zeros(14, 3, dtype=torch.float64))
    other = tolerant.job("other size", size_px=(48, 48))
    outcomes = tolerant.sample([misfit, tolerant.job("good", seed=2), other])
    assert [type(outcome) for outcome in outcomes] == [EngineFailed, Picture, Picture]


def test_a_picture_carries_the_digest_of_its_bytes(strict):
    [picture] = strict.sample([strict.job("a")])
    assert picture.rgb.shape == (32, 48, 3)
    assert picture.rgb_sha256 == hashlib.sha256(picture.rgb.tobytes()).hexdigest()
    assert picture.denoise_s > 0
    assert picture.decode_s > 0


def test_progress_is_told_step_by_step_and_outcomes_as_they_stand(strict):
    told: list[tuple] = []
    watch = Watch(
        on_step=lambda *step: told.append(step),
        on_done=lambda place, outcome: told.append((place, type(outcome))),
        cancelled=lambda place: False,
    )
    strict.sample([strict.job("a", steps=2), strict.job("b", steps=2)], watch)
    assert told == [(0, 1, 2), (0, 2, 2), (0, Picture), (1, 1, 2), (1, 2, 2), (1, Picture)]


def leaving(place_that_leaves: int, after: int) -> tuple[Watch, list[tuple[int, int]]]:
    """A watch in which one job leaves once it has seen `after` steps."""
    steps: list[tuple[int, int]] = []
    left: set[int] = set()

    def on_step(place: int, index: int, total: int) -> None:
        steps.append((place, index))
        if (place, index) == (place_that_leaves, after):
            left.add(place)

    return Watch(on_step=on_step, on_done=lambda *_: None, cancelled=left.__contains__), steps


def test_a_job_that_leaves_stops_at_the_next_step_alone(strict):
    jobs = [strict.job("a", steps=5), strict.job("b", steps=5, seed=2)]
    watch, steps = leaving(0, after=2)
    outcomes = strict.sample(jobs, watch)
    assert isinstance(outcomes[0], Cancelled)
    assert [index for place, index in steps if place == 0] == [1, 2]
    assert outcomes[1].rgb_sha256 == strict.sample(jobs[1:])[0].rgb_sha256


def test_a_job_that_leaves_a_batch_changes_no_bit_of_its_neighbours(tolerant):
    jobs = [tolerant.job("a", steps=5), tolerant.job("b", steps=5, seed=2)]
    watch, _ = leaving(0, after=2)
    whole = tolerant.sample(jobs)
    outcomes = tolerant.sample(jobs, watch)
    assert isinstance(outcomes[0], Cancelled)
    assert outcomes[1].rgb_sha256 == whole[1].rgb_sha256


def test_a_batch_that_everybody_left_stops(tolerant):
    watch, steps = leaving(0, after=2)
    [outcome] = tolerant.sample([tolerant.job("a", steps=5)], watch)
    assert isinstance(outcome, Cancelled)
    assert steps[-1] == (0, 2)


def test_a_job_that_left_before_its_turn_costs_nothing(strict):
    watch = Watch(on_step=lambda *_: pytest.fail("a step ran"), on_done=lambda *_: None, cancelled=lambda _: True)
    assert isinstance(strict.sample([strict.job("a")], watch)[0], Cancelled)


def test_warm_up_conditions_on_one_text_row_and_one_image_row(strict):  # F8
    job = strict._synthetic(32, 32, num_steps=1)
    assert job.hidden_TH.tolist() == torch.zeros(2, strict.config.llm_width).tolist()
    assert job.token_ids_T.tolist() == [0, strict.config.tokens.gen_vocab_start]
    assert job.answer_start == 1
    rows = select(job.hidden_TH, job.token_ids_T, job.answer_start, strict.config.tokens)
    assert (len(rows.text_LH), len(rows.image_LH)) == (1, 1)
    strict.warm_up([(32, 32), (48, 64)])


def test_warm_up_that_fails_says_why(tmp_path):
    engine = TinyEngine(tmp_path)
    engine._transformer.norm_out.linear_2.weight.fill_(math.nan)
    with pytest.raises(MammothError):
        engine.warm_up([(32, 32)])


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_measurement_times_every_step(strict, tolerant, batch_size):
    for engine in (strict, tolerant):
        step_ms = engine.measure(32, 32, batch_size, num_steps=2)
        assert len(step_ms) == 2
        assert all(ms > 0 for ms in step_ms)


def test_an_engine_needs_a_transformer(strict):
    with pytest.raises(ValueError, match="transformer"):
        Engine(Model(strict.config, None, None, None))


def test_rows_are_cast_once_to_the_models_dtype(strict):  # F11
    job = strict.job("a")
    coarse = dataclasses.replace(job, hidden_TH=job.hidden_TH.bfloat16())
    widened = dataclasses.replace(job, hidden_TH=job.hidden_TH.bfloat16().double())
    assert torch.equal(strict.prepare(coarse).caption_CD, strict.prepare(widened).caption_CD)


def test_the_model_is_reached_only_with_an_image_row(strict):
    job = synthetic_job(strict.job("a").params, llm_width=strict.config.llm_width, gen_id=0, num_image=1)
    rows = select(job.hidden_TH, job.token_ids_T, job.answer_start, strict.config.tokens)
    assert len(rows.image_LH) == 0
