"""Life of a deployment on a real node, under load where that matters: caps, a new image, a lost pod, drain, deletion."""

from __future__ import annotations

import json

import pytest
from playing.api import eventually
from playing.pipeline import CHILD_KINDS

pytestmark = pytest.mark.node

SLOW_S = 600
LONG = 40  # steps: a picture that is still being drawn when something happens to its pod


def uids(pipeline):
    """Return the deployment's pods by uid, with how often their containers were restarted."""
    return {
        pod["metadata"]["uid"]: sum(status["restartCount"] for status in pod["status"]["containerStatuses"])
        for pod in pipeline.pods()
    }


def test_a_changed_cap_reaches_every_pod_and_restarts_none(demo, shell):
    before, revision = uids(demo), demo.status["targetRevision"]
    epoch = demo.status["tuning"]["epoch"]
    shell(
        """kubectl patch mmd demo --type=merge -p '{"spec": {"dit": {"maxNumSeqs": 2, "requestBatchMaxWaitMs": 5}}}'"""
    )
    eventually(lambda: demo.status["tuning"]["epoch"] > epoch and demo.status["tuning"]["acked"] == "2/2", within_s=60)
    assert demo.status["tuning"]["applied"] == {"arMaxNumSeqs": 4, "ditMaxNumSeqs": 2, "requestBatchMaxWaitMs": 5}
    assert uids(demo) == before
    assert demo.status["targetRevision"] == revision
    [pod] = demo.pods("dit")
    said = shell(f"kubectl get --raw /api/v1/namespaces/default/pods/{pod['metadata']['name']}:9090/proxy/metrics")
    assert 'mammoth_limit{knob="max_num_seqs",stage="dit"} 2.0' in said


def test_a_new_image_rolls_under_load_and_no_request_fails(demo, shell, images, start_load):
    load = start_load(demo, clients=3)
    load.until(lambda: load.drawn() >= 3, "pictures before")
    before, old = uids(demo), demo.status["targetRevision"]
    rolled = {"ar": {"image": images.next(images.ar)}, "dit": {"image": images.next(images.dit)}}
    shell(f"kubectl patch mmd demo --type=merge -p '{json.dumps({'spec': rolled})}'")
    eventually(lambda: demo.status["targetRevision"] != old, within_s=60)
    demo.ready(within_s=SLOW_S)
    eventually(lambda: not uids(demo).keys() & before.keys(), within_s=SLOW_S, what="the old pods are gone")
    drawn = load.drawn()
    load.until(lambda: load.drawn() >= drawn + 3, "pictures after")
    print(f"{len(load.finish())} pictures while the image was rolled")
    assert {"RolloutStarted", "RolloutCompleted"} <= set(demo.events())


def test_a_dit_pod_is_deleted_while_it_draws_and_every_picture_arrives(demo, shell, start_load):
    shell("kubectl scale mmd demo --replicas=2")
    demo.ready(within_s=SLOW_S)
    assert len(demo.pods("dit")) == 2
    load = start_load(demo, clients=4, steps=LONG)
    load.until(lambda: load.drawn() >= 1 and load.underway() >= 2, "pictures are being drawn")
    gone = demo.pods("dit")[0]["metadata"]
    shell(f"kubectl delete pod {gone['name']} --wait=false")
    eventually(lambda: gone["uid"] not in uids(demo), within_s=SLOW_S, what="the pod leaves")
    demo.ready(within_s=SLOW_S)
    drawn = load.drawn()
    load.until(lambda: load.drawn() >= drawn + 4, "pictures after")
    print(f"{len(load.finish())} pictures while a DiT pod left")


def test_a_drain_ends_what_is_begun_and_its_undoing_serves_again(demo, shell, start_load):
    load = start_load(demo, requests=4, steps=LONG)
    load.until(lambda: load.underway() >= 2, "pictures are being drawn")
    assert "finishes its work" in shell("mammoth deploy drain demo")
    eventually(lambda: not demo.pods(), within_s=SLOW_S, what="no pod is left")
    assert len(load.result()) == 4
    demo.until("Ready", "False", "Draining")
    shell("mammoth deploy drain demo --undo")
    demo.ready(within_s=SLOW_S)
    assert "Ready" in shell("mammoth deploy status demo")
    shell('mammoth generate --deployment default/demo "a pear" -o pear.png --quiet')


def test_deletion_drains_and_leaves_nothing(demo, shell, start_load):
    load = start_load(demo, requests=4, steps=LONG)
    load.until(lambda: load.underway() >= 2, "pictures are being drawn")
    shell("kubectl delete mmd demo --timeout=5m")
    assert len(load.result()) == 4
    eventually(lambda: not demo.pods(), within_s=SLOW_S, what="pods are gone")
    kinds = [kind for kind in CHILD_KINDS if demo.children(kind)]
    assert not kinds
