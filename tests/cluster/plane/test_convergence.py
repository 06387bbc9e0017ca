"""An operator that dies at any write leaves something that the next one finishes: no duplicate, nothing left behind."""

from __future__ import annotations

import signal
import time

import pytest
from playing.api import eventually

STEPS = (1, 2, 3, 5, 8, 11, 12)


@pytest.fixture
def dying(make_operator, proxy):
    """Return a starter of an operator that is killed just before its n-th write from now on."""

    def start(number: int):
        operator = make_operator(f"dying-{number}-{time.monotonic_ns()}", config=proxy.config)
        base = proxy._writes

        def before(count: int) -> None:
            if count - base == number and operator.process is not None:
                operator.process.send_signal(signal.SIGKILL)

        proxy.before_write = before
        return operator.start(wait=False)

    return start


def dead(operator) -> None:
    assert operator.process is not None
    eventually(lambda: operator.process.poll() is not None, within_s=40, what="killed at its write")
    operator.process.wait()
    operator.process = None


@pytest.mark.parametrize("step", STEPS)
def test_killed_while_creating(dying, make_operator, pipeline, step):
    operator = dying(step)
    pipeline.create()
    dead(operator)
    make_operator("next").start()
    pipeline.ready(within_s=40)
    assert len(pipeline.children("Deployment")) == 2
    assert len(pipeline.children("ControllerRevision")) == 1


@pytest.mark.parametrize("step", STEPS)
def test_killed_while_rolling(dying, make_operator, pipeline, step):
    first = make_operator("first").start()
    pipeline.create().ready()
    old = pipeline.status["targetRevision"]
    time.sleep(1)
    assert first.stop() == 0
    operator = dying(step)
    pipeline.edit(dit={"image": "mammoth-dit:2"})
    dead(operator)
    assert pipeline.available("ar") >= 1
    assert pipeline.available("dit") >= 1
    make_operator("next").start()
    eventually(lambda: pipeline.status["targetRevision"] != old, within_s=40)
    pipeline.ready(within_s=40)
    eventually(lambda: len(pipeline.children("Deployment")) == 2)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_killed_while_deleting(dying, make_operator, pipeline, step):
    first = make_operator("first").start()
    pipeline.create().ready()
    eventually(lambda: pipeline.object["metadata"].get("finalizers"))
    time.sleep(1)
    assert first.stop() == 0
    operator = dying(step)
    pipeline.delete()
    dead(operator)
    make_operator("next").start()
    eventually(lambda: pipeline.object is None, within_s=40)
    eventually(lambda: not pipeline.children("Deployment") and not pipeline.pods())
