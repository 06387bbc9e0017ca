"""Which pictures step next: a row per rule and a row per conflict between rules."""

from __future__ import annotations

import random

import pytest

from mammoth_policy.steps import PATIENCE, Work, best_unit, due_at, next_rows

SMALL, LARGE = (256, 256), (1024, 1024)


def work(
    name: str, size=SMALL, *, left: float = 1.0, due: float = 10.0, deadline=None, begun=False
) -> tuple[str, Work]:
    return name, Work(size, left, due, deadline, begun)


def chosen(jobs: list[tuple[str, Work]], *, now: float = 0.0, capacity: int = 8, unit_sizes=None) -> str:
    names = {id(job): name for name, job in jobs}
    rows = next_rows([job for _, job in jobs], now, capacity=capacity, unit_sizes=unit_sizes or {})
    return "".join(names[id(job)] for job in rows)


@pytest.mark.parametrize(
    ("jobs", "options", "expected"),
    [
        pytest.param([], {}, "", id="nothing to do"),
        pytest.param([work("a")], {}, "a", id="one job"),
        pytest.param([work("a", due=5), work("b", due=4)], {}, "b", id="due earlier, whoever came first"),
        pytest.param(
            [work("a", due=5, begun=True), work("b", due=4)], {}, "b", id="a job due earlier goes before a begun one"
        ),
        pytest.param([work("a", due=5), work("b", due=5)], {}, "a", id="equally due: who came first"),
        pytest.param(
            [work("a", due=5), work("b", LARGE, due=4), work("c", due=6)], {}, "b", id="the earliest picks the size"
        ),
        pytest.param(
            [work("a"), work("b"), work("c", LARGE), work("d")],
            {"unit_sizes": {SMALL: 2}},
            "ab",
            id="a unit of one size",
        ),
        pytest.param(
            [work("a", due=9), work("b", LARGE, due=1), work("c", due=2)],
            {"unit_sizes": {SMALL: 4}},
            "b",
            id="another size has no company",
        ),
        pytest.param(
            [work("a", due=1), work("b", begun=True), work("c", begun=True)],
            {"capacity": 2, "unit_sizes": {SMALL: 4}},
            "bc",
            id="a full device steps what it holds",
        ),
        pytest.param(
            [work("a", due=1), work("b", due=2), work("c", due=3, begun=True)],
            {"capacity": 2, "unit_sizes": {SMALL: 4}},
            "ac",
            id="the last place goes to the most urgent",
        ),
        pytest.param(
            [work("a", due=2), work("b", due=5, left=3, deadline=5)],
            {"now": 0.0},
            "b",
            id="a deadline that waiting would break",
        ),
        pytest.param(
            [work("a", due=2), work("b", due=50, left=3, deadline=50)], {}, "a", id="a deadline that is far away"
        ),
        pytest.param(
            [work("a", due=9), work("b", due=1, left=3, deadline=1)],
            {},
            "a",
            id="a deadline that cannot be met any more",
        ),
    ],
)
def test_the_next_step(jobs, options, expected):
    assert chosen(jobs, **options) == expected


@pytest.mark.parametrize(
    ("deadline_at", "expected"),
    [(None, 10 + PATIENCE * 2), (12.0, 12.0), (1e6, 10 + PATIENCE * 2)],
    ids=["no deadline", "a near deadline", "a deadline later than patience"],
)
def test_when_a_job_is_due(deadline_at, expected):
    assert due_at(10.0, 2.0, deadline_at) == expected


@pytest.mark.parametrize(
    ("step_ms", "rows"),
    [
        pytest.param({}, 1, id="nothing measured"),
        pytest.param({1: 55.0, 2: 109.7, 4: 220.3, 8: 439.0}, 1, id="1024 px on an H200: nothing to gain"),
        pytest.param({1: 4.81, 2: 8.22, 4: 15.29, 8: 30.9}, 4, id="256 px on an H200"),
        pytest.param({1: 10.0, 2: 10.0, 4: 10.0, 8: 10.0}, 8, id="as good as free"),
        pytest.param({1: 10.0, 2: 19.9}, 1, id="too little to wait for"),
        pytest.param({1: 10.0, 8: 40.0}, 8, id="a gap in the table"),
    ],
)
def test_units_come_from_a_measured_table(step_ms, rows):
    assert best_unit(step_ms) == rows


def test_nobody_starves():
    """A stream of small pictures, as much as the device can take, cannot hold a large one back beyond its turn."""
    step_s = {SMALL: 0.01, LARGE: 0.1}
    large = [LARGE, 10, due_at(0.0, 1.0, None)]
    small: list[list] = []
    now, arrivals = 0.0, random.Random(3)
    while large[1]:
        if arrivals.random() < 0.99:
            small.append([SMALL, 1, due_at(now, 0.01, None)])
        jobs = [large, *small]
        works = [Work(size, left * step_s[size], due) for size, left, due in jobs]
        [row] = next_rows(works, now, capacity=10_000, unit_sizes={})
        job = jobs[works.index(row)]
        job[1] -= 1
        now += step_s[job[0]]
        small = [each for each in small if each[1]]
        assert now < large[2] + 1.0 + 0.1
