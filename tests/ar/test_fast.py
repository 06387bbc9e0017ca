"""The fast path against the plain one, which defines it; its kernels run in Triton's interpreter, at toy width.

T rows, H width.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from mammoth_ar.batching import Batcher
from mammoth_ar.conditioning import Grid, Knobs, Sampling, Scope, sample, shaped
from mammoth_ar.engine import Engine
from mammoth_ar.engines import open_engine
from mammoth_ar.fast.delivery import CHUNK, NUM_KEPT, Copies, Delivery
from mammoth_ar.fast.engine import FastEngine
from mammoth_ar.fast.products import _widened
from mammoth_ar.fast.state import RowState
from mammoth_ar.fast.verify import is_exact
from mammoth_ar.fast.weights import narrowed, read_back
from mammoth_ar.model.decoder import Decoder
from mammoth_ar.sequence import Rows, Running, Sequence
from mammoth_ar.testing import fast_engine, make_checkpoint, make_sequence, tiny_engine
from mammoth_ar.tickets import Progress, Queued
from mammoth_wire.errors import EngineFailed

ATOL = 1e-5
KNOBS = [
    Sampling(1, temperature=0.0),
    Sampling(2, top_k=5, top_p=0.7, temperature=1.7),
    Sampling(4, ar_guidance=3.0, repetition_penalty=1.4),
]


@pytest.fixture(scope="module", params=["preview", "dev"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Engine, FastEngine]:
    """A checkpoint and both engines over it; 6 rows are two groups of the fast one."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return checkpoint, tiny_engine(checkpoint, num_slots=6), toy(checkpoint)


@pytest.fixture
def fast(tmp_path: Path) -> FastEngine:
    """One layer is enough where the plain path is not looked at."""
    checkpoint = make_checkpoint(tmp_path)
    decoder = tiny_engine(checkpoint).decoder
    decoder.config, decoder.layers = replace(decoder.config, num_layers=1), decoder.layers[:1]
    return toy(checkpoint, decoder=decoder)


def toy(checkpoint: Any, *, decoder: Decoder | None = None, num_slots: int = 6, **options: Any) -> FastEngine:
    return fast_engine(
        decoder or tiny_engine(checkpoint).decoder,
        Scope.parse(checkpoint.generation),
        num_slots=num_slots,
        max_context_tokens=192,
        prefill_chunk_tokens=32,
        num_slices=2,
        **options,
    )


def start(engine: Engine, sequence: Sequence) -> tuple[Running, list[Rows]]:
    running, rows = engine.admit(sequence), []
    while not running.is_prefilled:
        outcome = engine.prefill(running)
        assert not isinstance(outcome, EngineFailed), outcome
        rows += [outcome] if outcome is not None else []
    return running, rows


def finish(engine: Engine, running: Running, rows: list[Rows]) -> tuple[Tensor, Tensor]:
    """Decode until `running` is done and leaves; return all its ids [T] and rows [T,H]."""
    [written] = finish_all(engine, [(running, rows)])
    return written


def finish_all(engine: Engine, started: list[tuple[Running, list[Rows]]]) -> list[tuple[Tensor, Tensor]]:
    """Decode until all are done and leave; return each one's ids [T] and rows [T,H]."""
    while going := [(running, rows) for running, rows in started if not running.is_done]:
        outcomes = engine.decode([running for running, _ in going])
        for (_, rows), outcome in zip(going, outcomes, strict=True):
            assert isinstance(outcome, Rows), outcome
            rows.append(outcome)
    for running, _ in started:
        engine.release(running)
    return [(torch.cat([part.ids for part in rows]), torch.cat([part.hidden for part in rows])) for _, rows in started]


def run(engine: Engine, sequence: Sequence) -> tuple[Tensor, Tensor]:
    return finish(engine, *start(engine, sequence))


def prompt(seed: int, *, num_prompt: int = 6, grid: Grid = Grid(1, 2), **knobs: Any) -> Sequence:
    ids = tuple(3 + (seed * 7 + index) % 90 for index in range(num_prompt))
    return Sequence(ids, grid, Sampling(seed, **knobs), tail_ids=(5, 6, 7))


def test_the_fast_path_writes_together_what_the_plain_one_does_alone(pair: tuple[Any, Engine, FastEngine]) -> None:
    """Greedy, top-k and top-p, guided with a penalty."""
    checkpoint, plain, fast = pair
    sequences = [make_sequence(checkpoint, "a red apple", Grid(2, 1), sampling) for sampling in KNOBS]
    alone = [run(plain, sequence) for sequence in sequences]
    together = finish_all(fast, [start(fast, sequence) for sequence in sequences])
    for (ids, hidden), (fast_ids, fast_hidden) in zip(alone, together, strict=True):
        assert torch.equal(fast_ids, ids)
        torch.testing.assert_close(fast_hidden, hidden, rtol=0, atol=ATOL)


def test_fp8_weights_decode_as_the_plain_path_does_on_the_numbers_that_they_hold(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path)
    plain = tiny_engine(checkpoint, num_slots=2)
    for layer in plain.decoder.layers:
        for matrix in (p for name, p in layer.named_parameters() if p.ndim == 2):
            matrix.data = read_back(narrowed(matrix.data))
    sequence = make_sequence(checkpoint, "a red apple", Grid(2, 1), Sampling(2, top_k=5, temperature=1.7))
    ids, hidden = run(plain, sequence)
    fast = toy(checkpoint, decoder=plain.decoder, num_slots=2, weights="fp8")
    fast_ids, fast_hidden = run(fast, sequence)
    assert "fp8" in fast.kernels
    assert torch.equal(fast_ids, ids)
    torch.testing.assert_close(fast_hidden, hidden, rtol=0, atol=ATOL)


def test_fp8_weights_are_near_and_narrowing_them_again_changes_nothing() -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    once = read_back(narrowed(weight))
    assert (once - weight).abs().max() < weight.abs().max() / 16
    assert torch.equal(read_back(narrowed(once)), once)
    with pytest.raises(ValueError, match="62 is not a multiple of 4"):
        narrowed(weight[:, :62])


@triton.jit
def widen(words, out, BYTE: tl.constexpr, PACKED: tl.constexpr):
    at = tl.arange(0, 64)
    value = _widened(tl.load(words + at), BYTE, tl.zeros((1,), tl.bfloat16), PACKED)
    tl.store(out + at, value.to(tl.float32))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("byte", range(4))
def test_every_e4m3_number_is_read_as_it_is(byte: int, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU: the packed conversion is its machine code")
    codes = torch.arange(256).to(torch.uint8).view(4, 64)
    words, out = codes.T.contiguous().view(torch.int32).squeeze(-1).to(device), torch.zeros(64, device=device)
    widen[(1,)](words, out, BYTE=byte, PACKED=device == "cuda")
    expected = codes[byte].view(torch.float8_e4m3fn).float()
    assert torch.equal(torch.where(expected.isnan(), expected, out.cpu()).nan_to_num(), expected.nan_to_num())


def test_a_chunk_too_long_for_a_graph_is_prefilled_as_the_plain_path_does(
    pair: tuple[Any, Engine, FastEngine],
) -> None:
    _, plain, fast = pair
    sequence = prompt(1, num_prompt=70)  # chunks of 32: the first is padded to 64, the others have a past
    (_, expected), (_, hidden) = run(plain, sequence), run(fast, sequence)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=ATOL)


def test_bits_do_not_depend_on_company_slot_or_moment(fast: FastEngine) -> None:
    assert is_exact(fast, grid=Grid(1, 2), num_prompt=20)
    assert fast.num_free_slots == fast.num_slots


def test_verification_notices_a_row_that_depends_on_its_company(fast: FastEngine, monkeypatch: Any) -> None:
    forward = fast._step.forward

    def leaking(group: int) -> None:
        forward(group)
        fast.state.ring += fast.state.active.sum() * 1e-6

    monkeypatch.setattr(fast._step, "forward", leaking)
    assert not is_exact(fast, grid=Grid(1, 2), num_prompt=20)


def test_a_request_that_leaves_changes_no_bit_of_another_and_frees_its_slot(fast: FastEngine) -> None:
    alone = run(fast, prompt(1, grid=Grid(1, 4)))
    leaving, _ = start(fast, prompt(2, grid=Grid(2, 4)))
    staying, rows = start(fast, prompt(1, grid=Grid(1, 4)))
    fast.decode([leaving, staying])
    fast.release(leaving)
    taken, others = start(fast, prompt(3))  # takes the slot that was left, with what is still in it
    assert taken.slots == (0,)
    ids, hidden = finish(fast, staying, rows)
    assert torch.equal(ids, alone[0])
    assert torch.equal(hidden, alone[1])
    assert torch.equal(finish(fast, taken, others)[1], run(fast, prompt(3))[1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with numpy
def test_a_row_that_turns_nan_fails_by_itself_and_poisons_nobody_after_it(fast: FastEngine) -> None:
    alone = run(fast, prompt(1))
    bad, _ = start(fast, prompt(2))
    good, rows = start(fast, prompt(1))
    for layer in fast.cache.values:
        layer[bad.slots[0], :, :2] = torch.nan
    outcomes: list[Any] = []
    while not good.is_done:
        first, second = fast.decode([bad, good])
        outcomes.append(first)
        assert isinstance(second, Rows)
        rows.append(second)
    assert isinstance(outcomes[-1], EngineFailed)
    assert torch.equal(torch.cat([part.hidden for part in rows]), alone[1])
    fast.release(bad)
    fast.release(good)
    assert torch.equal(run(fast, prompt(1))[1], alone[1])  # in the slot whose values were NaN


def test_a_measurement_beside_running_rows_takes_nothing_from_them(fast: FastEngine) -> None:
    alone = run(fast, prompt(1, grid=Grid(1, 5)))
    staying, rows = start(fast, prompt(1, grid=Grid(1, 5)))
    measured, _ = start(fast, prompt(9))
    fast.decode([measured])  # steps all that runs
    fast.decode([measured])
    fast.release(measured)
    ids, hidden = finish(fast, staying, rows)
    assert torch.equal(ids, alone[0])
    assert torch.equal(hidden, alone[1])


async def test_a_batcher_serves_with_it(fast: FastEngine) -> None:
    """Rows come late and in bulk; tickets see all of them, in order, and slots come back."""

    async def now(fn: Any, /, *args: Any) -> Any:
        return fn(*args)

    expected = [run(fast, prompt(seed)) for seed in (1, 2)]
    batcher = Batcher(fast, now, max_num_seqs=6)
    serving = asyncio.create_task(batcher.run())
    tickets = [batcher.submit(prompt(seed)) for seed in (1, 2)]
    for ticket, (ids, hidden) in zip(tickets, expected, strict=True):
        rows = [event async for event in ticket if not isinstance(event, Queued | Progress)]
        assert torch.equal(torch.cat([part.ids for part in rows]), ids)
        assert torch.equal(torch.cat([part.hidden for part in rows]), hidden)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert fast.num_free_slots == fast.num_slots


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature", "penalty"),
    [
        (0, 1.0, 1.0, 1.0),
        (7, 1.0, 0.7, 1.0),
        (1, 1.0, 1.0, 1.0),  # three are kept
        (0, 0.6, 1.0, 1.3),
        (20, 0.9, 2.0, 1.0),
        (0, 1e-6, 1.0, 1.0),  # three are kept
        (5, 0.5, 0.0, 1.2),
        (500, 0.999999, 1.0, 1.0),
    ],
)
def test_tokens_are_chosen_as_the_logit_pipeline_says_ties_included(
    fast: FastEngine, top_k: int, top_p: float, temperature: float, penalty: float
) -> None:
    """Scores of a few levels tie everywhere, at the k-th place and at the edge of the nucleus too."""
    state, num_ids = fast.state, fast.state.seen.shape[1]
    num_rows = state.num_rows
    generator = torch.Generator().manual_seed(0)
    state.logits.copy_(torch.randint(-4, 5, (num_rows, num_ids), generator=generator) / 2)
    state.seen.copy_(torch.randint(0, 2, (num_rows, num_ids), generator=generator))
    seen = state.seen.bool().clone()
    samplings = [
        Sampling(seed * 2**40 - 3, top_k=top_k, top_p=top_p, temperature=temperature, repetition_penalty=penalty)
        for seed in range(num_rows)
    ]
    for slot, sampling in enumerate(samplings):
        state.join((slot,), (4,), Grid(2, 999), sampling)
    state.index.copy_(torch.arange(num_rows) + 5)
    fast._step.choose(state.starting)
    knobs = Knobs.of(samplings)
    index_B1 = (torch.arange(num_rows) + 6).unsqueeze(-1)
    expected = sample(shaped(state.logits, seen, knobs), knobs, index_B1, fast.scope.visual_start)
    assert (state.token - fast.scope.visual_start).tolist() == expected.tolist()
    assert state.seen.bool().gather(1, expected.unsqueeze(-1)).all()


def ring_rows(state: RowState, slot: int, first: int, num: int) -> None:
    """Write the rows [first, first + num) of a sequence into its ring as the steps would."""
    for index in range(first, first + num):
        state.ring[slot, index % NUM_KEPT] = index
        state.ring_ids[slot, index % NUM_KEPT] = index


@pytest.mark.parametrize("num_tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, NUM_KEPT, 5 * CHUNK + 7])
@pytest.mark.parametrize("collects", [True, False], ids=["at once", "at the end"])
def test_every_row_is_delivered_once_and_in_order(num_tokens: int, collects: bool) -> None:
    state = RowState(4, 8, 2, NUM_KEPT, dtype=torch.float32, device=torch.device("cpu"))
    delivery, copies, ids = Delivery(state), Copies(), []
    for index in range(num_tokens):
        delivery.before_step(copies, index)
        ring_rows(state, 1, index, 1)
        if (index + 1) % CHUNK == 0 or index + 1 == num_tokens:
            delivery.send(copies, 1, index + 1)
        if collects:
            ids += delivery.collect(copies, wait=False).ids.tolist()
    rest = delivery.collect(copies, wait=True)
    assert ids + rest.ids.tolist() == list(range(num_tokens))
    assert rest.hidden[:, 0].tolist() == rest.ids.tolist()
    assert delivery.collect(copies, wait=True).ids.tolist() == []


def test_auto_is_plain_on_the_cpu_and_fast_can_be_asked_for(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path)
    decoder, scope = tiny_engine(checkpoint).decoder, Scope.parse(checkpoint.generation)
    engine = open_engine(decoder, scope, num_slots=2, max_context_tokens=64)
    assert type(engine) is Engine
    assert engine.kernels == "plain, prefill in 256"


def test_fp8_weights_are_the_fast_paths_and_the_kernels_name_says_so(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path)
    decoder, scope = tiny_engine(checkpoint).decoder, Scope.parse(checkpoint.generation)
    sizes: Any = {"num_slots": 2, "max_context_tokens": 64, "weights": "fp8"}
    assert open_engine(decoder, scope, **sizes).kernels == "plain, prefill in 256"
    fast = open_engine(decoder, scope, **sizes, kernels="fast", exactness="tolerant")
    assert fast.kernels.startswith("fast/fp8, prefill in")


def test_what_cannot_run_fast_runs_plain_and_says_why(tmp_path: Path) -> None:
    """Without a GPU and without the interpreter the kernels cannot run; the stage serves all the same."""
    make_checkpoint(tmp_path)
    code = (
        "import sys, pathlib\n"
        "from mammoth_ar.conditioning import Scope\n"
        "from mammoth_ar.engines import open_engine\n"
        "from mammoth_ar.testing import make_checkpoint, tiny_engine\n"
        "checkpoint = make_checkpoint(pathlib.Path(sys.argv[1]))\n"
        "decoder = tiny_engine(checkpoint).decoder\n"
        "engine = open_engine(decoder, Scope.parse(checkpoint.generation), num_slots=2, max_context_tokens=64,"
        " kernels='fast')\n"
        "print(engine.kernels)\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "plain, prefill in 256"
    assert "the fast one did not start" in done.stderr
