"""What the device does next, and how long it takes, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from mammoth_policy.tokens import Action, Load, Work, plan, steps_until_done


@pytest.mark.parametrize(
    ("load", "limits", "action"),
    [
        pytest.param({}, (4, 4), "wait", id="nothing-to-do"),
        pytest.param({"waiting_rows": (1,)}, (4, 4), "admit", id="first-comer"),
        pytest.param({"waiting_rows": (1,), "rows_in_use": 3, "num_decoding": 3}, (4, 4), "admit", id="joins-while-others-run"),
        pytest.param({"waiting_rows": (1,), "rows_in_use": 4, "num_decoding": 4}, (4, 4), "decode", id="full"),
        pytest.param({"waiting_rows": (2,), "rows_in_use": 3, "num_decoding": 3}, (4, 4), "decode", id="guidance-counts-twice"),
        pytest.param({"waiting_rows": (2, 1), "rows_in_use": 3, "num_decoding": 3}, (4, 4), "decode", id="nobody-overtakes"),
        pytest.param({"waiting_rows": (1,), "rows_in_use": 2, "num_decoding": 2}, (2, 4), "decode", id="cap-below-capacity"),
        pytest.param({"waiting_rows": (1,), "rows_in_use": 4, "num_decoding": 4}, (8, 4), "decode", id="cap-above-capacity"),
        pytest.param({"waiting_rows": (2,)}, (1, 4), "admit", id="guided-alone-above-the-cap"),
        pytest.param({"waiting_rows": (2,), "rows_in_use": 1, "num_decoding": 1}, (1, 4), "decode", id="guided-waits-to-be-alone"),
        pytest.param({"rows_in_use": 1, "num_prefilling": 1}, (4, 4), "prefill", id="prefill"),
        pytest.param({"rows_in_use": 1, "num_prefilling": 1, "last": "prefill"}, (4, 4), "prefill", id="prefill-stalls-nobody"),
        pytest.param({"rows_in_use": 2, "num_prefilling": 1, "num_decoding": 1, "last": "prefill"}, (4, 4), "decode", id="decode-after-a-chunk"),
        pytest.param({"rows_in_use": 2, "num_prefilling": 1, "num_decoding": 1, "last": "decode"}, (4, 4), "prefill", id="chunk-after-a-decode"),
        pytest.param({"rows_in_use": 2, "num_prefilling": 1, "num_decoding": 1, "last": "admit"}, (4, 4), "prefill", id="chunk-after-joining"),
        pytest.param({"waiting_rows": (1,), "rows_in_use": 2, "num_prefilling": 2}, (4, 4), "admit", id="joining-costs-nothing"),
    ],
)  # fmt: skip
def test_the_next_action(load: dict[str, Any], limits: tuple[int, int], action: Action) -> None:
    assert plan(Load(**load), max_num_seqs=limits[0], num_slots=limits[1]) == action


def test_running_rows_wait_for_one_chunk_at_most() -> None:
    last: Action = "decode"
    actions = []
    for _ in range(6):
        last = plan(Load(rows_in_use=3, num_prefilling=2, num_decoding=1, last=last), max_num_seqs=4, num_slots=4)
        actions.append(last)
    assert actions == ["prefill", "decode"] * 3


@pytest.mark.parametrize(
    ("running", "waiting", "cap", "steps"),
    [
        pytest.param([], [(1, 20)], 4, 20, id="starts-now"),
        pytest.param([(1, 5), (1, 9)], [(1, 20)], 2, 25, id="waits-for-the-first-to-end"),
        pytest.param([(1, 5), (1, 9)], [(2, 20)], 2, 29, id="guided-waits-for-both"),
        pytest.param([(1, 5)], [(1, 30), (1, 20)], 1, 55, id="behind-another"),
        pytest.param([(1, 5)], [(1, 3), (1, 20)], 2, 23, id="the-short-one-ends-first"),
        pytest.param([], [(2, 7)], 1, 7, id="guided-above-the-cap"),
    ],
)
def test_steps_until_the_last_is_done(
    running: list[tuple[int, int]], waiting: list[tuple[int, int]], cap: int, steps: int
) -> None:
    works = [[Work(*pair) for pair in pairs] for pairs in (running, waiting)]
    assert steps_until_done(works[0], works[1], max_num_seqs=cap) == steps
