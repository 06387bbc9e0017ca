"""What tuning means for one deployment: holds, modes, edits, and the whole decision of the operator around it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from mammoth_operator.limits import Caps
from mammoth_operator.spec import Freeze, Tuning, parse
from mammoth_operator.tuning.capacity import capacity_of
from mammoth_operator.tuning.deciding import reverted
from mammoth_operator.tuning.objective import Promise
from mammoth_operator.tuning.profile import NO_PROFILE, Profile, Profiled
from mammoth_operator.tuning.samples import Ask, Observed, Sample
from mammoth_operator.tuning.slo import burning, promises_of, result_of
from mammoth_operator.tuning.standing import Standing, bounds_problem, frozen_until, refusal
from mammoth_operator.tuning.trial import replay
from mammoth_operator.tuning.twin import Plant, Setting
from mammoth_operator.tuning.verdict import reach, verdict

NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)
BASE = Caps(32, 8, 20.0)
CAPACITY = Caps(32, 8, 0.0)


def tuning(**more) -> Tuning:
    spec = {
        "model": {"source": {"path": "/m"}},
        "ar": {"image": "ar:1", "replicas": 1},
        "dit": {"image": "dit:1", "replicas": 1},
        "tuning": {"mode": "Auto", "objective": "throughput", **more},
    }
    return parse(spec).tuning


@pytest.fixture
def profile(profile) -> Profile:
    """A device on which a larger wave of medium pictures costs far more than its pictures one by one."""
    return replace(profile, dit_step_ms={**profile.dit_step_ms, (512, 512): {1: 12.4, 2: 28.0, 4: 60.0, 8: 130.0}})


@pytest.fixture
def observed(profile, medium_load) -> Observed:
    """Pictures that ended before NOW, drawn with the defaults."""
    samples = replay(profile, Setting(), medium_load[:200])
    shift_s = NOW.timestamp() - max(sample.done_s for sample in samples)
    moved = [
        replace(sample, ask=replace(sample.ask, at_s=sample.ask.at_s + shift_s), joined_s=sample.joined_s + shift_s,
                ready_s=sample.ready_s + shift_s, started_s=sample.started_s + shift_s, done_s=sample.done_s + shift_s)
        for sample in samples
    ]  # fmt: skip
    return Observed(samples=tuple(moved), num_told=200, num_new=200)


@pytest.fixture
def standing(profile, observed) -> Standing:
    """Nothing speaks against acting."""
    return Standing(tuning(), Profiled(profile, "", ""), observed, num_ready=2)


def decided(standing: Standing, previous=None, base: Caps = BASE, now: datetime = NOW):
    there = reach(standing.tuning, CAPACITY, base, base)
    return verdict(replace(standing, bounds=there.problem), previous or {}, base, there, Setting(), Plant(), now)


class TestHolds:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            pytest.param({"tuning": tuning(mode="Off")}, "Off", id="off"),
            pytest.param({"paused": True}, "Frozen", id="paused"),
            pytest.param({"rolling": "ar 1/2"}, "Frozen", id="rollout"),
            pytest.param({"old": ["a"]}, "Frozen", id="a pod of an old revision"),
            pytest.param({"num_ready": 0}, "NotEnoughData", id="no pods"),
            pytest.param({"silent": ["a"]}, "PodSilent", id="one pod silent"),
            pytest.param({"unacked": ["a"]}, "AckMissing", id="unconfirmed"),
            pytest.param({"batching": "step"}, "StepBatching", id="step batching"),
            pytest.param({"profiled": NO_PROFILE}, "ProfileMissing", id="no profile"),
            pytest.param(
                {"profiled": Profiled(None, "ProfileInvalid", "nan")}, "ProfileInvalid", id="nan in the profile"
            ),
            pytest.param({"observed": Observed()}, "NotEnoughData", id="no metrics"),
            pytest.param(
                {"observed": Observed(unusable="a tells nonsense")}, "MeasurementsUnusable", id="clocks that differ"
            ),
            pytest.param(
                {"tuning": tuning(bounds={"ditMaxNumSeqs": {"min": 2.2, "max": 2.8}})},
                "BoundsExcludeEverything",
                id="bounds",
            ),
            pytest.param(
                {"tuning": tuning(guard={"freezeWindows": [{"start": "11:00", "end": "13:00"}]})},
                "Frozen",
                id="freeze window",
            ),
        ],
    )
    def test_say_why_and_change_nothing(self, standing, change, reason):
        found = decided(replace(standing, **change))
        assert (found.condition[0], found.condition[1]) == ("False", reason)
        assert found.condition[2]
        assert (found.caps, found.events, found.weighed) == (BASE, (), False)

    def test_a_profile_of_last_month_is_too_old(self, standing, profile):
        old = replace(standing, profiled=Profiled(replace(profile, time="2026-11-01T00:00:00Z"), "", ""))
        assert decided(old).condition[1] == "ProfileOld"

    def test_too_few_pictures(self, standing, observed):
        few = replace(standing, observed=replace(observed, samples=observed.samples[:20]))
        assert decided(few).condition[:2] == ("False", "NotEnoughData")

    def test_tuned_caps_stay_in_force_while_it_holds(self, standing):
        first = decided(standing)
        held = decided(replace(standing, rolling="dit 0/1"), first.status)
        assert held.caps == first.caps != BASE
        assert held.status["history"] == first.status["history"]

    def test_the_first_rule_that_forbids_speaks(self, standing):
        assert refusal(replace(standing, tuning=tuning(mode="Off"), paused=True, silent=["a"]), NOW) == (
            "Off",
            "spec.tuning.mode is Off",
        )


class TestModes:
    def test_auto_puts_a_change_in_force_and_tells(self, standing):
        found = decided(standing)
        assert found.caps == replace(BASE, dit_max_num_seqs=1)
        assert found.condition[:2] == ("True", "Tuned")
        [event] = found.events
        assert (event.reason, event.warning) == ("TuningApplied", False)
        assert "ditMaxNumSeqs 8 to 1" in event.message
        assert found.status["lastDecision"]["outcome"] == "pending"
        assert found.weighed

    def test_recommend_changes_nothing(self, standing):
        found = decided(replace(standing, tuning=tuning(mode="Recommend")))
        assert (found.caps, found.events) == (BASE, ())
        assert found.condition[:2] == ("True", "Recommends")
        assert found.status["recommended"]["ditMaxNumSeqs"] == 1
        assert found.status["lastDecision"]["outcome"] == "recommended"

    def test_the_same_recommendation_is_kept_once(self, standing):
        advised = replace(standing, tuning=tuning(mode="Recommend"))
        first = decided(advised)
        assert len(decided(advised, first.status).status["history"]) == 1

    def test_an_edit_of_the_spec_replaces_the_tuners_caps(self, standing):
        first = decided(standing)
        edited = replace(BASE, dit_max_num_seqs=4)
        held = decided(replace(standing, rolling="x"), first.status, base=edited)
        assert held.caps == edited
        assert held.status["history"][-1]["outcome"] == "kept"

    def test_leaving_auto_takes_the_tuners_caps_away(self, standing):
        first = decided(standing)
        assert decided(replace(standing, tuning=tuning(mode="Off")), first.status).caps == BASE

    def test_narrower_bounds_pull_the_tuners_caps_in(self, standing):
        first = decided(standing)
        narrow = replace(standing, tuning=tuning(bounds={"ditMaxNumSeqs": {"min": 3, "max": 6}}), rolling="x")
        assert decided(narrow, first.status).caps.dit_max_num_seqs == 3

    def test_a_ceiling_that_memory_taught_bounds_the_search(self):
        there = reach(tuning(), CAPACITY, replace(BASE, dit_max_num_seqs=2), BASE)
        assert there.limits is not None
        assert there.limits.dit == (1, 2)

    def test_a_restarted_operator_goes_on_from_status(self, standing):
        first = decided(standing)
        later = NOW + timedelta(seconds=30)
        again = decided(standing, first.status, now=later)
        assert again.caps == first.caps
        assert again.condition[1] == "Cooldown"

    def test_what_did_not_help_is_taken_back_with_a_warning(self, standing, observed):
        """The cap was raised to 8, and pictures took longer than the cap before it would have made of them."""
        since = min(sample.started_s for sample in observed.samples) - 1.0
        pending = {
            "time": datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "knob": "ditMaxNumSeqs", "from": 1, "to": 8,
            "reason": "MoreAtOncePays", "evidence": "", "p95Before": 1.0, "p95Expected": 0.9, "outcome": "pending",
        }  # fmt: skip
        previous = {"asked": BASE.status(), "tuned": BASE.status(), "history": [pending]}
        found = decided(standing, previous)
        assert found.caps.dit_max_num_seqs == 1
        [event] = found.events
        assert (event.reason, event.warning, found.action) == ("TuningReverted", True, "revert")
        assert [item["outcome"] for item in found.status["history"]] == ["reverted", "revert"]


@pytest.mark.parametrize(
    ("start", "end", "clock", "until"),
    [
        ("11:00", "13:00", "12:00", "13:00"),
        ("11:00", "13:00", "13:00", None),
        ("22:00", "02:00", "23:00", "02:00"),
        ("22:00", "02:00", "01:00", "02:00"),
        ("22:00", "02:00", "12:00", None),
    ],
)
def test_freeze_windows_may_pass_midnight(start, end, clock, until):
    hour, minute = clock.split(":")
    found = frozen_until([Freeze(start=start, end=end)], NOW.replace(hour=int(hour), minute=int(minute)))
    assert (found and f"{found:%H:%M}") == until


@pytest.mark.parametrize(
    ("low", "high", "capacity", "empty"),
    [(1, 8, 8, False), (2.2, 2.8, 8, True), (4, 8, 2, True), (0, 0, 8, True), (0, 1, 8, False)],
)
def test_bounds_without_a_whole_number_exclude_everything(low, high, capacity, empty):
    assert bool(bounds_problem(low, high, "knob", capacity)) == empty


class TestCapacity:
    PROMISES = (Promise("small", 5.0, 256 * 256), Promise("medium", 20.0, 512 * 512))

    def test_is_known_before_the_first_request(self, profile):
        found = capacity_of(profile, (512, 512), self.PROMISES, Setting(dit_max_num_seqs=1, wait_ms=0.0))
        assert found["imagesPerHour"] == pytest.approx(3600 / (50 * 0.0124 + 0.024), rel=0.01)
        small, medium = found["p95Seconds"]
        assert (small["name"], medium["name"]) == ("small", "medium")
        assert 1.0 < small["seconds"] < medium["seconds"] < 20.0

    def test_grows_with_the_replicas_of_the_pool_that_is_short(self, profile):
        one, two = (capacity_of(profile, (512, 512), (), Setting(dit_replicas=n))["imagesPerHour"] for n in (1, 2))
        assert two == pytest.approx(2 * one, rel=0.01)

    def test_says_how_well_a_line_describes_the_waves(self, profile):
        waves = capacity_of(profile, (512, 512), (), Setting())["waves"]
        assert [line["size"] for line in waves] == ["256x256", "512x512"]
        small = waves[0]
        for count, ms in profile.dit_step_ms[256, 256].items():
            line_ms = small["fixedMs"] + count * small["pictureMs"]
            assert abs(line_ms / ms - 1) <= small["missPercent"] / 100 + 1e-3
        assert 0 < small["missPercent"] < 20

    def test_promises_are_kept_late_or_failed(self):
        promises = promises_of({"tuning": {"sloClasses": [{"name": "s", "p95Seconds": 5, "maxPixels": 65536}]}})
        ask = Ask(0.0, 256, 256, 50)
        results = [
            Sample(ask, done_s=4.0),
            Sample(ask, done_s=6.0),
            Sample(ask, done_s=4.0, failed=True),
            Sample(Ask(0.0, 512, 512, 50), done_s=1.0),
        ]
        assert [result_of(each, promises) for each in results] == [("s", "kept"), ("s", "late"), ("s", "failed"), None]


class TestBurning:
    PROMISES = (Promise("small", 5.0, 256 * 256), Promise("large", 20.0, 512 * 512))

    def pictures(self, latency_s: float, num: int, ended_ago_s: float, side: int = 256, failed: bool = False):
        now_s = NOW.timestamp()
        return [
            Sample(Ask(now_s - ended_ago_s - latency_s, side, side, 50), done_s=now_s - ended_ago_s, failed=failed)
            for _ in range(num)
        ]

    @pytest.mark.parametrize(
        ("pictures", "burns"),
        [
            pytest.param([(9.0, 30, 100.0)], True, id="late for an hour and still"),
            pytest.param([(1.0, 30, 100.0, 256, True)], True, id="failed ones count"),
            pytest.param([(9.0, 30, 1000.0), (1.0, 10, 100.0)], False, id="it is over"),
            pytest.param([(1.0, 90, 1000.0), (9.0, 10, 100.0)], False, id="a few minutes are no hour"),
            pytest.param([(9.0, 19, 100.0)], False, id="too few to tell"),
            pytest.param([(9.0, 40, 4000.0)], False, id="long ago"),
            pytest.param([(9.0, 10, 100.0), (1.0, 30, 100.0)], False, id="fewer than the alert's share"),
            pytest.param([(9.0, 30, 100.0, 512)], False, id="another class allows it"),
        ],
    )
    def test_names_a_promise_that_is_missed_by_far(self, pictures, burns):
        samples = [sample for each in pictures for sample in self.pictures(*each)]
        said = burning(samples, self.PROMISES, NOW.timestamp())
        assert bool(said) == burns
        assert said.startswith("small: " if burns else "")

    def test_names_the_worst_of_two(self):
        samples = self.pictures(9.0, 20, 10.0) + self.pictures(1.0, 20, 10.0) + self.pictures(99.0, 40, 10.0, 512)
        assert burning(samples, self.PROMISES, NOW.timestamp()).startswith("large: 40 of 40 ")


@pytest.mark.parametrize(
    ("outcome", "ago", "told"),
    [
        ("revert", timedelta(minutes=5), True),
        ("revert", timedelta(hours=2), False),
        ("kept", timedelta(minutes=5), False),
    ],
)
def test_a_change_that_was_taken_back_is_told_until_it_is_known_to_have_helped(outcome, ago, told):
    last = {
        "time": f"{NOW - ago:%Y-%m-%dT%H:%M:%SZ}",
        "knob": "ditMaxNumSeqs",
        "to": 1,
        "outcome": outcome,
        "evidence": "p95",
    }
    assert reverted({"lastDecision": last}, NOW) == ("ditMaxNumSeqs is back at 1: p95" if told else "")
    assert reverted({}, NOW) == ""
