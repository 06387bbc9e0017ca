"""The device worker keeps the loop free, keeps calls in order, and never leaves one half done."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mammoth_serving.device import DeviceWorker


@pytest.fixture
def worker():
    worker = DeviceWorker("test")
    yield worker
    worker.close()


async def test_the_loop_goes_on_while_the_device_works(worker):
    release = threading.Event()
    call = asyncio.create_task(worker.run(release.wait))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not call.done()
    release.set()
    assert await call is True


async def test_calls_run_one_at_a_time_in_order(worker):
    running, order = [], []

    def work(i):
        running.append(i)
        assert len(running) == 1
        order.append((i, threading.current_thread().name))
        running.remove(i)

    await asyncio.gather(*(worker.run(work, i) for i in range(50)))
    assert [i for i, _ in order] == list(range(50))
    assert len({name for _, name in order}) == 1


async def test_a_cancelled_call_finishes_on_the_device_before_the_caller_leaves(worker):
    begun, release, finished = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        release.wait()
        finished.append(True)

    call = asyncio.create_task(worker.run(work))
    await asyncio.to_thread(begun.wait)
    call.cancel()
    asyncio.get_running_loop().call_later(0.01, release.set)
    with pytest.raises(asyncio.CancelledError):
        await call
    assert finished


async def test_an_exception_reaches_the_caller_and_the_worker_lives_on(worker):
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 / 0)
    assert await worker.run(lambda: 5) == 5
