"""How many replicas: the fewest that keep the promises, within the budget, without flapping; and what status says of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from mammoth_operator.spec import parse
from mammoth_operator.tuning.closed_loop import run_planned
from mammoth_operator.tuning.objective import Goal, Promise, score
from mammoth_operator.tuning.planner import Budget, Known, Replicas, capacity_per_s, needed, next_replicas
from mammoth_operator.tuning.profile import Costs
from mammoth_operator.tuning.samples import Observed, Sample
from mammoth_operator.tuning.sizing import budget_of, planned, sized
from mammoth_operator.tuning.traces import Phase, arrivals
from mammoth_operator.tuning.trial import replay
from mammoth_operator.tuning.twin import Plant, Setting

GOAL = Goal("slo", (Promise("all", 12.0, 4 * 2**20),))
SETTING = Setting(dit_max_num_seqs=1, wait_ms=0.0)
NOW = datetime(2026, 12, 1, 12, 0, tzinfo=UTC)
LOADS = {1: 1.0, 2: 2.2, 4: 5.0}  # DiT replicas that a rate of medium pictures needs


def load(per_s: float, seconds: float = 300.0, seed: int = 3):
    return arrivals([Phase(seconds, per_s, {512: 1})], seed)


class TestNeeded:
    @pytest.mark.parametrize(("num_dits", "per_s"), LOADS.items())
    def test_is_what_an_exhaustive_search_finds(self, profile, num_dits, per_s):
        asks = load(per_s)[-300:]
        found = needed(Costs(profile), asks, SETTING, GOAL, Budget())
        assert (found.replicas, found.kept) == (Replicas(1, num_dits), True)
        for fewer in range(1, num_dits):
            assert score(replay(profile, replace(SETTING, dit_replicas=fewer), asks), GOAL).miss > 0

    def test_never_goes_beyond_the_budget(self, profile):
        found = needed(Costs(profile), load(5.0), SETTING, GOAL, Budget(devices=3))
        assert found.replicas.total <= 3
        assert not found.kept

    def test_stays_within_the_bounds_of_each_pool(self, profile):
        assert needed(Costs(profile), load(0.2), SETTING, GOAL, Budget(ar=(2, 4), dit=(3, 4))).replicas == Replicas(
            2, 3
        )

    def test_the_ratio_of_the_pools_follows_the_rows_of_the_llm(self, profile):
        """One row at a time, the LLM is what is short; thirty-two at a time, the DiT is."""
        asks = load(1.3)
        few = needed(Costs(profile), asks, replace(SETTING, ar_max_num_seqs=1), GOAL, Budget()).replicas
        many = needed(Costs(profile), asks, SETTING, GOAL, Budget()).replicas
        assert few.ar > few.dit
        assert many.ar < many.dit

    def test_without_promises_devices_are_loaded_to_four_fifths(self, profile):
        asks = load(2.2)
        _, dit_per_s = capacity_per_s(Costs(profile), asks, SETTING, Plant())
        found = needed(Costs(profile), asks, SETTING, Goal(), Budget())
        assert found.replicas.dit == -int(-2.2 // (0.8 * dit_per_s))

    def test_devices_of_a_replica_are_counted(self):
        assert Budget(ar_devices=2, dit_devices=1).cost(Replicas(2, 3)) == 7


class TestNext:
    def test_a_large_miss_is_answered_at_once(self, profile):
        scale = next_replicas(600.0, Replicas(1, 1), load(5.0), profile, SETTING, GOAL, Budget())
        assert scale.reason == "ScaleUp"
        assert scale.replicas.dit >= 4

    def test_fewer_only_after_ten_quiet_minutes(self, profile):
        asks, needs, reasons = load(0.5), (), []
        for minute in range(12):
            scale = next_replicas(60.0 * minute, Replicas(1, 3), asks, profile, SETTING, GOAL, Budget(), needs)
            needs = scale.needs
            reasons.append(scale.reason)
        assert set(reasons[:8]) == {"Stabilizing"}
        assert reasons[-1] == "ScaleDown"

    def test_what_was_needed_lately_is_kept(self, profile):
        needs = [Known(60.0 * minute, Replicas(1, 3)) for minute in range(10)]
        assert next_replicas(
            600.0, Replicas(1, 3), load(0.5), profile, SETTING, GOAL, Budget(), needs
        ).replicas == Replicas(1, 3)

    def test_a_rising_load_is_met_before_it_is_there(self, profile):
        rising = arrivals([Phase(600, 3.0, {512: 1}, shape=lambda share: share)], 4)
        flat = load(1.5, 600.0)
        ahead = Plant(start_s=180.0)
        with_trend = next_replicas(600.0, Replicas(1, 1), rising, profile, SETTING, GOAL, Budget(), (), ahead).replicas
        without = next_replicas(600.0, Replicas(1, 1), flat, profile, SETTING, GOAL, Budget(), (), ahead).replicas
        assert with_trend.dit > without.dit

    def test_a_growing_load_keeps_what_it_will_need_again_soon(self, profile):
        """What could be spared now is not, where the rate of ten minutes ago says that it will be needed in ten minutes."""
        asks = load(1.1, 600.0)
        per_s = len(asks) / (asks[-1].at_s - asks[0].at_s)
        replicas = [
            next_replicas(
                600.0, Replicas(1, 2), asks, profile, SETTING, GOAL, Budget(),
                [Known(60.0 * minute, Replicas(1, 1), rate) for minute in range(10)], Plant(),
            ).replicas
            for rate in (per_s, 0.8 * per_s)
        ]  # fmt: skip
        assert replicas == [Replicas(1, 1), Replicas(1, 2)]

    def test_keeps_the_promise_with_few_devices_and_never_flaps(self, profile):
        asks = load(2.2, 3600.0)
        course = run_planned(profile, asks, replace(SETTING, dit_replicas=2), GOAL, Budget())
        assert score(course.samples, GOAL).miss <= 0
        assert course.gpu_s / course.span_s <= 1.1 * 3
        shrunk = [
            after.dit_replicas < before.dit_replicas
            for (_, before), (_, after) in zip(course.settings, course.settings[1:], strict=False)
        ]
        assert not any(shrunk)


def spec_of(**dit):
    return parse({
        "model": {"source": {"path": "/m"}},
        "ar": {"image": "ar:1", "replicas": 1},
        "dit": {"image": "dit:1", **dit},
        "tuning": {"sloClasses": [{"name": "all", "p95Seconds": 12}], "gpuBudget": 6},
    })  # fmt: skip


OPERATOR = {"scaling": {"mode": "Operator", "minReplicas": 1, "maxReplicas": 5}}


class TestSized:
    def observed(self, per_s: float) -> Observed:
        asks = [replace(ask, at_s=ask.at_s + NOW.timestamp() - 300.0) for ask in load(per_s)]
        return Observed(tuple(Sample(ask, done_s=ask.at_s + 5.0) for ask in asks))

    def decide(self, profile, spec, previous=None, per_s=5.0, now=NOW, hold=False):
        return sized(spec, previous or {}, self.observed(per_s), profile, SETTING, GOAL, Plant(), now, hold=hold)

    def test_says_how_many_and_why(self, profile):
        found = self.decide(profile, spec_of(**OPERATOR))
        assert (found["ar"], found["reason"]) == (1, "ScaleUp")
        assert 4 <= found["dit"] <= 5
        assert "needs AR 1, DiT" in found["message"]
        assert planned(found, "dit", 1, 1, 5) == found["dit"]

    def test_stays_silent_about_pools_that_are_not_its_to_size(self, profile):
        assert self.decide(profile, spec_of(replicas=2)) == {}
        assert self.decide(profile, spec_of(scaling={"mode": "External"})) == {}

    def test_holds_while_something_moves_or_nothing_is_known(self, profile):
        spec, known = (
            spec_of(**OPERATOR),
            {"ar": 1, "dit": 2, "time": "2026-12-01T11:00:00Z", "reason": "AsNeeded", "message": ""},
        )
        assert self.decide(profile, spec, known, hold=True) == known
        assert self.decide(None, spec, known) == known
        assert self.decide(profile, spec, known, per_s=0.001) == known

    def test_looks_once_a_minute(self, profile):
        spec = spec_of(**OPERATOR)
        first = self.decide(profile, spec)
        assert self.decide(profile, spec, first, now=NOW + timedelta(seconds=59)) == first
        assert self.decide(profile, spec, first, now=NOW + timedelta(seconds=60)) != first

    def test_counts_the_devices_of_both_pools(self):
        spec = spec_of(**OPERATOR)
        budget = budget_of(spec, Replicas(1, 2))
        assert (budget.ar, budget.dit, budget.devices) == ((1, 1), (1, 5), 6)

    @pytest.mark.parametrize(
        ("known", "running", "wanted"), [({}, 2, 2), ({}, 9, 5), ({"dit": 3}, 1, 3), ({"dit": 9}, 1, 5)]
    )
    def test_what_is_wanted_stays_within_the_bounds(self, known, running, wanted):
        assert planned(known, "dit", running, 1, 5) == wanted
