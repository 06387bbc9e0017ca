"""The device worker keeps the loop free, keeps calls in order, and never leaves one half done; a device is one that is there."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mammoth_serving.config import ConfigError
from mammoth_serving.device import DeviceWorker, check_device


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


@pytest.mark.parametrize(
    ("device", "num_gpus"),
    [("cpu", 0), ("cpu", 2), ("cuda", 1), ("cuda:0", 1), ("cuda:11", 12)],
    ids=["cpu", "cpu-beside-gpus", "the-only-gpu", "first-gpu", "twelfth-gpu"],
)
def test_a_device_of_this_machine_is_taken(device, num_gpus):
    check_device(device, num_gpus)


@pytest.mark.parametrize(
    ("device", "num_gpus", "allowed"),
    [
        pytest.param("banana", 4, "N from 0 to 3", id="no-device"),
        pytest.param("banana", 0, "it has no CUDA device", id="no-device-no-gpu"),
        pytest.param("", 4, "N from 0 to 3", id="empty"),
        pytest.param("CPU", 4, "N from 0 to 3", id="upper-case"),
        pytest.param("cuda", 0, "it has no CUDA device", id="no-gpu"),
        pytest.param("cuda:0", 0, "it has no CUDA device", id="no-first-gpu"),
        pytest.param("cuda:99", 1, "N from 0 to 0", id="one-gpu"),
        pytest.param("cuda:4", 4, "N from 0 to 3", id="one-too-far"),
        pytest.param("cuda:-1", 4, "N from 0 to 3", id="negative"),
        pytest.param("cuda:01", 4, "N from 0 to 3", id="leading-zero"),
        pytest.param("cuda:", 4, "N from 0 to 3", id="no-number"),
    ],
)
def test_any_other_device_is_refused_saying_what_there_is(device, num_gpus, allowed):
    with pytest.raises(ConfigError) as caught:
        check_device(device, num_gpus)
    assert str(caught.value) == f"--device: {device!r} is not cpu, cuda or cuda:N of this machine ({allowed})"
