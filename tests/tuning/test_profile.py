"""What a profile holds, refuses, and says between its points."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from mammoth_operator.tuning.curves import Curve, fit_line
from mammoth_operator.tuning.profile import Costs, Profile, ProfileError


@pytest.mark.parametrize(
    ("points", "x", "y"),
    [
        pytest.param({1: 10.0, 3: 30.0}, 2, 20.0, id="between"),
        pytest.param({1: 10.0, 3: 30.0}, 1, 10.0, id="at a point"),
        pytest.param({1: 10.0, 3: 30.0, 5: 30.0}, 4, 30.0, id="flat"),
        pytest.param({1: 10.0, 3: 30.0}, 5, 50.0, id="beyond the last"),
        pytest.param({100: 10.0}, 200, 20.0, id="one point is proportional"),
        pytest.param({2: 10.0, 3: 9.0}, 1, 10.0, id="never more below the first than at it"),
        pytest.param({2: 1.0, 3: 9.0}, 1, 1e-6, id="never below the floor"),
    ],
)
def test_a_curve_is_straight_between_its_points(points, x, y):
    assert Curve(points)(x) == pytest.approx(y)


def test_the_line_through_waves_says_how_far_it_misses():
    a, b, miss = fit_line({1: 5.0, 2: 8.0, 4: 14.0})
    assert (a, b, miss) == (pytest.approx(3.0), pytest.approx(2.0), pytest.approx(0.0))
    assert fit_line({1: 5.0, 2: 8.0, 4: 20.0})[2] > 0.05


def test_a_profile_survives_its_config_map(profile):
    assert Profile.parse(json.dumps(profile.data())) == profile


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
@pytest.mark.parametrize("table", ["dit_step_ms", "ar_decode_ms", "dit_picture_ms", "ar_prefill_ms"])
def test_what_is_no_time_is_refused_by_name(profile, table, value):
    known = getattr(profile, table)
    key = next(iter(known))
    spoilt = {**known, key: {1: value} if isinstance(known[key], dict) else value}
    with pytest.raises(ProfileError, match=table):
        replace(profile, **{table: spoilt})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"hardware": 1}', "null", '{"hardware":"x","versions":"y","ditStepMs":{"wide":{}}}']
)
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(ProfileError):
        Profile.parse(text)


def test_nan_in_a_stored_profile_is_refused(profile):
    text = json.dumps(profile.data()).replace("12.4", "NaN")
    with pytest.raises(ProfileError, match="nan is no time"):
        Profile.parse(text)


def test_sizes_that_were_not_measured_go_by_their_pixels(profile):
    costs = Costs(profile)
    assert costs.step_s((256, 256), 1) == pytest.approx(0.0052)
    assert costs.step_s((384, 384), 1) == pytest.approx(
        (5.2 + (12.4 - 5.2) * (384**2 - 256**2) / (512**2 - 256**2)) / 1e3
    )
    assert costs.step_s((512, 512), 3) == pytest.approx((27.1 + 53.5) / 2 / 1e3)


def test_a_wave_costs_its_steps_together_and_its_pictures_one_by_one(profile):
    assert Costs(profile).wave_s((256, 256), 10, 4) == pytest.approx(10 * 0.0158 + 4 * 0.008)


def test_equal_hardware_and_versions_share_a_key(profile):
    assert profile.key == replace(profile, time="later", spread=0.1).key
    assert profile.key != replace(profile, versions="2").key
