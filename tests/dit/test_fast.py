"""The fast path, on the CPU with reference operations: it agrees with the plain one, and nothing depends on company."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from mammoth_dit.engine import Engine
from mammoth_dit.engines import open_engine
from mammoth_dit.fast.engine import FastEngine
from mammoth_dit.fast.exactness import Exact
from mammoth_dit.fast.layout import UnitShape, bucket, units
from mammoth_dit.fast.ops import Quantized, quantized
from mammoth_dit.fast.rows import Row
from mammoth_dit.jobs import Job, Picture, Watch
from mammoth_dit.testing import TinyEngine
from mammoth_wire.errors import Cancelled, EngineFailed

SIZE = (32, 48)
TOGETHER = {1: 8.0, 8: 1.0}  # step times that make units of eight


@pytest.fixture(scope="session")
def fast(strict) -> FastEngine:
    return FastEngine(strict._model)


def together(engine: Engine, exactness="strict") -> FastEngine:
    made = FastEngine(engine._model, exactness=exactness)
    made.take_times(SIZE, TOGETHER)
    return made


def company(engine: TinyEngine) -> list[Job]:
    return [
        engine.job("short", num_text=1, num_image=3, seed=1),
        engine.job("long", num_text=9, num_image=40, seed=2, guidance=9.0, cfg_range=(0.3, 0.7)),
        engine.job("unguided", num_text=4, seed=3, guidance=1.0),
        engine.job("negative", num_text=0, seed=4, num_negative=6, guidance=2.5),
        engine.job("twin of short", num_text=2, num_image=5, seed=5),
    ]


def latents(engine: Engine, jobs: list[Job]) -> Tensor:
    drawing = engine.begin([engine.prepare(job) for job in jobs])
    while drawing.step < drawing.num_steps:
        engine.advance([drawing])
    return engine.latents(drawing)


@pytest.mark.parametrize("place", range(5))
def test_both_paths_draw_the_same(strict, fast, place):
    job = company(strict)[place]
    torch.testing.assert_close(latents(fast, [job]), latents(strict, [job]), rtol=0, atol=1e-12)


def test_rows_of_a_unit_do_not_see_each_other(strict):
    jobs = company(strict)
    for job, x in zip(jobs, latents(together(strict, "tolerant"), jobs), strict=True):
        torch.testing.assert_close(x[None], latents(strict, [job]), rtol=0, atol=1e-12)


def test_strict_bits_do_not_depend_on_company_place_or_order(strict):
    jobs = company(strict)
    apart = FastEngine(strict._model)
    alone = {job.id: latents(apart, [job]) for job in jobs}
    engine = together(strict)
    for order in (jobs, jobs[::-1], [*jobs[3:], *jobs[:2]]):
        for job, x in zip(order, latents(engine, order), strict=True):
            assert torch.equal(x[None], alone[job.id])
    assert engine.exact_units, "no unit of several rows came up"


def test_pictures_are_those_of_the_plain_path(strict, fast):
    jobs = company(strict)
    for plain, quick in zip(strict.sample(jobs), fast.sample(jobs), strict=True):
        assert isinstance(quick, Picture)
        assert abs(plain.rgb.astype(int) - quick.rgb.astype(int)).max() <= 1
        assert quick.kernels is None


def test_a_bfloat16_picture_is_near_its_float32_twin(tmp_path):
    wide = TinyEngine(tmp_path, dtype=torch.float32)
    narrow = TinyEngine(tmp_path, dtype=torch.bfloat16)
    job = wide.job("a", steps=4)
    exact = latents(wide, [job])
    plain, quick = (latents(engine, [job]).float() for engine in (narrow, FastEngine(narrow._model)))
    assert (quick - exact).norm() <= 1.25 * (plain - exact).norm()


def stepping(results: dict[int, Tensor], calls: list[int]):
    """A step whose rows come out as `results` of their number together."""

    def step(rows, shape: UnitShape) -> Tensor:
        calls.append(len(rows))
        return results[len(rows)][: len(rows)]

    return step


def rows_of(engine: FastEngine, tiny: TinyEngine, count: int) -> list[Row]:
    return [engine.begin([engine.prepare(tiny.job(str(seed), seed=seed))]).rows[0] for seed in range(count)]


@pytest.mark.parametrize(
    ("pair", "exact", "calls"),
    [
        pytest.param(1.0, True, [1, 1, 2, 2], id="equal: together from then on"),
        pytest.param(1.5, False, [1, 1, 2, 1, 1], id="unequal: alone from then on"),
        pytest.param(math.nan, False, [1, 1, 2, 1, 1], id="not a number where alone there is one"),
    ],
)
def test_a_shape_is_tried_once(strict, fast, pair, exact, calls):
    made: list[int] = []
    rows = rows_of(fast, strict, 2)
    like = torch.ones_like(rows[0].x_nF)[None]
    shape = dataclasses.replace(rows[0].shape, batch=2)
    owner = Exact(stepping({1: like, 2: pair * like.expand(2, -1, -1)}, made), "strict")
    with torch.inference_mode():
        for _ in range(2):
            owner.step(rows, shape)
    assert owner.known == {shape: exact}
    assert made == calls
    assert all(torch.equal(row.x_nF, like[0]) for row in rows)


def breaking(engine: FastEngine, error: BaseException, when) -> list[UnitShape]:
    """Let the engine's steps raise for some units; returns the shapes tried."""
    tried: list[UnitShape] = []
    step = engine._exact._step

    def raising(rows, shape: UnitShape) -> Tensor:
        tried.append(shape)
        if when(shape):
            raise error
        return step(rows, shape)

    engine._exact._step = raising
    return tried


def test_a_kernel_that_raises_costs_a_shape_its_fast_path_and_nobody_a_picture(strict):
    engine = FastEngine(strict._model)
    tried = breaking(engine, RuntimeError("no kernel image"), lambda shape: shape.num_columns == 3)
    jobs = [strict.job("a"), strict.job("b", size_px=(32, 32)), strict.job("c", seed=2)]
    outcomes = engine.sample(jobs)
    assert [outcome.kernels for outcome in outcomes] == ["plain", None, "plain"]
    for job, outcome in zip(jobs, outcomes, strict=True):
        engine_alone = strict if outcome.kernels else FastEngine(strict._model)
        assert outcome.rgb_sha256 == engine_alone.sample([job])[0].rgb_sha256
    assert sum(shape.num_columns == 3 for shape in tried) == 1
    assert "3x2 patches" in engine.facts()["plain_units"]


def test_a_unit_that_does_not_fit_is_halved_and_the_size_keeps_the_lower_ceiling(strict):
    engine = together(strict, "tolerant")
    tried = breaking(engine, torch.OutOfMemoryError(), lambda shape: shape.batch > 2)
    jobs = [strict.job(str(seed), seed=seed) for seed in range(8)]
    outcomes = engine.sample(jobs)
    apart = FastEngine(strict._model)
    alone = [apart.sample([job])[0] for job in jobs]
    assert all(isinstance(outcome, Picture) for outcome in outcomes)
    assert engine.unit_size(SIZE) == 2
    assert max(abs(a.rgb.astype(int) - b.rgb.astype(int)).max() for a, b in zip(outcomes, alone, strict=True)) <= 1
    assert sum(shape.batch > 2 for shape in tried) <= 2


def test_units_are_measured_as_far_as_they_fit(strict):
    engine = FastEngine(strict._model, exactness="tolerant")
    breaking(engine, torch.OutOfMemoryError(), lambda shape: shape.batch > 2)
    engine.calibrate((32, 32))
    assert list(engine.step_ms[32, 32]) == [1, 2]
    assert engine.unit_size((32, 32)) <= 2
    assert "32x32 x2" in engine.facts()["step_ms"]
    assert all(isinstance(outcome, Picture) for outcome in engine.sample([strict.job("a", size_px=(32, 32))]))


def test_a_row_that_is_not_finite_fails_alone(strict):
    engine = together(strict, "tolerant")
    bad = strict.job("bad", seed=2)
    bad = dataclasses.replace(bad, hidden_TH=torch.full_like(bad.hidden_TH, math.nan))
    good = strict.job("good")
    outcomes = engine.sample([bad, good])
    assert isinstance(outcomes[0], EngineFailed)
    assert outcomes[1].rgb_sha256 == engine.sample([good])[0].rgb_sha256


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_job_that_leaves_changes_no_bit_of_its_neighbours(strict, after):
    engine = together(strict, "tolerant")
    jobs = [strict.job("a", steps=5), strict.job("b", steps=5, seed=2)]
    whole = engine.sample(jobs)
    steps: list[tuple[int, int]] = []
    watch = Watch(
        on_step=lambda place, index, total: steps.append((place, index)),
        on_done=lambda *_: None,
        cancelled=lambda place: place == 0 and (after == 0 or (0, after) in steps),
    )
    outcomes = engine.sample(jobs, watch)
    assert isinstance(outcomes[0], Cancelled)
    assert outcomes[1].rgb_sha256 == whole[1].rgb_sha256
    assert max(index for place, index in steps if place == 1) == 5


def test_the_unconditional_pass_runs_only_for_guided_rows(strict):  # F13, without a step cache
    engine = together(strict, "tolerant")
    tried = breaking(engine, RuntimeError(), lambda shape: False)
    latents(
        engine, [strict.job("a", guidance=1.0), strict.job("b", cfg_range=(0.3, 0.4), seed=2), strict.job("c", seed=3)]
    )
    guided_rows = [shape.batch for shape in tried if shape.guided]
    assert sum(guided_rows) == 3 + 1
    assert sum(shape.batch for shape in tried) == 9


@pytest.mark.parametrize(("length", "padded"), [(0, 0), (1, 16), (16, 16), (17, 32), (205, 208)])
def test_a_bucket_is_a_matter_of_a_rows_own_length(length, padded):
    assert bucket(length, 16) == padded


@pytest.mark.parametrize(
    ("keys", "largest", "cut"),
    [
        pytest.param("aaaaa", 1, ["a", "a", "a", "a", "a"], id="one by one"),
        pytest.param("aaaaa", 8, ["aaaa", "a"], id="powers of two"),
        pytest.param("abab", 2, ["aa", "bb"], id="equal keys alone"),
        pytest.param("aaaaaaa", 4, ["aaaa", "aa", "a"], id="at most the largest"),
    ],
)
def test_rows_are_cut_into_units(keys, largest, cut):
    assert ["".join(rows) for _, rows in units(keys, keys, largest)] == cut


def test_padding_weighs_nothing(strict):
    engine = FastEngine(strict._model)
    job = strict.job("a")
    padded = latents(engine, [job])
    engine._multiple = 64
    torch.testing.assert_close(latents(engine, [job]), padded, rtol=0, atol=1e-12)


def test_quantized_rows_keep_their_direction():
    x = torch.randn(5, 64) * torch.tensor([1e-6, 1e-2, 1.0, 1e3, 0.0])[:, None]
    made = quantized(x)
    assert made.values.dtype == torch.float8_e4m3fn
    error = made.values.float() * made.scale - x
    assert (error.norm(dim=1) <= 0.04 * x.norm(dim=1)).all()
    assert isinstance(made, Quantized)


def test_fp8_stays_near_bf16(tmp_path):
    tiny = TinyEngine(tmp_path, dtype=torch.bfloat16)
    job = tiny.job("a", steps=1, guidance=1.0)
    narrow, quick = FastEngine(tiny._model, precision="fp8"), FastEngine(tiny._model)
    [start] = [engine.begin([engine.prepare(job)]).rows[0].x_nF.float() for engine in (quick,)]
    assert narrow.kernels == quick.kernels + "/fp8"
    eight, sixteen = (engine.begin([engine.prepare(job)]) for engine in (narrow, quick))
    narrow.advance([eight])
    quick.advance([sixteen])
    moved = sixteen.rows[0].x_nF.float() - start
    error = (eight.rows[0].x_nF.float() - sixteen.rows[0].x_nF.float()).norm() / moved.norm()
    assert 0 < error < 0.1


@pytest.mark.parametrize(("kernels", "kind"), [("auto", Engine), ("plain", Engine), ("fast", FastEngine)])
def test_the_setting_chooses_the_path(strict, kernels, kind):
    engine = open_engine(strict._model, kernels=kernels)
    assert type(engine) is kind
    assert engine.kernels == ("fast/torch" if kind is FastEngine else "plain")
