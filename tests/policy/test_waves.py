"""When a wave starts and who is in it: a row per rule, and a row per conflict between rules."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mammoth_policy.waves import Policy, Run, Wait, plan

POLICY = Policy(max_num_seqs=4, max_wait_s=0.020)  # quiet after 4 ms
A, B = (512, 512, 50), (1024, 1024, 50)


@dataclass(frozen=True)
class Waiting:
    key: tuple[int, int, int]


def keys(text: str) -> list[Waiting]:
    return [Waiting(A if letter == "a" else B) for letter in text]


@pytest.mark.parametrize(
    ("queue", "now", "policy", "last_arrival_at", "began_at", "answer"),
    [
        pytest.param("", 1.0, POLICY, 0.0, 0.0, None, id="nothing waits"),
        pytest.param("a", 1.000, POLICY, 1.000, 1.0, 1.004, id="young and alone"),
        pytest.param("a", 1.004, POLICY, 1.000, 1.0, "a", id="arrivals have paused"),
        pytest.param("aaa", 1.009, POLICY, 1.008, 1.0, 1.012, id="arrivals go on"),
        pytest.param("aaa", 1.019, POLICY, 1.018, 1.0, 1.020, id="the deadline comes before the pause"),
        pytest.param("aaa", 1.020, POLICY, 1.019, 1.0, "aaa", id="the deadline has passed"),
        pytest.param("aaaa", 1.000, POLICY, 1.000, 1.0, "aaaa", id="full"),
        pytest.param("aaaaaa", 1.000, POLICY, 1.000, 1.0, "aaaa", id="more than full"),
        pytest.param("aaba", 1.000, POLICY, 1.000, 1.0, "aa", id="full of two keys: the head's go"),
        pytest.param("abaa", 2.000, POLICY, 1.000, 1.0, "a", id="nobody overtakes"),
        pytest.param("bbaa", 2.000, POLICY, 1.000, 1.0, "bb", id="the head picks the key"),
        pytest.param("aaaaab", 2.000, POLICY, 1.000, 1.0, "aaaa", id="a wave has a size"),
        pytest.param("aa", 5.000, POLICY, 1.000, 5.0, "aa", id="waited while the device was busy: no new arrival"),
        pytest.param("aa", 5.000, POLICY, 4.999, 5.0, 5.003, id="came just before the device was free"),
        pytest.param("aa", 1.000, Policy(4, 0.0), 1.000, 1.0, "aa", id="waiting is off"),
        pytest.param("aa", 1.000, Policy(1, 0.020), 1.000, 1.0, "a", id="one at a time never waits"),
        pytest.param("a", 1.049, Policy(4, 10.0), 1.000, 1.0, 1.050, id="a pause is at most 50 ms"),
        pytest.param("a", 1.050, Policy(4, 10.0), 1.000, 1.0, "a", id="a pause of 50 ms ends any wait"),
    ],
)
def test_a_wave_starts_when_waiting_cannot_pay(queue, now, policy, last_arrival_at, began_at, answer):
    waiting = keys(queue)
    decision = plan(waiting, now, policy, last_arrival_at=last_arrival_at, began_at=began_at)
    if isinstance(answer, str):
        assert decision == Run(waiting[: len(answer)])
        assert [job.key for job in decision.jobs] == [job.key for job in keys(answer)]
    else:
        assert isinstance(decision, Wait)
        assert decision.until == (answer if answer is None else pytest.approx(answer))


@pytest.mark.parametrize("limits", [(0, 0.02), (-1, 0.02), (8, -0.001), (8, float("inf")), (8, float("nan"))])
def test_impossible_limits_are_refused(limits):
    with pytest.raises(ValueError, match="max_"):
        Policy(*limits)


@pytest.mark.parametrize(("max_wait_s", "quiet_s"), [(0.020, 0.004), (0.0, 0.0), (0.25, 0.050), (1.0, 0.050)])
def test_a_pause_is_a_fifth_of_the_wait(max_wait_s, quiet_s):
    assert Policy(8, max_wait_s).quiet_s == pytest.approx(quiet_s)
