"""The tuner: what it finds by itself, what it takes back, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mammoth_operator.tuning.calibration import calibrated
from mammoth_operator.tuning.closed_loop import reversals, run_tuned
from mammoth_operator.tuning.objective import Goal, Promise, class_of, score
from mammoth_operator.tuning.records import Record
from mammoth_operator.tuning.samples import Ask, Sample, percentile
from mammoth_operator.tuning.traces import Phase, arrivals
from mammoth_operator.tuning.trial import replay
from mammoth_operator.tuning.tuner import Guard, Limits, Measured, is_due, tune
from mammoth_operator.tuning.twin import Setting

BAD_START = Setting(dit_max_num_seqs=8, wait_ms=100.0)


def p95(samples) -> float:
    return percentile([sample.latency_s for sample in samples], 0.95)


def seen(profile, setting, load) -> Measured:
    samples = replay(profile, setting, load)
    return Measured(max(sample.done_s for sample in samples), samples)


class TestFindsByItself:
    def test_that_a_saturated_device_draws_best_one_by_one(self, profile, medium_load):
        course = run_tuned(profile, medium_load, BAD_START)
        assert course.settings[-1][1].dit_max_num_seqs == 1
        assert len(course.records) < 10

    def test_that_small_pictures_want_a_batch(self, profile, small_load):
        course = run_tuned(profile, small_load, Setting(dit_max_num_seqs=1, wait_ms=0.0))
        assert course.settings[-1][1].dit_max_num_seqs > 1
        assert p95(course.samples) < 0.5 * p95(replay(profile, Setting(dit_max_num_seqs=1, wait_ms=0.0), small_load))

    def test_that_waiting_is_useless_when_nobody_comes(self, profile):
        lonely = arrivals([Phase(6000, 0.05, {256: 1})], seed=8)
        course = run_tuned(profile, lonely, BAD_START)
        assert course.settings[-1][1].wait_ms == 0.0

    def test_the_new_best_after_the_load_has_changed(self, profile):
        load = arrivals([Phase(1200, 4.4, {256: 1}), Phase(1200, 1.42, {512: 1})], seed=9)
        course = run_tuned(profile, load, Setting())
        before = [setting for at_s, setting in course.settings if at_s < 1200]
        assert before[-1].dit_max_num_seqs > 1
        assert course.settings[-1][1].dit_max_num_seqs == 1
        first_s = min(record.time_s for record in course.records if record.time_s > 1200)
        assert first_s - 1200 <= 3 * Guard().cooldown_s

    @pytest.mark.parametrize(("rows", "first"), [(1, 2), (2, 4)])
    def test_that_the_llm_may_write_more_at_once(self, profile, rows, first):
        """A guided picture joins with two rows: one row more would change nothing."""
        load = [replace(ask, rows=rows) for ask in arrivals([Phase(300, 1.2, {256: 1})], seed=10)]
        start = Setting(ar_max_num_seqs=rows, dit_max_num_seqs=1, wait_ms=0.0)
        answer = tune(seen(profile, start, load), start, Limits(), profile)
        assert answer.record is not None
        assert (answer.record.knob, answer.record.new) == ("arMaxNumSeqs", first)


def test_steady_load_is_left_alone(profile, medium_load):
    course = run_tuned(profile, medium_load, Setting(dit_max_num_seqs=1, wait_ms=0.0))
    assert course.records == []


def test_knobs_do_not_swing_at_steady_load(profile, small_load):
    course = run_tuned(profile, small_load, BAD_START)
    assert reversals(course.records, 600.0) <= 2


@pytest.mark.parametrize(
    ("records", "turns"),
    [
        pytest.param([], 0, id="none"),
        pytest.param([(0, 8, 4), (120, 4, 2)], 0, id="on and on"),
        pytest.param([(0, 8, 4), (120, 4, 5), (240, 5, 4)], 2, id="there and back and there"),
        pytest.param([(0, 8, 4), (120, 4, 5), (900, 5, 4)], 1, id="long apart"),
    ],
)
def test_turns_are_counted_by_knob(records, turns):
    made = [Record(at_s, "ditMaxNumSeqs", old, new, "", "", 1.0, 1.0) for at_s, old, new in records]
    assert reversals(made, 600.0) == turns


class TestWrongProfile:
    def test_halved_times_are_noticed_and_measured_ones_used(self, profile, medium_load):
        course = run_tuned(profile, medium_load, Setting(), believed=profile.scaled(0.5, 0.5))
        assert course.doubts
        assert course.doubts[0][0] <= 2 * Guard().cooldown_s
        assert "2.00 times" in course.doubts[0][1]
        assert p95(course.samples) <= 1.1 * p95(run_tuned(profile, medium_load, Setting()).samples)

    def test_a_change_that_did_not_help_is_taken_back_and_not_tried_again(self, profile, medium_load):
        """Waves are believed to take half of what they do; one picture at a time never shows it."""
        tables = {
            size: {n: ms if n == 1 else ms / 2 for n, ms in table.items()}
            for size, table in profile.dit_step_ms.items()
        }
        course = run_tuned(
            profile,
            medium_load,
            Setting(dit_max_num_seqs=1, wait_ms=0.0),
            believed=replace(profile, dit_step_ms=tables),
        )
        tempted = [record for record in course.records if record.knob == "ditMaxNumSeqs" and record.outcome != "revert"]
        back = [record for record in course.records if record.outcome == "revert" or record.new < record.old]
        assert tempted
        assert back
        assert course.settings[-1][1].dit_max_num_seqs == 1

    def test_calibration_replaces_what_was_seen_and_scales_the_rest(self, profile, medium_load):
        samples = replay(profile, Setting(dit_max_num_seqs=1), medium_load[:50])
        known = calibrated(profile.scaled(0.5, 0.5), samples)
        assert known.error == pytest.approx(2.0)
        assert known.profile.dit_step_ms[512, 512][1] == pytest.approx(12.4)
        assert known.profile.dit_step_ms[512, 512][8] == pytest.approx(103.0)
        assert known.profile.dit_step_ms[256, 256][1] == pytest.approx(5.2)
        assert calibrated(profile, samples).doubt == ""
        assert calibrated(profile, []).profile == profile


class TestHolds:
    def test_without_enough_pictures(self, profile, medium_load):
        answer = tune(seen(profile, Setting(), medium_load[:29]), Setting(), Limits(), profile)
        assert (answer.reason, answer.record, answer.weighed) == ("NotEnoughData", None, False)

    def test_soon_after_a_change(self, profile, medium_load):
        measured = seen(profile, Setting(), medium_load[:200])
        record = Record(measured.now_s - 60.0, "ditMaxNumSeqs", 4, 8, "", "", 1.0, 1.0)
        answer = tune(measured, Setting(), Limits(), profile, [record])
        assert (answer.reason, answer.history) == ("Cooldown", (record,))

    def test_until_enough_new_pictures_have_come(self):
        assert is_due(100.0, 0.0, 30, Guard())
        assert not is_due(100.0, 90.0, 30, Guard())
        assert not is_due(100.0, 0.0, 29, Guard())


class TestStaysWithin:
    def test_the_limits(self, profile, small_load, medium_load):
        narrow = Limits(dit=(3, 5), wait_ms=(10.0, 50.0))
        for load in (small_load, medium_load):
            course = run_tuned(profile, load, Setting(dit_max_num_seqs=5, wait_ms=50.0), limits=narrow)
            assert all(3 <= setting.dit_max_num_seqs <= 5 for _, setting in course.settings)
            assert all(10.0 <= setting.wait_ms <= 50.0 for _, setting in course.settings)

    def test_one_knob_and_one_step_up_at_a_time(self, profile, small_load):
        course = run_tuned(profile, small_load, Setting(dit_max_num_seqs=1, wait_ms=0.0))
        for (_, before), (_, after) in zip(course.settings, course.settings[1:], strict=False):
            changed = (before.dit_max_num_seqs != after.dit_max_num_seqs) + (before.wait_ms != after.wait_ms)
            assert changed + (before.ar_max_num_seqs != after.ar_max_num_seqs) == 1
            assert after.dit_max_num_seqs <= before.dit_max_num_seqs + 1

    def test_limits_that_exclude_everything_are_refused(self):
        with pytest.raises(ValueError, match="ditMaxNumSeqs: no value from 5 to 3"):
            Limits(dit=(5, 3))


def test_a_reverted_value_is_barred_for_an_hour(profile, medium_load):
    measured = seen(profile, Setting(), medium_load[:300])
    free = tune(measured, Setting(), Limits(), profile)
    assert free.record is not None
    barred = replace(free.record, outcome="reverted", time_s=measured.now_s - 600.0)
    back = replace(barred, old=barred.new, new=barred.old, outcome="kept")
    later = tune(measured, Setting(), Limits(), profile, [barred, back], guard=Guard(min_samples=5))
    assert later.record is None or later.record.new != free.record.new
    long_ago = [replace(barred, time_s=-9000.0), replace(back, time_s=-9000.0)]
    assert tune(measured, Setting(), Limits(), profile, long_ago).record == replace(free.record, time_s=measured.now_s)


def test_a_decision_carries_its_evidence(profile, medium_load):
    record = tune(seen(profile, Setting(), medium_load[:300]), Setting(), Limits(), profile).record
    assert record is not None
    assert "160 pictures drawn again" in record.evidence
    assert "Instead, " in record.evidence
    assert record.p95_expected_s < record.p95_before_s


def test_a_record_survives_status():
    record = Record(
        1_800_000_000.0, "requestBatchMaxWaitMs", 20.0, 0.0, "WaitingDoesNotPay", "x" * 900, 3.0004, 2.5, "kept", 2.4
    )
    known = Record.parse(record.status())
    assert (known.time_s, known.knob, known.new, known.outcome, known.p95_after_s) == (
        1_800_000_000.0,
        "requestBatchMaxWaitMs",
        0.0,
        "kept",
        2.4,
    )
    assert len(known.evidence) == 512


class TestObjective:
    PROMISES = (Promise("large", 20.0, 1024 * 1024), Promise("small", 5.0, 512 * 512))

    @pytest.mark.parametrize(
        ("side", "steps", "name"),
        [(256, 50, "small"), (512, 50, "small"), (768, 50, "large"), (2048, 50, "none"), (512, 201, "none")],
    )
    def test_a_picture_falls_under_the_smallest_class_it_fits(self, side, steps, name):
        assert class_of(Ask(0.0, side, side, steps), self.PROMISES) == name

    def test_the_worst_class_counts(self):
        samples = [
            Sample(Ask(0.0, 512, 512, 50), done_s=10.0),
            Sample(Ask(0.0, 1024, 1024, 50), done_s=10.0),
        ]
        found = score(samples, Goal("slo", self.PROMISES))
        assert found.miss == pytest.approx(1.0)
        assert dict(found.class_p95_s) == {"large": 10.0, "small": 10.0}

    def test_throughput_comes_first_where_it_is_the_goal(self):
        fast, slow = (score([Sample(Ask(0.0, 512, 512, 50), done_s=t)] * 4, Goal("throughput")) for t in (1.0, 2.0))
        assert fast.gain_over(slow, "throughput") == pytest.approx(1.0)
