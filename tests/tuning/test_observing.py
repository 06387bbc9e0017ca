"""What pods tell of their pictures, on one clock; and what is measured of their hardware."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace

import pytest

from mammoth_operator.names import Key
from mammoth_operator.observed import Child
from mammoth_operator.podfacts import PodFacts
from mammoth_operator.reports import Load
from mammoth_operator.tuning.measuring import Profiler, profile_key
from mammoth_operator.tuning.observing import Observer, sample_of
from mammoth_operator.tuning.probing import Point, Probe, next_probe, probed, sizes_to_measure, square
from mammoth_operator.tuning.profile import ProfileError
from mammoth_wire.errors import Unavailable
from mammoth_wire.v1.control_pb2 import Served

KEY = Key("space", "demo")
NOW_S = 1_800_000_000.0


def pod(name: str, pool: str = "ar") -> Child:
    facts = PodFacts(pool, "abc", "10.0.0.1", True, False, "node", "", None, None)
    return Child("Pod", "space", name, name, 1, {}, pod=facts)


def picture(sequence: int, ago_s: float = 10.0, total_s: float = 5.0, **more) -> Served:
    fields = {
        "height": 512,
        "width": 512,
        "steps": 50,
        "rows": 1,
        "prompt_tokens": 20,
        "batch_size": 2,
        "ar_s": 3.0,
        "denoise_s": 1.0,
    }
    return Served(sequence=sequence, asked_ago_s=ago_s, total_s=total_s, **{**fields, **more})


def load(*pictures: Served, instance: str = "first", total: int | None = None) -> Load:
    newest = max((each.sequence for each in pictures), default=0)
    return Load(
        0, 0, 1, 8, None, True, instance=instance, served=pictures, served_total=newest if total is None else total
    )


class TestObserver:
    def test_places_pictures_on_our_clock(self):
        observed = Observer().take(KEY, [pod("a")], {"a": load(picture(1, ago_s=10.0, total_s=5.0))}, NOW_S)
        [sample] = observed.samples
        assert (sample.ask.at_s, sample.done_s, sample.latency_s) == (NOW_S - 10.0, NOW_S - 5.0, 5.0)
        assert sample.key == (512, 512, 50)

    def test_hears_of_each_picture_once(self):
        observer = Observer()
        told = load(picture(1), picture(2))
        observer.take(KEY, [pod("a")], {"a": told}, NOW_S)
        assert observer.take(KEY, [pod("a")], {"a": told}, NOW_S + 5).num_told == 2
        assert observer.after(KEY) == {"a": 2}

    def test_a_pod_that_restarted_counts_from_zero_and_loses_nothing(self):
        observer = Observer()
        observer.take(KEY, [pod("a")], {"a": load(picture(7), picture(8))}, NOW_S)
        observed = observer.take(
            KEY, [pod("a")], {"a": load(picture(1, ago_s=3.0, total_s=2.0), instance="second")}, NOW_S + 60
        )
        assert (observed.num_told, observed.num_lost) == (3, 0)
        assert observer.after(KEY) == {"a": 1}

    def test_counts_what_was_forgotten_before_it_was_asked_for(self):
        observer = Observer()
        observer.take(KEY, [pod("a")], {"a": load(picture(1))}, NOW_S)
        assert observer.take(KEY, [pod("a")], {"a": load(picture(5), picture(6))}, NOW_S + 5).num_lost == 3

    def test_pods_whose_clocks_differ_agree_in_lengths(self):
        """Two pods tell of pictures that ended at the same moment: what their own clocks say plays no part."""
        observed = Observer().take(KEY, [pod("a"), pod("b")], {"a": load(picture(1)), "b": load(picture(1))}, NOW_S)
        assert len({sample.done_s for sample in observed.samples}) == 1

    @pytest.mark.parametrize(
        "wrong",
        [
            pytest.param({"total_s": math.nan}, id="nan"),
            pytest.param({"ago_s": -3.0}, id="in the future"),
            pytest.param({"total_s": 50.0}, id="longer than it is ago"),
            pytest.param({"denoise_s": math.inf}, id="endless"),
            pytest.param({"ar_s": 30.0}, id="parts longer than the whole"),
            pytest.param({"height": 0}, id="no size"),
        ],
    )
    def test_what_cannot_be_is_left_out_and_said(self, wrong):
        observed = Observer().take(KEY, [pod("a")], {"a": load(picture(1, **wrong))}, NOW_S)
        assert observed.samples == ()
        assert observed.unusable.startswith("a tells of a picture")

    def test_says_how_much_is_new_since_settings_were_compared(self):
        observer = Observer()
        observer.take(KEY, [pod("a")], {"a": load(picture(1), picture(2))}, NOW_S)
        observer.weighed(KEY, NOW_S)
        observed = observer.take(KEY, [pod("a")], {"a": load(picture(3), total=3)}, NOW_S + 5)
        assert (observed.num_new, observed.weighed_s) == (1, NOW_S)
        observer.forget(KEY)
        assert observer.after(KEY) == {}

    def test_a_silent_pod_and_a_pod_that_tells_nothing_change_nothing(self):
        old = replace(load(), instance="")
        assert Observer().take(KEY, [pod("a"), pod("b")], {"b": old}, NOW_S).num_told == 0

    def test_failures_are_kept_apart(self):
        assert sample_of(picture(1, failed=True), NOW_S).failed


class TestProbing:
    def points(self, step_ms):
        """Measure everything, with `step_ms(probe)`."""
        points: dict[Probe, Point] = {}
        while (probe := next_probe(points, [(512, 512), (256, 256)], 8, 32)) is not None:
            points[probe] = step_ms(probe)
        return points

    def test_a_series_ends_when_larger_waves_gain_nothing(self):
        points = self.points(lambda probe: Point((10.0 * probe.batch_size,), 1.0))
        assert sorted(probe.batch_size for probe in points if probe.pool == "dit") == [1, 1, 2, 2]

    def test_a_series_goes_to_the_capacity_while_it_gains(self):
        points = self.points(lambda probe: Point((10.0,), 1.0))
        assert max(probe.batch_size for probe in points if probe.pool == "dit") == 8
        assert max(probe.batch_size for probe in points if probe.pool == "ar") == 32

    def test_a_wave_that_does_not_fit_ends_its_series(self):
        points = self.points(lambda probe: Point(refused="memory") if probe.batch_size == 4 else Point((10.0,), 1.0))
        profile = probed(points, "hw", "v", rows_alone=False, time="")
        assert set(profile.dit_step_ms[512, 512]) == {1, 2}

    def test_it_is_bounded(self):
        assert len(self.points(lambda probe: Point((10.0,), 1.0))) <= 64

    def test_nothing_measured_is_no_profile(self):
        with pytest.raises(ProfileError, match="empty"):
            probed(self.points(lambda probe: Point(refused="no")), "hw", "v", rows_alone=False, time="")

    def test_times_that_are_none_are_no_profile(self):
        with pytest.raises(ProfileError):
            probed(self.points(lambda probe: Point((math.nan,), 1.0)), "hw", "v", rows_alone=False, time="")

    def test_sizes_are_few_and_the_default_is_first(self):
        assert sizes_to_measure((64, 64), [(64, 64), (32, 32)]) == [(64, 64), (32, 32)]
        assert len(sizes_to_measure((16, 16), [(16 * n, 16) for n in range(2, 9)])) == 4
        assert square(1_000_000) == (992, 992)


class Pods:
    """Control of pods that measure themselves: `fails` times they are away."""

    def __init__(self, fails: int = 0) -> None:
        self.fails, self.asked = fails, 0

    async def profile(self, pod: Child, probe: Probe) -> Point:
        self.asked += 1
        if self.asked <= self.fails:
            raise Unavailable("away", retry_after_s=1.0)
        return Point((10.0,), 1.0)


class TestProfiler:
    AR = replace(load(), hardware="gpu", versions="1", capacity=4)
    DIT = replace(load(), hardware="gpu", versions="1", capacity=4, default_size=(256, 256))
    LOADS = {"a": AR, "d": DIT}
    PAIR = (pod("a"), pod("d", "dit"))

    async def settled(self, pods: Pods, stored=None) -> tuple:
        tasks, woken = [], []
        profiler = Profiler(pods, spawn=lambda work: tasks.append(asyncio.ensure_future(work)), wake=woken.append)
        first = profiler.of(KEY, self.PAIR, self.LOADS, stored or {}, [])
        await asyncio.gather(*tasks)
        return first, profiler.of(KEY, self.PAIR, self.LOADS, stored or {}, []), woken, tasks

    async def test_measures_once_and_keeps_it(self):
        first, then, woken, tasks = await self.settled(Pods())
        assert (first.profile, first.reason) == (None, "Profiling")
        assert then.profile is not None
        assert woken == [KEY]
        [text] = then.data.values()
        assert json.loads(text)["hardware"] == "AR gpu; DiT gpu"
        assert len(tasks) == 1

    async def test_a_restarted_operator_measures_nothing(self):
        _, then, _, _ = await self.settled(Pods())
        pods = Pods()
        _, again, _, tasks = await self.settled(pods, then.data)
        assert again.profile == then.profile
        assert (pods.asked, tasks) == (0, [])
        assert again.data == then.data

    async def test_other_versions_are_measured_anew(self):
        _, then, _, _ = await self.settled(Pods())
        raw = {key: text.replace('"AR 1; DiT 1', '"AR 0; DiT 0') for key, text in then.data.items()}
        _, again, _, tasks = await self.settled(Pods(), raw)
        assert len(tasks) == 1
        assert len(again.data) == 2 or set(again.data) == set(raw)

    async def test_nan_in_a_stored_profile_is_said_and_measured_anew(self):
        _, then, _, _ = await self.settled(Pods())
        spoilt = {key: text.replace("10.0", "NaN") for key, text in then.data.items()}
        first, again, _, _ = await self.settled(Pods(), spoilt)
        assert (first.profile, first.reason) == (None, "ProfileInvalid")
        assert "nan is no time" in first.message
        assert again.profile == then.profile

    async def test_pods_that_are_away_are_told_of(self):
        _, then, _, _ = await self.settled(Pods(fails=1))
        assert (then.profile, then.reason) == (None, "Profiling")
        assert "away" in then.message

    def test_pods_that_do_not_say_what_they_are_have_no_profile(self):
        profiler = Profiler(Pods(), spawn=lambda work: pytest.fail("measured"), wake=lambda key: None)
        assert profiler.of(KEY, None, {}, {}, []).profile is None
        mute = {"a": self.AR, "d": replace(self.DIT, default_size=None)}
        assert profiler.of(KEY, self.PAIR, mute, {}, []).reason == "ProfileMissing"

    def test_hardware_and_versions_make_the_key(self):
        assert profile_key(self.AR, self.DIT) != profile_key(self.AR, replace(self.DIT, versions="2"))
