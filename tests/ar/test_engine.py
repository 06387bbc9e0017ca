"""The engine: exact in any company, failures stay with their row, freed memory stays unread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from mammoth_ar.conditioning import Grid, Sampling, Scope
from mammoth_ar.engine import DeviceLost, Engine
from mammoth_ar.model.config import LLMConfig
from mammoth_ar.profiling import measure
from mammoth_ar.sequence import Rows, Running, Sequence
from mammoth_ar.testing import make_checkpoint, make_sequence, tiny_engine
from mammoth_serving.checkpoint import Checkpoint, CheckpointError
from mammoth_serving.tiny import FAMILIES
from mammoth_wire.errors import EngineFailed, InvalidRequest, Overloaded

ROUNDING = 1e-10
NAN = float("nan")


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def asks(checkpoint: Checkpoint) -> list[Sequence]:
    """Unequal lengths, grids, guidance and sampling; all prompts are longer than a prefill chunk."""
    return [
        make_sequence(checkpoint, "a cat", Grid(2, 2), Sampling(1)),
        make_sequence(checkpoint, "two dogs at sea", Grid(1, 4), Sampling(2, ar_guidance=3.0), negative="blurry"),
        make_sequence(checkpoint, "x", Grid(3, 1), Sampling(3, temperature=0.0, repetition_penalty=1.4)),
        make_sequence(checkpoint, "a red square", Grid(2, 3), Sampling(4, ar_guidance=5.0, top_k=7, top_p=0.8)),
    ]


def prefilled(engine: Engine, sequence: Sequence) -> tuple[Running, list[Rows]]:
    running, rows = engine.admit(sequence), []
    while not running.is_prefilled:
        part = engine.prefill(running)
        assert not isinstance(part, EngineFailed), part
        rows += [part] if part else []
    return running, rows


def finish(engine: Engine, runnings: Iterable[Running], rows: dict[Running, list[Rows]]) -> None:
    """Decode until all `runnings` are done, releasing each as soon as it is."""
    left = list(runnings)
    while left:
        for running, part in zip(left, engine.decode(left), strict=True):
            assert isinstance(part, Rows), part
            rows[running].append(part)
        for running in left:
            if running.is_done:
                engine.release(running)
        left = [running for running in left if not running.is_done]


def solo(engine: Engine, sequence: Sequence) -> tuple[list[Rows], list[int]]:
    running, parts = prefilled(engine, sequence)
    rows = {running: parts}
    finish(engine, [running], rows)
    return rows[running], running.grid_ids


def company(engine: Engine, sequences: list[Sequence]) -> list[tuple[list[Rows], list[int]]]:
    """Run all of them, each joining one decode step after the one before."""
    rows: dict[Running, list[Rows]] = {}
    for sequence in sequences:
        left = [running for running in rows if not running.is_done]
        for running, part in zip(left, engine.decode(left), strict=True):
            assert isinstance(part, Rows), part
            rows[running].append(part)
        running, parts = prefilled(engine, sequence)
        rows[running] = parts
    finish(engine, (running for running in rows if not running.is_done), rows)
    return [(parts, running.grid_ids) for running, parts in rows.items()]


def hidden(parts: Iterable[Rows], kind: str = "condition") -> Tensor:
    return torch.cat([part.hidden for part in parts if part.kind == kind])


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(
    ("device", "dtype", "orders"),
    [
        pytest.param("cpu", torch.float32, [[0, 1, 2, 3], [3, 1, 1, 0]], id="cpu-float32"),
        pytest.param("cpu", torch.bfloat16, [[3, 2, 1, 0]], id="cpu-bfloat16"),
        pytest.param("cuda", torch.bfloat16, [[0, 1, 2, 3], [3, 1, 1, 0]], id="cuda-bfloat16", marks=CUDA),
    ],
)
def test_strict_gives_the_same_bits_in_any_company_slot_and_order(
    checkpoint: Checkpoint, asks: list[Sequence], device: str, dtype: torch.dtype, orders: list[list[int]]
) -> None:
    engine = tiny_engine(checkpoint, dtype=dtype, device=device, num_slots=8)
    expected = [solo(engine, ask) for ask in asks]
    for order in orders:
        for index, (parts, tokens) in zip(order, company(engine, [asks[i] for i in order]), strict=True):
            assert tokens == expected[index][1]
            assert torch.equal(hidden(parts), hidden(expected[index][0]))


@CUDA
@pytest.mark.parametrize("exactness", ["strict", "tolerant"])
def test_cuda_writes_the_grids_of_the_cpu(checkpoint: Checkpoint, asks: list[Sequence], exactness: Any) -> None:
    cpu = tiny_engine(checkpoint, dtype=torch.float64, num_slots=8)
    cuda = tiny_engine(checkpoint, dtype=torch.float64, device="cuda", num_slots=8, exactness=exactness)
    for ask, (parts, tokens) in zip(asks, company(cuda, asks), strict=True):
        expected, expected_tokens = solo(cpu, ask)
        assert tokens == expected_tokens
        torch.testing.assert_close(hidden(parts), hidden(expected), rtol=0, atol=ROUNDING)


def test_a_tolerant_batch_equals_alone_up_to_rounding(checkpoint: Checkpoint, asks: list[Sequence]) -> None:
    alone = tiny_engine(checkpoint, dtype=torch.float64, num_slots=8)
    batched = tiny_engine(checkpoint, dtype=torch.float64, num_slots=8, exactness="tolerant")
    for ask, (parts, tokens) in zip(asks, company(batched, asks), strict=True):
        expected, expected_tokens = solo(alone, ask)
        assert tokens == expected_tokens
        torch.testing.assert_close(hidden(parts), hidden(expected), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("exactness", ["strict", "tolerant"])
def test_freed_memory_is_never_read_by_the_next_owner(
    checkpoint: Checkpoint, asks: list[Sequence], exactness: Any
) -> None:
    engine = tiny_engine(checkpoint, num_slots=8, exactness=exactness)
    expected = company(engine, asks)
    for stored in (*engine.cache.keys, *engine.cache.values):
        stored.fill_(NAN)
    for (parts, tokens), (expected_parts, expected_tokens) in zip(company(engine, asks), expected, strict=True):
        assert tokens == expected_tokens
        assert torch.equal(hidden(parts), hidden(expected_parts))
    assert engine.num_free_slots == 8


def test_rows_are_prompt_and_grid_without_a_closing_token(checkpoint: Checkpoint, asks: list[Sequence]) -> None:
    engine, ask = tiny_engine(checkpoint), asks[1]
    parts, tokens = solo(engine, ask)
    condition = [part for part in parts if part.kind == "condition"]
    negative = parts[: -len(condition)]
    assert torch.cat([part.ids for part in condition]).tolist() == [*ask.prompt_ids, *tokens]
    assert torch.cat([part.ids for part in negative]).tolist() == list(ask.negative_ids)
    assert hidden(parts).shape == (len(ask.prompt_ids) + ask.grid.num_tokens, engine.hidden_size)
    assert {part.ids.dtype for part in parts} == {torch.int32}
    assert {part.hidden.dtype for part in parts} == {engine.dtype}


def test_a_grid_holds_visual_tokens_and_an_end_of_line_per_row(checkpoint: Checkpoint, asks: list[Sequence]) -> None:
    engine = tiny_engine(checkpoint)
    for ask in asks:
        _, tokens = solo(engine, ask)
        scope = engine.scope
        for index, token in enumerate(tokens):
            if ask.grid.is_row_end(index):
                assert token == scope.eol_id
            else:
                assert scope.visual_start <= token < scope.visual_end


def test_one_prefill_call_runs_one_chunk_in_the_order_negative_tail_prompt(
    checkpoint: Checkpoint, asks: list[Sequence]
) -> None:
    engine, ask = tiny_engine(checkpoint, prefill_chunk_tokens=32), asks[1]
    running, kinds = engine.admit(ask), []
    while not running.is_prefilled:
        part = engine.prefill(running)
        kinds.append((part.kind, len(part.ids)) if isinstance(part, Rows) else None)
    chunks = [
        (kind, min(32, len(ids) - start))
        for kind, ids in (("negative", ask.negative_ids), ("tail", ask.tail_ids), ("condition", ask.prompt_ids))
        for start in range(0, len(ids), 32)
    ]
    assert kinds == [None if kind == "tail" else (kind, size) for kind, size in chunks]


def test_a_tail_is_run_once_for_a_grid_and_bits_stay(checkpoint: Checkpoint, monkeypatch: Any) -> None:
    engine = tiny_engine(checkpoint)
    ask = make_sequence(checkpoint, "a cat", Grid(2, 2), Sampling(1, ar_guidance=3.0))
    first_rows, first_tokens = solo(engine, ask)
    lengths: list[int] = []
    forward = engine._forward_row

    def counted(ids: Any, window: Any, **options: Any) -> Any:
        lengths.append(len(ids))
        return forward(ids, window, **options)

    monkeypatch.setattr(engine, "_forward_row", counted)
    again_rows, again_tokens = solo(engine, ask)
    assert sum(lengths) == len(ask.prompt_ids) + 2 * ask.grid.num_tokens - 1  # the last token concerns no guidance
    assert again_tokens == first_tokens
    assert torch.equal(torch.cat([part.hidden for part in again_rows]), torch.cat([part.hidden for part in first_rows]))
    other = make_sequence(checkpoint, "a cat", Grid(3, 2), Sampling(1, ar_guidance=3.0))
    lengths.clear()
    solo(engine, other)
    assert len(other.tail_ids) in lengths  # another grid has another tail


def test_the_seed_decides_and_guidance_matters(checkpoint: Checkpoint) -> None:
    engine = tiny_engine(checkpoint)

    def tokens(**settings: Any) -> list[int]:
        return solo(engine, make_sequence(checkpoint, "a cat", Grid(3, 3), Sampling(**settings)))[1]

    assert tokens(seed=5) == tokens(seed=5) != tokens(seed=6)
    assert tokens(seed=5) != tokens(seed=5, ar_guidance=7.0)


def test_a_negative_prompt_changes_no_condition_row(checkpoint: Checkpoint) -> None:
    engine = tiny_engine(checkpoint)
    plain = solo(engine, make_sequence(checkpoint, "a cat", Grid(2, 2), Sampling(1)))[0]
    other = solo(engine, make_sequence(checkpoint, "a cat", Grid(2, 2), Sampling(1), negative="dog"))[0]
    assert torch.equal(hidden(plain), hidden(other))


def when_position(target: int, error: Exception) -> Callable[..., None]:
    """Return a hook that fails a forward pass in which any token stands at `target`."""

    def hook(_: object, args: tuple[Tensor, ...]) -> None:
        if (args[1] == target).any():
            raise error

    return hook


@pytest.mark.parametrize("exactness", ["strict", "tolerant"])
def test_an_exception_fails_its_own_row_alone(checkpoint: Checkpoint, exactness: Any) -> None:
    texts = ["short", "much longer than the others"]
    [healthy, victim] = [make_sequence(checkpoint, text, Grid(2, 2), Sampling(1)) for text in texts]
    engine = tiny_engine(checkpoint, exactness=exactness)
    expected = solo(engine, healthy)[1]
    runnings = [prefilled(engine, ask)[0] for ask in (healthy, victim)]
    bad = when_position(len(victim.prompt_ids), RuntimeError("out of luck"))
    with engine.decoder.register_forward_pre_hook(bad):
        good, failed = engine.decode(runnings)
    assert isinstance(good, Rows)
    assert isinstance(failed, EngineFailed)
    assert "out of luck" in failed.message
    engine.release(runnings[1])
    rows: dict[Running, list[Rows]] = {runnings[0]: []}
    finish(engine, [runnings[0]], rows)
    assert runnings[0].grid_ids == expected


@pytest.mark.parametrize("exactness", ["strict", "tolerant"])
def test_a_non_finite_row_fails_alone(checkpoint: Checkpoint, asks: list[Sequence], exactness: Any) -> None:
    engine = tiny_engine(checkpoint, exactness=exactness)
    runnings = [prefilled(engine, ask)[0] for ask in (asks[0], asks[2])]
    engine.cache.values[1][runnings[0].slots[0], :, 3] = NAN
    failed, good = engine.decode(runnings)
    assert isinstance(failed, EngineFailed)
    assert "non-finite" in failed.message
    assert isinstance(good, Rows)


def test_a_failing_prefill_is_a_value_too(checkpoint: Checkpoint, asks: list[Sequence]) -> None:
    engine = tiny_engine(checkpoint)
    running = engine.admit(asks[0])
    with engine.decoder.register_forward_pre_hook(when_position(0, ValueError("bad prompt"))):
        assert isinstance(engine.prefill(running), EngineFailed)


def test_a_lost_device_is_nobodys_row(checkpoint: Checkpoint, asks: list[Sequence]) -> None:
    engine = tiny_engine(checkpoint)
    running = engine.admit(asks[0])
    lost = when_position(0, RuntimeError("CUDA error: an illegal memory access was encountered"))
    with engine.decoder.register_forward_pre_hook(lost), pytest.raises(DeviceLost):
        engine.prefill(running)


def test_what_can_never_run_names_its_field(checkpoint: Checkpoint, asks: list[Sequence]) -> None:
    long = make_sequence(checkpoint, "x" * 300, Grid(1, 1), Sampling(0), negative="y" * 300)
    engine = tiny_engine(checkpoint, num_slots=1)
    refused = engine.refusal(long)
    assert refused
    assert [field for field, _ in refused.violations] == ["prompt", "negative_prompt"]
    with pytest.raises(InvalidRequest, match="ar_guidance"):
        engine.admit(asks[1])
    assert engine.num_free_slots == 1


def test_the_context_limit_is_prompt_and_grid_and_one(checkpoint: Checkpoint, asks: list[Sequence]) -> None:
    needed = len(asks[0].prompt_ids) + asks[0].grid.num_tokens + 1
    assert tiny_engine(checkpoint, max_context_tokens=needed).refusal(asks[0]) is None
    assert tiny_engine(checkpoint, max_context_tokens=needed - 1).refusal(asks[0]) is not None


@pytest.mark.parametrize(
    ("scope", "key"),
    [
        pytest.param(Scope(511, 520, 584), "eol_token_id", id="text-id-as-end-of-line"),
        pytest.param(Scope(512, 520, 10_000), "visual_token_end_id", id="beyond-the-table"),
        pytest.param(Scope(512, 100, 584), "visual_token_start_id", id="from-the-text-vocabulary"),
    ],
)
def test_a_scope_outside_the_generation_vocabulary_is_refused(checkpoint: Checkpoint, scope: Scope, key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        Engine.load(checkpoint, scope, num_slots=1, max_context_tokens=64)


def test_an_id_that_no_head_row_scores_is_never_drawn(checkpoint: Checkpoint) -> None:
    config = LLMConfig.parse(checkpoint.config)
    whole = config.gen_vocab_start_index + config.gen_vocab_size
    engine = Engine.load(checkpoint, Scope(512, 520, whole), num_slots=1, max_context_tokens=64)
    assert engine.scope.visual_end == config.vocab_size + config.gen_vocab_size


async def at_once(fn, /, *args):
    """A device worker that is never busy."""
    return fn(*args)


def test_measuring_gives_a_time_per_step_and_the_slots_back(checkpoint: Checkpoint) -> None:
    engine = tiny_engine(checkpoint, num_slots=3)
    assert len(asyncio.run(measure(engine, at_once, num_seqs=3, num_prompt_tokens=40, num_steps=2))) == 2
    with pytest.raises(Overloaded):
        asyncio.run(measure(engine, at_once, num_seqs=4, num_prompt_tokens=40, num_steps=2))
    assert engine.num_free_slots == 3
