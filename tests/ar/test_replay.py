"""When rows are streamed again: a table of errors, histories and answers."""

from __future__ import annotations

import pytest

from mammoth_ar.replay import History, replay_delay_s
from mammoth_wire.errors import (
    AlreadyRunning,
    Cancelled,
    ContractMismatch,
    DataLoss,
    DeadlineUnreachable,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    ShapeTooLarge,
    Unavailable,
)

REFUSED = InvalidRequest([("steps", "0")])


def delay_s(error, num_before=0, *, accepted=True, num_replicas=1, remaining_s=100.0, jitter=1.0):
    history = History()
    history.is_accepted = accepted
    for _ in range(num_before + 1):
        history.count(error)
    return replay_delay_s(error, history, num_replicas=num_replicas, remaining_s=remaining_s, jitter=jitter)


@pytest.mark.parametrize("kind", [AlreadyRunning, Cancelled, Overloaded, Unavailable])
def test_an_accepted_picture_outlives_whatever_a_replica_that_leaves_says(kind):
    assert delay_s(kind("x")) == 0.2
    assert delay_s(kind("x"), 50) == 5.0


@pytest.mark.parametrize("error", [REFUSED, ContractMismatch("x"), EngineFailed("x"), ShapeTooLarge("x")], ids=repr)
@pytest.mark.parametrize("accepted", [False, True])
def test_a_refusal_and_a_failure_of_the_picture_itself_are_passed_on(error, accepted):
    assert delay_s(error, accepted=accepted, num_replicas=3) is None


def test_damage_is_replayed_once():
    assert delay_s(DataLoss("x")) is not None
    assert delay_s(DataLoss("x"), 1) is None


@pytest.mark.parametrize("kind", [Overloaded, DeadlineUnreachable])
def test_before_acceptance_every_other_replica_is_asked_once_and_at_once(kind):
    assert delay_s(kind("x"), accepted=False) is None
    assert [delay_s(kind("x"), n, accepted=False, num_replicas=3) for n in range(3)] == [0.0, 0.0, None]


def test_before_acceptance_silence_is_met_with_a_few_tries_and_growing_pauses():
    tries = [delay_s(Unavailable("x"), n, accepted=False, num_replicas=2) for n in range(4)]
    assert tries == [0.0, 0.2, 0.4, None]


def test_no_replay_begins_that_the_deadline_would_end():
    assert delay_s(Unavailable("x"), 50, remaining_s=4.9) is None


def test_jitter_halves_a_pause_at_most():
    assert delay_s(Unavailable("x"), 50, jitter=0.0) == 2.5
