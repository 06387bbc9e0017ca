"""The tuner on a real node, with real services under load: more callers move a cap of running pods, and status says why.

It runs before the tests that follow by name, and leaves the deployment's spec as it found it.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from playing.api import eventually

pytestmark = pytest.mark.node

WITHIN_S = 600  # a cap is weighed on the last 160 pictures, which a busy machine takes minutes to draw
ACKNOWLEDGED_S = 10.0
TUNED = {
    "ar": {"maxNumSeqs": 1},
    "dit": {"requestBatchMaxWaitMs": 0},
    "tuning": {"mode": "Auto", "objective": "slo", "sloClasses": [{"name": "all", "p95Seconds": 1}],
               "guard": {"minSamples": 15, "cooldownSeconds": 10}},
}  # fmt: skip
AS_BEFORE = {"ar": {"maxNumSeqs": None}, "dit": {"requestBatchMaxWaitMs": None}, "tuning": None}


def uids(pipeline):
    """Return the deployment's pods by uid, with how often their containers were restarted."""
    return {
        pod["metadata"]["uid"]: sum(status["restartCount"] for status in pod["status"]["containerStatuses"])
        for pod in pipeline.pods()
    }


@pytest.fixture
def tuned(demo, shell):
    """The deployment with one picture at a time in the LLM, and a tuner that may act."""
    shell(f"kubectl patch mmd demo --type=merge -p '{json.dumps({'spec': TUNED})}'")
    yield demo
    shell(f"kubectl patch mmd demo --type=merge -p '{json.dumps({'spec': AS_BEFORE})}'")
    demo.ready()


def test_more_callers_move_a_cap_without_a_restart_and_status_says_why(tuned, shell, start_load):
    def tuning():
        return tuned.status["tuning"]

    eventually(lambda: tuning()["applied"]["arMaxNumSeqs"] == 1 and tuning()["acked"] == "2/2", within_s=WITHIN_S)
    known = len(tuning().get("history", ()))
    before, epoch = uids(tuned), tuning()["epoch"]
    one = start_load(tuned, clients=1, steps=1)
    tuned.until("TuningActive", "True", "Settled", within_s=WITHIN_S)
    assert len(tuning().get("history", ())) == known, "one caller at a time needs no more than one at a time"
    more = start_load(tuned, clients=5, steps=1)

    def raised():
        """Return the newest decision on the LLM's cap, and when every pod was first seen to have confirmed it."""
        found = tuning()
        records = [record for record in found.get("history", ())[known:] if record["knob"] == "arMaxNumSeqs"]
        return (records[-1], datetime.now(UTC)) if records and found["acked"] == "2/2" else None

    record, acked_at = eventually(raised, within_s=WITHIN_S, what="the cap is raised and confirmed")
    took_s = (acked_at - datetime.fromisoformat(record["time"])).total_seconds()
    assert took_s <= ACKNOWLEDGED_S
    assert record["to"] > record["from"] == 1
    assert "pictures drawn again" in record["evidence"]
    assert record["p95Expected"] < record["p95Before"]
    found = tuning()
    assert found["epoch"] > epoch
    assert found["applied"]["arMaxNumSeqs"] >= record["to"]
    [pod] = tuned.pods("ar")
    said = shell(f"kubectl get --raw /api/v1/namespaces/default/pods/{pod['metadata']['name']}:9090/proxy/metrics")
    assert f'mammoth_limit{{knob="max_num_seqs",stage="ar"}} {found["applied"]["arMaxNumSeqs"]:.1f}' in said
    assert uids(tuned) == before
    assert "TuningApplied" in tuned.events()
    assert f"arMaxNumSeqs 1 to {record['to']:g}" in shell("kubectl describe mmd demo")
    explained = shell("mammoth tune explain demo -n default")
    assert "arMaxNumSeqs" in explained
    print(
        f"confirmed {took_s:.0f} s after the decision; {len(one.finish()) + len(more.finish())} pictures, none failed"
    )
    print(explained)
