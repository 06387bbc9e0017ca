"""Times, guidance, noise and the loop, against arithmetic done by hand.

B rows, N steps.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mammoth_dit.sampling import Guidance, Schedule, denoise, euler_step, guide, guided_steps, initial_noise, step_times

CPU = torch.device("cpu")
ALWAYS = (0.0, 1.0)


def plan(guidances: list[Guidance], num_steps: int = 4, dtype: torch.dtype = torch.float64) -> Schedule:
    return Schedule.plan(step_times(num_steps, (512, 512)), guidances, dtype, CPU)


@pytest.mark.parametrize("num_steps", [1, 4, 50, 200])
@pytest.mark.parametrize("size_px", [None, (320, 320), (16, 16), (2048, 1024)])
def test_times_rise_from_noise_to_image(num_steps, size_px):
    times = step_times(num_steps, size_px)
    assert times.dtype == torch.float32
    assert len(times) == num_steps + 1
    assert (times[0], times[-1]) == (0.0, 1.0)
    assert (times.diff() > 0).all()


def test_large_pictures_start_with_small_steps():
    times = step_times(4, (1024, 1024))
    torch.testing.assert_close(times, torch.tensor([0, 0.0943, 0.2381, 0.4839, 1]), rtol=0, atol=5e-5)
    assert torch.equal(step_times(4, (320, 320)), step_times(4, None))


@pytest.mark.parametrize(
    ("scale", "cfg_range", "active"),
    [
        pytest.param(4.0, ALWAYS, [True] * 5, id="always"),
        pytest.param(4.0, (0.2, 0.6), [False, True, True, True, False], id="both ends included"),
        pytest.param(1.0, ALWAYS, [False] * 5, id="a scale of one"),
        pytest.param(0.0, ALWAYS, [False] * 5, id="a scale of nothing"),
        pytest.param(4.0, (1.0, 1.0), [False] * 5, id="after the last step"),
        pytest.param(1.0001, (0.0, 0.0), [True, False, False, False, False], id="barely, once"),
    ],
)
def test_guidance_is_known_before_the_first_step(scale, cfg_range, active):
    assert [row for [row] in guided_steps([Guidance(scale, cfg_range)], 5)] == active


def test_guidance_comes_back_after_a_step_without():
    assert [row for [row] in guided_steps([Guidance(5.0, (0.5, 1.0))], 4)] == [False, False, True, True]


def test_noise_is_a_matter_of_the_seed_alone():
    noise = initial_noise(7, 16, (64, 96), torch.float32)
    torch.manual_seed(1)
    assert torch.equal(noise, initial_noise(7, 16, (64, 96), torch.float32))
    assert noise.shape == (1, 16, 8, 12)
    assert not torch.equal(noise, initial_noise(8, 16, (64, 96), torch.float32))
    assert initial_noise(2**63 - 1, 4, (16, 16), torch.float32).isfinite().all()
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(initial_noise(7, 16, (64, 96), dtype), noise.to(dtype))


def test_guidance_is_not_rounded_to_the_models_dtype():
    u, c = torch.tensor([[[[1.0]]]]).bfloat16(), torch.tensor([[[[2.0]]]]).bfloat16()
    scale = Schedule.plan(step_times(2, None), [Guidance(7.3, ALWAYS)], torch.bfloat16, CPU).scale_B111
    assert scale.dtype == torch.float32
    assert guide(c, u, scale).item() == torch.tensor(1 + 7.3).bfloat16().item()


def test_a_step_rounds_its_length_and_its_product_like_the_weights():
    x, v = torch.tensor([0.5]).bfloat16(), torch.tensor([1.234375]).bfloat16()
    dt = torch.tensor(0.0943396)
    expected = (x.float() + (dt.bfloat16() * v).float()).bfloat16()
    assert torch.equal(euler_step(x, v, dt), expected)


def test_a_loop_is_the_sum_of_its_steps():
    schedule = plan([Guidance(3.0, (0.0, 0.5))])
    times = [*schedule.times_N.tolist(), 1.0]
    x = torch.full((1, 1, 1, 1), 0.25, dtype=torch.float64)
    out = denoise(x, schedule, lambda x, t: x + t[:, None, None, None], lambda x, t: -x)
    for step in range(4):
        c, u = x + times[step], -x
        v = u + 3.0 * (c - u) if step <= 2 else c
        x = x + float(schedule.dt_N[step]) * v
    torch.testing.assert_close(out, x, rtol=0, atol=1e-12)


def test_unguided_rows_take_the_conditional_velocity_bit_for_bit():
    schedule = plan([Guidance(3.0, ALWAYS), Guidance(1.0, ALWAYS)])
    x = torch.randn(2, 1, 2, 2, dtype=torch.float64)
    poisoned = denoise(x, schedule, lambda x, t: x, lambda x, t: torch.full_like(x, math.nan))
    alone = denoise(x[1:], plan([Guidance(1.0, ALWAYS)]), lambda x, t: x, lambda x, t: x)
    assert torch.equal(poisoned[1:], alone)
    assert poisoned[0].isnan().all()


@pytest.mark.parametrize(
    ("guidances", "passes"),
    [
        pytest.param([Guidance(1.0, ALWAYS)], ["c"] * 4, id="no guidance"),
        pytest.param([Guidance(4.0, ALWAYS)], ["c", "u"] * 4, id="guidance"),
        pytest.param([Guidance(4.0, (0.25, 0.5))], ["c", "c", "u", "c", "u", "c"], id="guidance in a range"),
        pytest.param(
            [Guidance(1.0, ALWAYS), Guidance(4.0, (0.5, 0.5))], ["c", "c", "c", "u", "c"], id="one row of two"
        ),
    ],
)
def test_passes_are_run_only_where_a_row_needs_them(guidances, passes):  # F13, without a step cache
    seen: list[str] = []

    def velocity(name: str):
        return lambda x, t: (seen.append(name), x)[1]

    x = torch.zeros(len(guidances), 1, 1, 1, dtype=torch.float64)
    denoise(x, plan(guidances), velocity("c"), velocity("u"))
    assert seen == passes


def test_a_loop_ends_where_its_host_says_so():
    asked: list[int] = []

    def before_step(step: int) -> bool:
        asked.append(step)
        return step < 2

    x = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    schedule = plan([Guidance(1.0, ALWAYS)])
    out = denoise(x, schedule, lambda x, t: torch.ones_like(x), lambda x, t: x, before_step)
    assert asked == [0, 1, 2]
    torch.testing.assert_close(out, x + schedule.times_N[2])


class Reads(TorchFunctionMode):
    """Counts calls that carry a tensor's values to the host."""

    NAMES = frozenset(
        {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy", "unique"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class HostReads(TorchDispatchMode):
    """The same, one layer down: what `item` and its kin become."""

    NAMES = ("aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal", "aten._to_cpu")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith(self.NAMES):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_counters_count():
    with Reads() as reads, HostReads() as host:
        if torch.ones(1).sum():
            torch.ones(3).nonzero()
        torch.ones(1).item()
    assert {"__bool__", "nonzero", "item"} <= set(reads.names)
    assert any("_local_scalar_dense" in name for name in host.names)


def test_nothing_in_the_loop_reads_a_tensor_back(tolerant):  # F3
    jobs = [
        tolerant.job("a", num_text=2),
        tolerant.job("b", num_text=7, guidance=1.0, seed=2),
        tolerant.job("c", cfg_range=(0.4, 0.6), num_negative=3, seed=3),
    ]
    group = tolerant.group([tolerant.prepare(job) for job in jobs])
    with Reads() as reads, HostReads() as host:
        out: Tensor = tolerant.denoise(group)
    assert out.isfinite().all()
    assert not reads.names
    assert not host.names
