"""Schedules, noise and policy tables against the recorded ones."""

from __future__ import annotations

import re

import pytest
import torch

from mammoth_dit.admission import Ask, Limits, admit
from mammoth_dit.jobs import groups
from mammoth_dit.model.config import RotaryConfig, TokenIds
from mammoth_dit.sampling import Guidance, Schedule, euler_step, guided_steps, initial_noise, step_times
from mammoth_wire.errors import InvalidRequest

pytestmark = pytest.mark.golden


def schedules(case):
    """Each (name, N, size in pixels) that the case records."""
    for row in case.facts["rows"]:
        yield f"{row['H']}x{row['W']}/n{row['N']}", row["N"], (row["H"], row["W"])


def test_times_shift_with_the_picture_and_round_once(scheduler_case):
    for name, num_steps, size_px in schedules(scheduler_case):
        times = step_times(num_steps, size_px)
        torch.testing.assert_close(times, scheduler_case.io[f"expected/{name}/timesteps"], rtol=0, atol=1e-6)
        schedule = Schedule.plan(times, [Guidance(4.0, (0.0, 1.0))], torch.bfloat16, torch.device("cpu"))
        assert torch.equal(schedule.times_N, scheduler_case.io[f"expected/{name}/timesteps_bf16"])


def test_unshifted_times_are_the_recorded_ones(scheduler_case):
    found = {key: value for key, value in scheduler_case.io.items() if "noshift" in key}
    assert found
    for key, expected in found.items():
        num_steps = int(re.search(r"n(\d+)", key.replace("noshift", "")).group(1))
        torch.testing.assert_close(step_times(num_steps, None)[: len(expected)], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_euler_step_rounds_as_recorded(scheduler_case, dtype):
    for name, num_steps, size_px in schedules(scheduler_case):
        expected = scheduler_case.io[f"expected/{name}/states_{str(dtype).removeprefix('torch.')}"]
        x = scheduler_case.io[f"inputs/{name}/x0"].to(dtype)
        dt_N = Schedule.plan(step_times(num_steps, size_px), [Guidance(1.0, (0.0, 1.0))], dtype, x.device).dt_N
        for step, velocity in enumerate(scheduler_case.io[f"inputs/{name}/velocities"]):
            x = euler_step(x, velocity.to(dtype), dt_N[step])
            torch.testing.assert_close(x, expected[step], rtol=0, atol=1e-5 if dtype == torch.float32 else 0)


def test_noise_is_exactly_the_recorded_one(noise_case):
    assert noise_case.io
    for key, expected in noise_case.io.items():
        seed, height, width, dtype = re.fullmatch(r"expected/seed(\d+)/(\d+)x(\d+)/(\w+)", key).groups()
        noise = initial_noise(int(seed), expected.shape[1], (int(height), int(width)), getattr(torch, dtype))
        assert torch.equal(noise, expected)
        assert noise.dtype == expected.dtype


def limits(case) -> Limits:
    """The case's model: everything else about it is out of the way."""
    return Limits(
        llm_width=case.facts["llm_hidden"],
        tokens=TokenIds(case.facts["gen_vocab_start_index"], frozenset()),
        rotary=RotaryConfig((2, 2, 2), (10000, 10000, 10000)),
        num_queries=8,
        side_multiple_px=16,
    )


def test_admission_decides_every_row_as_recorded(policy_case):
    for row in policy_case.facts["admission"]:
        request, expect = row["request"], row["expect"]
        answer: Ask | InvalidRequest
        try:
            answer = admit(request, limits(policy_case), synthetic=bool(request.get("dummy")))
        except InvalidRequest as err:
            answer = err
        assert isinstance(answer, Ask) == expect["admitted"], (row["name"], answer)
        if isinstance(answer, Ask):
            assert list(answer.params.key) == expect["key"], row["name"]
            assert answer.params.guidance == expect["text_guidance_scale"], row["name"]
            assert list(answer.params.cfg_range) == expect["cfg_range"], row["name"]


def test_grouping_keeps_the_first_seen_order(policy_case):
    for table in policy_case.facts["grouping"]:
        keys = [(row["height"], row["width"], row["num_inference_steps"]) for row in table["requests"]]
        assert groups(keys) == table["groups"]


def test_guidance_is_active_where_recorded(policy_case):
    for table in policy_case.facts["cfg_activity"]:
        guidances = [Guidance(row["text_guidance_scale"], tuple(row["cfg_range"])) for row in table["requests"]]
        assert guided_steps(guidances, table["num_steps"]) == table["active"]
        times = step_times(table["num_steps"], None)
        schedule = Schedule.plan(times, guidances, torch.float32, torch.device("cpu"))
        assert list(schedule.any_guided) == table["any_active"]
        assert list(schedule.all_guided) == table["all_active"]
        assert sum(schedule.any_guided) == table["uncond_forwards"]
