"""The grid rule, the logit pipeline and counter-based sampling, as tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mammoth_ar.conditioning import Grid, Knobs, Sampling, Scope, guided, gumbel, philox4x32, sample, shaped
from mammoth_serving.checkpoint import CheckpointError

INF = float("inf")
ONES = 0xFFFFFFFF
UNSEEN = torch.zeros(1, 6, dtype=torch.bool)
EQUAL = [0.0] * 6
SLOPE = [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]


def knobs(**settings: Any) -> Knobs:
    return Knobs.of([Sampling(**({"seed": 0, "top_k": 0} | settings))])


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        pytest.param((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), id="zeros"),
        pytest.param((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD), id="ones"),
        pytest.param(
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
            id="pi",
        ),
    ],
)
def test_philox_gives_the_published_words(counter: Any, key: Any, words: Any) -> None:
    assert tuple(int(word) for word in philox4x32(counter, key)) == words


def test_an_end_of_line_closes_every_row() -> None:
    grid = Grid(height=2, width=3)
    assert grid.num_tokens == 8
    assert [grid.is_row_end(index) for index in range(8)] == [False, False, False, True] * 2


@pytest.mark.parametrize(
    ("scores", "settings", "kept"),
    [
        pytest.param(SLOPE, {}, 6, id="everything-off"),
        pytest.param(SLOPE, {"top_k": 4}, 4, id="top-k"),
        pytest.param(SLOPE, {"top_k": 1}, 3, id="top-k-keeps-three"),
        pytest.param(SLOPE, {"top_k": 99}, 6, id="top-k-beyond-the-vocabulary"),
        pytest.param(SLOPE, {"top_p": 0.1}, 3, id="top-p-keeps-three"),
        pytest.param(SLOPE, {"top_p": 0.98, "temperature": 2.0}, 6, id="heat-widens-the-nucleus"),
        pytest.param(SLOPE, {"top_p": 0.98}, 4, id="nucleus"),
        pytest.param(SLOPE, {"top_k": 3, "top_p": 0.999}, 3, id="top-k-before-top-p"),
        pytest.param([1.0, 0.0, 0.0, 0.0, 0.0, -1.0], {"top_k": 3}, 5, id="top-k-keeps-ties"),
        pytest.param(EQUAL, {"top_p": 0.5}, 3, id="top-p-prefers-lower-ids"),
    ],
)
def test_filters_keep(scores: list[float], settings: dict[str, Any], kept: int) -> None:
    finite = shaped(torch.tensor([scores]), UNSEEN, knobs(**settings)).isfinite()[0].tolist()
    assert finite == [index < kept for index in range(6)]


def test_the_repetition_penalty_pushes_seen_ids_down_from_either_side_of_zero() -> None:
    seen = torch.tensor([[True, True, False]])
    scores = shaped(torch.tensor([[2.0, -2.0, 2.0]]), seen, knobs(repetition_penalty=2.0))
    assert scores.tolist() == [[1.0, -4.0, 2.0]]


@pytest.mark.parametrize(
    ("guidance", "expected"), [(0.5, 3.0), (1.0, 3.0), (2.0, 5.0)], ids=["below-one", "off", "extrapolates"]
)
def test_guidance_mixes_above_one(guidance: float, expected: float) -> None:
    mixed = guided(torch.tensor([[3.0]]), torch.tensor([[1.0]]), knobs(ar_guidance=guidance))
    assert mixed.tolist() == [[expected]]


def test_an_unguided_row_never_reads_the_unconditional_one() -> None:
    assert guided(torch.tensor([[3.0]]), torch.tensor([[float("nan")]]), knobs()).tolist() == [[3.0]]


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**64 - 1])
def test_greedy_takes_the_lowest_of_the_best(seed: int) -> None:
    column = sample(torch.tensor([[0.0, 1.0, 1.0]]), knobs(seed=seed, temperature=0.0), torch.tensor([[7]]), 100)
    assert column.tolist() == [1]


def test_masked_ids_are_never_drawn() -> None:
    scores = torch.tensor([[-INF, 0.0, -INF]])
    drawn = {int(sample(scores, knobs(seed=seed), torch.tensor([[3]]), 9)) for seed in range(50)}
    assert drawn == {1}


def test_noise_depends_on_seed_token_index_and_id_alone() -> None:
    seeds, indices, ids = torch.tensor([[1], [2**40]]), torch.tensor([[5], [6]]), torch.arange(200, 300)
    noise = gumbel(seeds, indices, ids)
    assert torch.equal(noise[1:, 30:], gumbel(seeds[1:], indices[1:], ids[30:]))
    assert len(noise.unique()) == noise.numel()
    for other in (gumbel(seeds + 1, indices, ids), gumbel(seeds, indices + 1, ids), gumbel(seeds, indices, ids + 100)):
        assert not torch.isin(other, noise).any()


def test_draws_follow_the_softmax() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0, -INF]])
    num_draws = 20_000
    indices = torch.arange(num_draws).unsqueeze(-1)
    drawn = sample(scores.expand(num_draws, -1), knobs(seed=11), indices, 1000)
    share = drawn.bincount(minlength=4) / num_draws
    torch.testing.assert_close(share, scores.softmax(-1)[0], rtol=0, atol=0.015)


def test_requests_of_a_batch_do_not_touch_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 50, generator=generator)
    seen = torch.rand(3, 50, generator=generator) < 0.2
    samplings = [
        Sampling(1, temperature=0.7, top_k=5),
        Sampling(2, top_p=0.6, repetition_penalty=1.5),
        Sampling(3, temperature=0.0),
    ]
    indices = torch.tensor([[4], [9], [2]])
    together = sample(shaped(scores, seen, Knobs.of(samplings)), Knobs.of(samplings), indices, 10)
    for row, sampling in enumerate(samplings):
        one, part = Knobs.of([sampling]), slice(row, row + 1)
        assert torch.equal(sample(shaped(scores[part], seen[part], one), one, indices[part], 10), together[part])


def test_the_scope_comes_from_the_generation_config() -> None:
    keys = {"eol_token_id": 5, "visual_token_start_id": 8, "visual_token_end_id": 20}
    assert Scope.parse(keys) == Scope(5, 8, 20)
    assert Scope.parse({}, Scope(1, 2, 3)) == Scope(1, 2, 3)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        pytest.param({"visual_token_start_id": 8, "visual_token_end_id": 20}, "eol_token_id", id="missing"),
        pytest.param(
            {"eol_token_id": "5", "visual_token_start_id": 8, "visual_token_end_id": 20}, "eol_token_id", id="text"
        ),
        pytest.param(
            {"eol_token_id": 5, "visual_token_start_id": 8, "visual_token_end_id": 8}, "visual_token_end_id", id="empty"
        ),
    ],
)
def test_a_bad_scope_names_its_key(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        Scope.parse(keys)
