"""The queue on a loop whose clock is faked."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from mammoth_operator.errors import TransientError
from mammoth_operator.queue import Queue, backoff_s


async def running(queue, *, for_s):
    task = asyncio.create_task(queue.run())
    await asyncio.sleep(for_s)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.looptime
async def test_wishes_for_one_key_become_one_run():
    runs = []

    async def work(key):
        runs.append(key)

    queue = Queue(work)
    for _ in range(5):
        queue.add("a")
    queue.add("b")
    await running(queue, for_s=1)
    assert sorted(runs) == ["a", "b"]


@pytest.mark.looptime
async def test_a_key_never_runs_twice_at_a_time_and_once_more_when_asked_meanwhile():
    runs, inside = [], set()

    async def work(key):
        assert key not in inside
        inside.add(key)
        runs.append(asyncio.get_running_loop().time())
        await asyncio.sleep(5)
        inside.remove(key)

    queue = Queue(work)
    queue.add("a")
    asyncio.get_running_loop().call_later(1, queue.add, "a")
    asyncio.get_running_loop().call_later(2, queue.add, "a")
    await running(queue, for_s=20)
    assert runs == [0, 5]


@pytest.mark.looptime
async def test_failures_wait_longer_and_success_forgets_them():
    runs = []

    async def work(key):
        runs.append(asyncio.get_running_loop().time())
        if len(runs) < 5:
            raise TransientError("not now")

    queue = Queue(work)
    queue.add("a")
    await running(queue, for_s=60)
    waits = [later - earlier for earlier, later in pairwise(runs)]
    assert all(0.8 * due <= wait <= 1.2 * due for wait, due in zip(waits, (1, 2, 4, 8), strict=True))


@pytest.mark.looptime
async def test_a_reconcile_says_when_it_wants_to_be_run_again():
    runs = []

    async def work(key):
        runs.append(asyncio.get_running_loop().time())
        return 30.0 if len(runs) < 3 else None

    queue = Queue(work)
    queue.add("a")
    await running(queue, for_s=200)
    assert runs == [0, 30, 60]


@pytest.mark.looptime
async def test_an_earlier_wish_stands():
    runs = []

    async def work(key):
        runs.append(asyncio.get_running_loop().time())

    queue = Queue(work)
    queue.add("a", after_s=30)
    queue.add("a", after_s=3)
    queue.add("a", after_s=60)
    await running(queue, for_s=100)
    assert runs == [3]


@pytest.mark.looptime
async def test_a_bug_ends_the_queue():
    async def work(key):
        raise ZeroDivisionError

    queue = Queue(work)
    queue.add("a")
    with pytest.raises(ExceptionGroup) as caught:
        await queue.run()
    assert caught.group_contains(ZeroDivisionError)


@pytest.mark.parametrize(("failures", "wait_s"), [(1, 1), (2, 2), (5, 16), (9, 256), (10, 300), (50, 300)])
def test_the_backoff_doubles_to_five_minutes(failures, wait_s):
    assert backoff_s(failures, 0.5) == pytest.approx(wait_s)
    assert backoff_s(failures, 0.0) == pytest.approx(0.8 * wait_s)
