"""The twin runs the stages' own policies: what it says is checked against what follows from them by hand."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from mammoth_operator.tuning.calibration import overheads, written
from mammoth_operator.tuning.objective import Goal, Promise, score
from mammoth_operator.tuning.profile import Costs
from mammoth_operator.tuning.samples import Ask, percentile
from mammoth_operator.tuning.traces import Phase, arrivals
from mammoth_operator.tuning.trial import Asked, Written, replay
from mammoth_operator.tuning.twin import Plant, Setting, Twin

NO_HOP = Plant(hop_s=0.0)
GOAL = Goal("slo", (Promise("small", 8.0, 256 * 256), Promise("all", 20.0, 4 * 2**20)))
PICTURE = {"height_px": 256, "width_px": 256, "steps": 10}
AR_S = 272 * 0.0037 + 0.008  # 16 x 17 tokens and the prompt
DRAW_S = 10 * 0.0052 + 0.008


def asks(*times_s: float) -> list[Ask]:
    return [Ask(at_s, **PICTURE) for at_s in times_s]


def test_one_picture_takes_what_its_parts_take(profile):
    [sample] = replay(profile, Setting(wait_ms=0.0), asks(0.0), NO_HOP)
    assert sample.joined_s == 0.0
    assert sample.ready_s == pytest.approx(AR_S, rel=0.01)
    assert sample.latency_s == pytest.approx(AR_S + DRAW_S, rel=0.01)
    assert (sample.wave_size, sample.failed) == (1, False)


def test_an_idle_device_waits_for_company_until_arrivals_pause(profile):
    [waited] = replay(profile, Setting(wait_ms=100.0), asks(0.0), NO_HOP)
    assert waited.started_s - waited.ready_s == pytest.approx(0.020)  # a pause of a fifth of the wait


def test_two_that_are_ready_together_share_a_wave(profile):
    both = replay(profile, Setting(wait_ms=100.0), asks(0.0, 0.0, 5.0), NO_HOP)
    assert [sample.wave_size for sample in both] == [2, 2, 1]
    lone = replay(profile, Setting(wait_ms=0.0, dit_max_num_seqs=1), asks(0.0, 0.0), NO_HOP)
    assert [sample.wave_size for sample in lone] == [1, 1]


def test_a_full_cap_keeps_the_next_waiting(profile):
    one_by_one = replay(profile, Setting(ar_max_num_seqs=1, wait_ms=0.0), asks(0.0, 0.0), NO_HOP)
    joined = sorted(sample.joined_s for sample in one_by_one)
    assert joined[1] == pytest.approx(AR_S, rel=0.01)


def test_a_later_arrival_joins_at_the_next_step(profile):
    later = replay(profile, Setting(wait_ms=0.0), asks(0.0, 0.5), NO_HOP)
    second = max(later, key=lambda sample: sample.ask.at_s)
    assert 0.5 <= second.joined_s <= 0.5 + 0.0038


def test_rows_drawn_alone_leave_one_by_one(profile):
    alone = replace(profile, rows_alone=True)
    twin = Twin(alone, Setting(wait_ms=100.0), NO_HOP)
    ready = [replay(profile, Setting(wait_ms=0.0), asks(0.0), NO_HOP)[0] for _ in range(3)]
    twin.resume(ready)
    twin.run()
    ends = [sample.done_s for sample in twin.finished]
    assert ends == sorted(ends)
    wave_s = 10 * (8.2 + 15.8) / 2 / 1e3 + 3 * 0.008  # a wave of three lies between two and four
    assert ends[1] - ends[0] == pytest.approx(wave_s / 3)


LOADS = [Phase(300, 1.0, {512: 1.0, 256: 2.0}), Phase(300, 4.0, {256: 1.0})]
SETTINGS = [
    pytest.param(Setting(), False, id="defaults"),
    pytest.param(Setting(1, 1, 0.0, 2, 3), False, id="one at a time, several replicas"),
    pytest.param(Setting(4, 3, 100.0, 3, 2), False, id="small caps and a long wait"),
    pytest.param(Setting(32, 8, 20.0, 1, 2), True, id="rows drawn alone"),
]


@pytest.mark.parametrize(("setting", "alone"), SETTINGS)
class TestTrial:
    """Nothing changes on the way: what needs no clock must say what the clock says, to the last bit."""

    @pytest.fixture
    def world(self, profile, alone):
        return replace(profile, rows_alone=alone), Plant(before_s=0.1, after_s=0.2)

    @pytest.fixture
    def load(self):
        return [replace(ask, rows=1 + index % 2) for index, ask in enumerate(arrivals(LOADS, 7))]

    def test_both_stages_do_as_in_the_twin(self, world, setting, load):
        profile, plant = world
        twin = Twin(profile, setting, plant, start_s=load[0].at_s)
        twin.ask(load)
        twin.run()
        expected = sorted(twin.finished, key=lambda sample: sample.ask.at_s)
        found = replay(profile, setting, load, plant)
        assert [sample.done_s for sample in found] == sorted(sample.done_s for sample in found)
        assert sorted(found, key=lambda sample: sample.ask.at_s) == expected
        assert Asked(load, Costs(profile), GOAL, plant).score(setting) == score(expected, GOAL)

    def test_the_dit_stage_alone_does_as_in_the_twin(self, world, setting, load):
        profile, plant = world
        past = replay(profile, Setting(ar_replicas=3, dit_replicas=2), load, plant)[50:350]
        twin = Twin(profile, setting, plant, start_s=min(sample.started_s for sample in past))
        twin.resume(sorted(past, key=lambda sample: sample.ready_s))
        twin.run()
        assert Written(past, Costs(profile), GOAL, plant).score(setting) == score(twin.finished, GOAL)


def test_equal_inputs_give_equal_outputs(profile, small_load):
    times = [[sample.done_s for sample in replay(profile, Setting(), small_load)] for _ in range(2)]
    assert times[0] == times[1]


def test_every_picture_ends_and_none_before_it_could(profile, small_load):
    out = replay(profile, Setting(dit_max_num_seqs=4), small_load)
    assert len(out) == len(small_load)
    assert all(s.ask.at_s <= s.joined_s <= s.ready_s <= s.started_s <= s.done_s for s in out)


def test_a_new_replica_serves_after_its_start(profile):
    twin = Twin(profile, Setting(wait_ms=0.0, dit_max_num_seqs=1), Plant(start_s=60.0))
    twin.ask(arrivals([Phase(300, 4.4, {256: 1})], 1))
    twin.run(10.0)
    twin.change(replace(twin.setting, dit_replicas=2))
    assert twin.num_starting == 1
    twin.run(75.0)
    assert twin.num_starting == 0
    twin.run()
    assert {sample.replica for sample in twin.finished if sample.ask.at_s > 80.0} == {0, 1}
    assert {sample.replica for sample in twin.finished if sample.ask.at_s < 69.0} == {0}


def test_a_leaving_replica_finishes_what_it_has(profile, small_load):
    twin = Twin(profile, Setting(dit_replicas=2, ar_replicas=2), Plant())
    twin.ask(small_load)
    twin.run(100.0)
    twin.change(replace(twin.setting, dit_replicas=1, ar_replicas=1))
    twin.run()
    assert len(twin.finished) == len(small_load)
    assert twin.gpu_s < 4 * twin.now_s


def test_devices_are_counted_while_they_start_and_leave(profile):
    twin = Twin(profile, Setting(), Plant(start_s=50.0))
    twin.run(100.0)
    assert twin.gpu_s == pytest.approx(200.0)
    twin.change(replace(twin.setting, dit_replicas=2))
    twin.run(200.0)
    assert twin.gpu_s == pytest.approx(500.0)


def test_more_load_never_makes_the_tail_shorter(profile):
    tails = [
        percentile([s.latency_s for s in replay(profile, Setting(dit_max_num_seqs=1), arrivals([Phase(900, rate, {512: 1})], 3))], 0.95)
        for rate in (0.3, 0.8, 1.3)
    ]  # fmt: skip
    assert tails == sorted(tails)


def test_hours_pass_far_faster_than_on_a_clock(profile, small_load):
    began = time.process_time()
    replay(profile, Setting(), small_load)
    assert (small_load[-1].at_s - small_load[0].at_s) / (time.process_time() - began) > 20


def test_time_that_no_device_works_on_is_spent_too_and_can_be_measured(profile):
    around = Plant(hop_s=0.0, before_s=0.2, after_s=0.3)
    [sample] = replay(profile, Setting(wait_ms=0.0), asks(0.0), around)
    assert sample.joined_s == pytest.approx(0.2)
    assert sample.latency_s == pytest.approx(0.5 + AR_S + DRAW_S, rel=0.01)
    found = overheads([sample], NO_HOP)
    assert (found.before_s, found.after_s) == (pytest.approx(0.2), pytest.approx(0.3))


def test_the_ar_stage_is_made_as_slow_as_it_was_seen_to_be(profile):
    slow = replay(profile.scaled(1.0, 3.0), Setting(), asks(0.0, 10.0, 20.0), NO_HOP)
    known = written(profile, slow, Setting(), NO_HOP)
    assert known.ar_decode_ms[1][1] == pytest.approx(3 * 3.7, rel=0.02)
    assert known.dit_step_ms == profile.dit_step_ms
