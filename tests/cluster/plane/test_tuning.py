"""The tuner on a real API server: a load moves the caps of running pods, status says why, nothing restarts.

The pods are played; what they tell of their hardware and their pictures is what the twin says such hardware does.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import yaml
from playing.api import eventually

from mammoth_operator.tuning.profile import Profile
from mammoth_operator.tuning.samples import Sample
from mammoth_operator.tuning.traces import Phase, arrivals
from mammoth_operator.tuning.trial import replay
from mammoth_operator.tuning.twin import Setting
from mammoth_wire.v1 import control_pb2

SIZE = (512, 512)
STEP_MS = {1: 12.4, 2: 28.0, 4: 60.0, 8: 130.0}
PROFILE = Profile(
    "played", "", {SIZE: STEP_MS}, {SIZE: 20.0}, {32: {1: 3.7, 32: 3.8}, 1056: {1: 3.7, 32: 3.8}}, {32: 8.0}
)
TUNING = {
    "mode": "Auto",
    "objective": "slo",
    "sloClasses": [{"name": "all", "p95Seconds": 5}],
    "guard": {"minSamples": 30, "cooldownSeconds": 600},
}


class Told:
    """What an AR pod tells of its pictures: those of a twin's run that has just ended."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples, self.ended_s = samples, time.monotonic()
        self.last_s = max(sample.done_s for sample in samples)

    def report(self, state: control_pb2.State, *, after: int) -> None:
        state.instance, state.served_total = "played", len(self.samples)
        for number, sample in enumerate(self.samples, start=1):
            if number <= after:
                continue
            ago_s = self.last_s - sample.ask.at_s + time.monotonic() - self.ended_s
            state.served.add(
                sequence=number, asked_ago_s=ago_s, height=SIZE[0], width=SIZE[1], steps=50, rows=1, prompt_tokens=32,
                batch_size=sample.wave_size, ar_queue_s=sample.joined_s - sample.ask.at_s, ar_s=sample.ready_s - sample.joined_s,
                dit_queue_s=sample.started_s - sample.ready_s, denoise_s=sample.denoise_s, decode_s=sample.decode_s,
                total_s=sample.latency_s,
            )  # fmt: skip


@pytest.fixture
def measured(pipeline, kubelet):
    """Return a starter of a deployment whose pods can be measured, with the tuning of a spec."""

    def start(**tuning):
        pipeline.create(dit={"replicas": 2}, tuning={**TUNING, **tuning}).ready()
        for pod in pipeline.pods():
            stage = kubelet.of(pod)
            stage.step_ms = lambda shape, batch_size, is_dit=stage.stage == "dit": (
                STEP_MS[batch_size] if is_dit else 3.7
            )
            stage.default_size = "512x512" if stage.stage == "dit" else ""
            stage.hardware = "played"
        return pipeline

    return start


def told(pipeline, kubelet, seed=6):
    """Let the AR pod have served a load that eight at a time cannot carry."""
    load = arrivals([Phase(120, 2.4, {512: 1})], seed)
    samples = replay(PROFILE, Setting(dit_replicas=2), load)
    [ar] = pipeline.pods("ar")
    kubelet.of(ar).served = Told(sorted(samples, key=lambda sample: sample.done_s))


def tuning_of(pipeline):
    return pipeline.status.get("tuning", {})


def test_a_load_moves_the_caps_of_running_pods_and_status_says_why(operator, measured, kubelet):
    pipeline = measured()
    eventually(lambda: pipeline.status.get("capacity", {}).get("imagesPerHour"), within_s=60, what="a profile")
    assert [item["name"] for item in pipeline.status["capacity"]["p95Seconds"]] == ["all"]
    assert len(pipeline.children("ConfigMap")["demo-profile"]["data"]) == 1
    pods = {pod["metadata"]["uid"] for pod in pipeline.pods()}
    epoch = tuning_of(pipeline)["epoch"]
    told(pipeline, kubelet)
    eventually(lambda: tuning_of(pipeline).get("history"), within_s=60, what="a decision")
    decided_s = time.monotonic()
    eventually(lambda: tuning_of(pipeline)["acked"] == "3/3", within_s=10, what="every pod's word")
    assert time.monotonic() - decided_s < 10
    found = tuning_of(pipeline)
    record = found["lastDecision"]
    assert (record["knob"], record["from"], record["to"]) == ("ditMaxNumSeqs", 8, 1)
    assert "pictures drawn again" in record["evidence"]
    assert record["p95Expected"] < record["p95Before"]
    assert (found["applied"]["ditMaxNumSeqs"], found["epoch"]) == (1, epoch + 1)
    assert {kubelet.of(pod).limits.max_num_seqs for pod in pipeline.pods("dit")} == {1}
    assert {pod["metadata"]["uid"] for pod in pipeline.pods()} == pods
    condition = pipeline.condition("TuningActive")
    assert condition["status"] == "True"
    assert "ditMaxNumSeqs 8 to 1" in condition["message"] or condition["reason"] in ("Watching", "Cooldown")
    assert "TuningApplied" in pipeline.events()


def test_recommend_says_it_and_touches_nothing(operator, measured, kubelet):
    pipeline = measured(mode="Recommend")
    told(pipeline, kubelet)
    eventually(lambda: tuning_of(pipeline).get("recommended"), within_s=60, what="a recommendation")
    assert tuning_of(pipeline)["recommended"]["ditMaxNumSeqs"] == 1
    assert tuning_of(pipeline)["applied"]["ditMaxNumSeqs"] == 8
    assert {kubelet.of(pod).limits.max_num_seqs for pod in pipeline.pods("dit")} == {8}


def test_a_restarted_operator_keeps_the_tuners_caps_and_measures_nothing(operator, make_operator, measured, kubelet):
    pipeline = measured()
    told(pipeline, kubelet)
    eventually(lambda: tuning_of(pipeline).get("history"), within_s=60, what="a decision")
    before, profile = tuning_of(pipeline), pipeline.children("ConfigMap")["demo-profile"]["data"]
    operator.stop()
    for pod in pipeline.pods():
        kubelet.of(pod).step_ms = lambda shape, batch_size: pytest.fail("measured again")
    make_operator("two").start()
    pipeline.annotate(note="look")
    time.sleep(6)
    assert tuning_of(pipeline)["applied"] == before["applied"]
    assert tuning_of(pipeline)["epoch"] == before["epoch"]
    assert pipeline.children("ConfigMap")["demo-profile"]["data"] == profile


def test_an_external_scaler_finds_the_scale_subresource(api, space):
    """The autoscaler of docs/tuning.md is accepted as it stands."""
    page = Path(__file__).resolve().parents[3] / "docs" / "tuning.md"
    [text] = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    body = yaml.safe_load(text)
    answer = api.call(
        "POST",
        f"apis/autoscaling/v2/namespaces/{space}/horizontalpodautoscalers?dryRun=All&fieldValidation=Strict",
        body,
    )
    assert answer["spec"]["scaleTargetRef"]["kind"] == "MammothDeployment"
