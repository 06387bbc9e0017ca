"""The batcher on a fake clock over a real tiny engine: every ticket ends, every slot comes back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from mammoth_ar.batching import Batcher
from mammoth_ar.conditioning import Grid, Sampling
from mammoth_ar.engine import DeviceLost, Engine
from mammoth_ar.sequence import Rows, Sequence
from mammoth_ar.testing import VirtualDevice, make_checkpoint, make_sequence, tiny_engine
from mammoth_ar.tickets import Event, Progress, Queued, Ticket
from mammoth_serving.checkpoint import Checkpoint
from mammoth_wire.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MammothError,
    Overloaded,
    Unavailable,
)

pytestmark = pytest.mark.looptime
CALL_S = 0.01
NAN = float("nan")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine(checkpoint: Checkpoint) -> Engine:
    return tiny_engine(checkpoint, num_slots=4)


@pytest.fixture
def device() -> VirtualDevice:
    return VirtualDevice(CALL_S)


@pytest.fixture(scope="module")
def ask(checkpoint: Checkpoint) -> Sequence:
    """One prompt of several chunks, a grid of 12 tokens."""
    return make_sequence(checkpoint, "a cat", Grid(3, 3), Sampling(1))


@pytest.fixture(scope="module")
def guided(checkpoint: Checkpoint) -> Sequence:
    return make_sequence(checkpoint, "a cat", Grid(3, 3), Sampling(1, ar_guidance=3.0), negative="blurry")


@asynccontextmanager
async def serving(engine: Any, device: VirtualDevice, **limits: int) -> AsyncIterator[Batcher]:
    batcher = Batcher(engine, device.run, **({"max_num_seqs": engine.num_slots} | limits))
    loop = asyncio.create_task(batcher.run())
    try:
        yield batcher
    finally:
        loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loop


async def events(ticket: Ticket) -> list[Event]:
    return [event async for event in ticket]


async def outcome(ticket: Ticket) -> MammothError | None:
    """Return how the ticket ended."""
    try:
        await events(ticket)
    except MammothError as err:
        return err
    return None


def hidden(found: list[Event], kind: str = "condition") -> Tensor:
    return torch.cat([event.hidden for event in found if isinstance(event, Rows) and event.kind == kind])


async def until_decoding(ticket: Ticket) -> None:
    async for event in ticket:
        if isinstance(event, Progress):
            return


async def test_a_ticket_tells_its_place_its_rows_in_order_and_its_progress(
    engine: Engine, device: VirtualDevice, guided: Sequence
) -> None:
    async with serving(engine, device, chunk_rows=5) as batcher:
        found = await events(batcher.submit(guided))
    assert found[0] == Queued(0)
    progress = [event for event in found if isinstance(event, Progress)]
    assert progress == [Progress(count, 12) for count in (0, 5, 10, 12)]
    kinds = [event.kind for event in found if isinstance(event, Rows)]
    assert kinds == sorted(kinds, reverse=True)
    assert [len(event.ids) for event in found[found.index(progress[0]) :] if isinstance(event, Rows)] == [5, 5, 2]
    assert len(hidden(found)) == len(guided.prompt_ids) + 12
    assert len(hidden(found, "negative")) == len(guided.negative_ids)


async def test_rows_have_the_same_bits_alone_and_in_company(
    engine: Engine, device: VirtualDevice, ask: Sequence, guided: Sequence
) -> None:
    async with serving(engine, device) as batcher:
        alone = hidden(await events(batcher.submit(ask)))
        tickets = [batcher.submit(sequence) for sequence in (guided, ask, guided, ask)]
        found = await asyncio.gather(*map(events, tickets))
    assert torch.equal(hidden(found[1]), alone)
    assert torch.equal(hidden(found[3]), alone)
    assert torch.equal(hidden(found[0]), hidden(found[2]))


async def test_a_newcomer_stalls_running_rows_by_one_chunk_at_most(
    engine: Engine, device: VirtualDevice, ask: Sequence
) -> None:
    async with serving(engine, device) as batcher:
        first = batcher.submit(ask)
        await until_decoding(first)
        device.calls.clear()
        second = batcher.submit(ask)
        await asyncio.gather(events(first), events(second))
    assert "prefill-prefill" not in "-".join(device.calls)
    assert device.calls.count("prefill") >= 3


async def test_places_in_the_queue_are_told_as_they_change(
    engine: Engine, device: VirtualDevice, ask: Sequence
) -> None:
    async with serving(engine, device, max_num_seqs=1) as batcher:
        tickets = [batcher.submit(ask) for _ in range(3)]
        tickets[1].cancel()
        found = await events(tickets[2])
    assert [event.position for event in found if isinstance(event, Queued)] == [2, 1, 0]


async def test_the_cap_counts_guided_rows_twice_and_is_live(
    engine: Engine, device: VirtualDevice, ask: Sequence, guided: Sequence
) -> None:
    async with serving(engine, device, max_num_seqs=2) as batcher:
        tickets = [batcher.submit(sequence) for sequence in (guided, ask, ask)]
        await until_decoding(tickets[0])
        assert (batcher.snapshot().rows_in_use, batcher.snapshot().queue_depth) == (2, 2)
        batcher.set_limits(4)
        await until_decoding(tickets[2])
        snapshot = batcher.snapshot()
        assert (snapshot.rows_in_use, snapshot.queue_depth, snapshot.free_slots) == (4, 0, 0)
        batcher.set_limits(1)
        assert await asyncio.gather(*map(outcome, tickets)) == [None] * 3
        assert await outcome(batcher.submit(guided)) is None  # alone, it runs above the cap


async def test_a_full_queue_says_when_to_come_back(engine: Engine, device: VirtualDevice, ask: Sequence) -> None:
    async with serving(engine, device, max_num_seqs=1, max_queue=2) as batcher:
        running = batcher.submit(ask)
        await until_decoding(running)
        waiting = [batcher.submit(ask) for _ in range(2)]
        with pytest.raises(Overloaded) as refused:
            batcher.submit(ask)
        assert refused.value.retry_after_s is not None
        assert refused.value.metadata["queue_depth"] == "2"
        waiting[0].cancel()  # a place is free at once
        batcher.submit(ask).cancel()
        assert await outcome(running) is None
        assert await outcome(waiting[1]) is None


async def test_what_can_never_run_is_refused_at_the_door(
    checkpoint: Checkpoint, engine: Engine, device: VirtualDevice
) -> None:
    long = make_sequence(checkpoint, "x" * 300, Grid(1, 1), Sampling(0))
    async with serving(engine, device) as batcher:
        with pytest.raises(InvalidRequest, match="prompt"):
            batcher.submit(long)


async def test_a_cancelled_row_is_free_within_one_token_and_its_neighbour_unmoved(
    engine: Engine, device: VirtualDevice, ask: Sequence, guided: Sequence
) -> None:
    async with serving(engine, device) as batcher:
        alone = hidden(await events(batcher.submit(ask)))
        leaver, stayer = batcher.submit(guided), batcher.submit(ask)
        await until_decoding(leaver)
        leaver.cancel()
        await asyncio.sleep(1.5 * CALL_S)
        assert engine.num_free_slots == 3
        assert isinstance(await outcome(leaver), Cancelled)
        assert torch.equal(hidden(await events(stayer)), alone)


async def test_a_ticket_left_early_is_cancelled_and_the_reason_is_the_callers(
    engine: Engine, device: VirtualDevice, ask: Sequence
) -> None:
    async with serving(engine, device) as batcher:
        async with batcher.submit(ask) as ticket:
            await until_decoding(ticket)
        assert ticket.is_over
        late = batcher.submit(ask)
        late.cancel(DeadlineExceeded("too late", stage="ar"))
        assert isinstance(await outcome(late), DeadlineExceeded)
        assert await events(late) == []  # an ended ticket stays ended


async def test_two_hundred_random_cancels_leave_no_slot_taken(
    engine: Engine, device: VirtualDevice, checkpoint: Checkpoint
) -> None:
    draw = random.Random(7)
    asks = [
        make_sequence(checkpoint, "x", Grid(2, 2), Sampling(0, ar_guidance=scale), negative=negative)
        for scale in (1.0, 2.0)
        for negative in (None, "y")
    ]

    async def visit(batcher: Batcher) -> MammothError | None:
        await asyncio.sleep(draw.uniform(0, 4))
        ticket = batcher.submit(draw.choice(asks))
        asyncio.get_running_loop().call_later(draw.uniform(0, 0.3), ticket.cancel)
        return await outcome(ticket)

    async with serving(engine, device, max_queue=200) as batcher:
        ends = await asyncio.gather(*(visit(batcher) for _ in range(200)))
        await asyncio.sleep(2 * CALL_S)
        snapshot = batcher.snapshot()
    assert {type(end) for end in ends} == {Cancelled, type(None)}
    assert (snapshot.free_slots, snapshot.queue_depth, snapshot.num_running) == (4, 0, 0)


async def test_a_failed_row_ends_its_ticket_and_no_other(engine: Engine, device: VirtualDevice, ask: Sequence) -> None:
    async with serving(engine, device) as batcher:
        victim, neighbour = batcher.submit(ask), batcher.submit(ask)
        await until_decoding(victim)
        engine.cache.values[0][0, :, 3] = NAN  # slot 0 is the lowest, so the first comer's
        assert isinstance(await outcome(victim), EngineFailed)
        assert await outcome(neighbour) is None
        assert engine.num_free_slots == 4


async def test_a_failed_prefill_ends_its_ticket(engine: Engine, device: VirtualDevice, ask: Sequence) -> None:
    def hook(*_: object) -> None:
        raise RuntimeError("out of luck")

    async with serving(engine, device) as batcher:
        with engine.decoder.register_forward_pre_hook(hook):
            assert isinstance(await outcome(batcher.submit(ask)), EngineFailed)
        assert await outcome(batcher.submit(ask)) is None


async def test_a_lost_engine_ends_every_ticket_and_leaves_through_run(
    engine: Engine, device: VirtualDevice, ask: Sequence
) -> None:
    def hook(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    batcher = Batcher(engine, device.run, max_num_seqs=1)
    tickets = [batcher.submit(ask) for _ in range(3)]
    with engine.decoder.register_forward_pre_hook(hook), pytest.raises(DeviceLost):
        await batcher.run()
    assert {type(end) for end in await asyncio.gather(*map(outcome, tickets))} == {EngineFailed}
    with pytest.raises(EngineFailed):
        batcher.submit(ask)
    assert engine.num_free_slots == 4


async def test_stopping_ends_every_ticket(engine: Engine, device: VirtualDevice, ask: Sequence) -> None:
    async with serving(engine, device, max_num_seqs=1) as batcher:
        tickets = [batcher.submit(ask) for _ in range(3)]
        await until_decoding(tickets[0])
    assert {type(end) for end in await asyncio.gather(*map(outcome, tickets))} == {Unavailable}
    with pytest.raises(Unavailable):
        batcher.submit(ask)
    assert engine.num_free_slots == 4


async def test_the_snapshot_measures_steps_and_the_estimate_uses_them(
    engine: Engine, device: VirtualDevice, ask: Sequence
) -> None:
    async with serving(engine, device, max_num_seqs=2) as batcher:
        assert batcher.estimate_s(ask) is None
        assert batcher.snapshot().tokens_per_s is None
        assert await outcome(batcher.submit(ask)) is None
        snapshot = batcher.snapshot()
        assert snapshot.step_s == pytest.approx(CALL_S)
        assert snapshot.tokens_per_s == pytest.approx(1 / CALL_S)
        assert batcher.estimate_s(ask) == pytest.approx(12 * CALL_S)
        tickets = [batcher.submit(ask) for _ in range(2)]
        assert batcher.estimate_s(ask) == pytest.approx(24 * CALL_S)
        assert await asyncio.gather(*map(outcome, tickets)) == [None] * 2


async def test_progress_is_dated_while_there_is_work(engine: Engine, device: VirtualDevice, ask: Sequence) -> None:
    clock = asyncio.get_running_loop().time
    async with serving(engine, device) as batcher:
        await asyncio.sleep(1000)  # idle time is no stall
        ticket = batcher.submit(ask)
        assert batcher.snapshot().last_progress_at == pytest.approx(clock())
        await until_decoding(ticket)
        await asyncio.sleep(3.5 * CALL_S)
        assert clock() - batcher.snapshot().last_progress_at <= CALL_S
        assert await outcome(ticket) is None
