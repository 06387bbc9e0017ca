"""`mammoth plan` and `mammoth tune explain`, and the benchmark that writes the page."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from mammoth_client.__main__ import app
from mammoth_client.cli.plan import ask
from mammoth_client.cli.tune import explanation
from mammoth_operator.tuning.traces import Phase as LoadPhase
from mammoth_operator.tuning.traces import TraceError, arrivals, dump, load
from mammoth_wire.errors import InvalidRequest


@pytest.fixture
def profile_path(profile, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.data()))
    return path


def run(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


PLAN = ("plan", "--rate", 2.2, "--sizes", "512", "--hours", 0.2, "--slo", "all:1024:12")


class TestPlan:
    def test_says_what_to_deploy_and_what_to_expect(self, profile_path):
        out = run(
            *PLAN,
            "--gpus",
            6,
            "--profile",
            profile_path,
        )
        assert "dit.replicas" in out
        assert "kept" in out
        assert "█" in out

    @pytest.mark.parametrize(("hours", "unit"), [(0.004, "s"), (0.3, "min"), (2.0, "h")])
    def test_no_two_bars_have_one_time(self, profile_path, hours, unit):
        words = [*PLAN[:5], "--hours", hours, *PLAN[7:], "--profile", profile_path]
        bars = [line for line in run(*words).splitlines() if "█" in line]
        times = [line.partition("█")[0].strip() for line in bars]
        assert len(set(times)) == len(times) > 3
        assert {time.split()[1] for time in times} == {unit}

    def test_answers_as_json_and_the_same_again(self, profile_path):
        words = (
            *PLAN,
            "--profile",
            profile_path,
            "--json",
        )
        first = json.loads(run(*words))
        assert first == json.loads(run(*words))
        assert (first["setting"]["ar_replicas"], first["setting"]["dit_replicas"], first["kept"]) == (1, 2, True)
        assert first["setting"]["dit_max_num_seqs"] == 1

    def test_a_trace_takes_the_place_of_a_rate(self, profile_path, tmp_path):
        path = tmp_path / "trace.jsonl"
        path.write_text(dump(arrivals([LoadPhase(300, 1.0, {256: 1})], 1)))
        assert json.loads(run("plan", "--trace", path, "--profile", profile_path, "--json"))["kept"]

    def test_says_when_the_budget_is_too_small(self, profile_path):
        out = run(
            "plan",
            "--rate",
            5,
            "--sizes",
            "512",
            "--hours",
            0.2,
            "--slo",
            "all:1024:8",
            "--gpus",
            2,
            "--profile",
            profile_path,
        )
        assert "missed by" in out

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            pytest.param([], "give --trace or --rate", id="no load"),
            pytest.param(["--rate", "1"], "give --profile or --deployment", id="no profile"),
            pytest.param(["--rate", "1", "--sizes", "wide", "--profile", "PROFILE"], "SIDE or SIDE:WEIGHT", id="size"),
            pytest.param(["--rate", "1", "--sizes", "512:nan", "--profile", "PROFILE"], "no number above 0", id="weight"),
            pytest.param(["--rate", "1", "--slo", "small", "--profile", "PROFILE"], "NAME:SIDE:SECONDS", id="promise"),
            pytest.param(["--trace", "PROFILE", "--profile", "PROFILE"], "line 1", id="trace"),
        ],
    )  # fmt: skip
    def test_bad_input_is_named(self, profile_path, words, said):
        done = CliRunner().invoke(app, ["plan", *(str(profile_path) if word == "PROFILE" else word for word in words)])
        assert done.exit_code == 2
        assert said in done.output

    def test_a_profile_with_nan_is_refused(self, profile):
        data = profile.data()
        data["ditPictureMs"] = dict.fromkeys(data["ditPictureMs"], float("nan"))
        with pytest.raises(InvalidRequest, match="nan is no time"):
            ask({"profile": data, "rate_per_s": 1.0, "sizes": {"512": 1}, "steps": 50, "hours": 0.1, "seed": 1})


class TestExplain:
    STATUS = {
        "conditions": [{"type": "TuningActive", "status": "True", "reason": "Tuned", "message": "ditMaxNumSeqs 8 to 1"}],
        "tuning": {
            "mode": "Auto", "epoch": 3, "acked": "3/3",
            "applied": {"arMaxNumSeqs": 32, "ditMaxNumSeqs": 1, "requestBatchMaxWaitMs": 20.0},
            "history": [
                {"time": "2026-12-01T12:00:00Z", "knob": "ditMaxNumSeqs", "from": 8, "to": 1, "reason": "FewerAtOncePay", "evidence": "160 pictures",
                 "p95Before": 9.5, "p95Expected": 6.1, "p95After": 6.0, "outcome": "kept"},
                {"time": "2026-12-01T12:05:00Z", "knob": "requestBatchMaxWaitMs", "from": 20, "to": 0, "reason": "WaitingDoesNotPay", "evidence": "150 pictures",
                 "p95Before": 6.0, "p95Expected": 6.0, "outcome": "pending"},
            ],
        },
        "capacity": {"imagesPerHour": 5500, "gpu": "H200", "profileTime": "2026-12-01T11:00:00Z", "p95Seconds": [{"name": "all", "seconds": 7.5}]},
    }  # fmt: skip

    def test_tells_what_was_done_and_why_newest_first(self):
        lines = list(explanation(self.STATUS))
        assert lines[0] == "mode Auto, epoch 3, confirmed by 3/3 pods"
        assert "in force: AR 32 rows, DiT 1 at once, wait 20 ms" in lines
        assert "now: Tuned: ditMaxNumSeqs 8 to 1" in lines
        first, second = (
            next(n for n, line in enumerate(lines) if knob in line and " to " in line and line.startswith("2026"))
            for knob in ("ditMaxNumSeqs", "requestBatch")
        )
        assert second < first
        assert lines[first + 1] == "    p95 9.5 s before, 6.1 s expected, 6 s after"
        assert lines[first + 2] == "    160 pictures"

    def test_an_object_without_status_has_nothing_to_tell(self):
        assert list(explanation({}))[-1] == "no decision yet"


class TestTraces:
    def test_a_trace_survives_its_file(self):
        asks = arrivals([LoadPhase(100, 1.0, {256: 1, 512: 2})], 7)
        again = load(dump(asks))
        assert [ask.key for ask in again] == [ask.key for ask in asks]
        assert again[3].at_s == pytest.approx(asks[3].at_s - asks[0].at_s, abs=1e-3)

    def test_equal_seeds_give_equal_traces_and_others_do_not(self):
        one, same, other = (arrivals([LoadPhase(100, 1.0, {256: 1})], seed) for seed in (1, 1, 2))
        assert one == same != other

    def test_the_rate_follows_the_shape(self):
        asks = arrivals([LoadPhase(10_000, 1.0, {256: 1}, shape=lambda share: share)], 1)
        halves = [sum(ask.at_s < 5000 for ask in asks), sum(ask.at_s >= 5000 for ask in asks)]
        assert halves[1] / halves[0] == pytest.approx(3.0, rel=0.15)

    @pytest.mark.parametrize(
        "text",
        ["", "x", '{"at_s": 1}', '{"at_s": "NaN", "height": 1, "width": 1}', '{"at_s": 1, "height": 0, "width": 1}'],
    )
    def test_what_is_no_trace_is_refused(self, text):
        with pytest.raises(TraceError):
            load(text)
