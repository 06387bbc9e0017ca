"""Rows 13 to 24 of the operator's behaviours (platform.md 3.3) on a real API server; the test plays kubelet."""

from __future__ import annotations

import base64
import copy
import time

import pytest
from playing.api import APPLY, Refused, always, eventually, where
from playing.pipeline import Pipeline


def gone(pipeline) -> bool:
    return pipeline.object is None


def nothing_left(pipeline) -> bool:
    kinds = ("Deployment", "Service", "ConfigMap", "ServiceAccount", "ControllerRevision", "NetworkPolicy", "Pod")
    return not any(pipeline.children(kind) for kind in kinds)


def test_row_13_delete_drains_and_leaves_nothing(operator, pipeline, fate):
    fate(drain_s=2.0)
    pipeline.create().ready()
    eventually(lambda: pipeline.object["metadata"].get("finalizers") == ["mammoth.dev/drain"])
    start = time.monotonic()
    pipeline.delete()
    eventually(lambda: "demo" not in pipeline.children("Service"), what="no new work")
    assert pipeline.pods("dit"), "DiT pods stay for the work that AR pods finish"
    eventually(lambda: pipeline.status.get("phase") == "Deleting")
    eventually(lambda: gone(pipeline))
    assert time.monotonic() - start > 1.5
    eventually(lambda: nothing_left(pipeline))
    assert "Draining" in pipeline.events()


def test_row_13_delete_has_a_hard_limit_and_needs_no_answer(operator, pipeline, fate, kubelet):
    fate(drain_s=3600)
    pipeline.create(ar={"drainSeconds": 0}, dit={"drainSeconds": 0}).ready()
    for pod in pipeline.pods():
        kubelet.of(pod).mute = True
    start = time.monotonic()
    pipeline.delete()
    eventually(lambda: gone(pipeline), within_s=70)
    assert 30 < time.monotonic() - start < 60, "drainSeconds + 30 s of grace + 15 s"


def test_row_13_immediate_deletion_waits_for_nobody(operator, pipeline, fate):
    fate(drain_s=60)
    pipeline.create(deletionPolicy="Immediate").ready()
    assert not pipeline.object["metadata"].get("finalizers")
    pipeline.delete()
    eventually(lambda: gone(pipeline), within_s=30, what="not the pods")


def test_row_14_without_an_operator_a_deletion_waits_for_it_or_for_the_break_glass(
    operator, pipeline, make_operator, api
):
    pipeline.create().ready()
    eventually(lambda: pipeline.object["metadata"].get("finalizers"))
    operator.kill()
    pipeline.delete()
    always(lambda: not gone(pipeline), for_s=2)
    api.merge("MammothDeployment", pipeline.namespace, "demo", {"metadata": {"finalizers": None}})
    eventually(lambda: gone(pipeline))
    eventually(lambda: nothing_left(pipeline))


def test_row_14_a_deployment_that_holds_no_work_is_not_held(operator, pipeline, fate):
    fate("loading")
    pipeline.create()
    eventually(lambda: pipeline.pods("ar"))
    time.sleep(1)
    operator.kill()
    pipeline.delete()
    eventually(lambda: gone(pipeline))


def test_row_15_a_restarted_operator_changes_nothing_and_goes_on_counting(make_operator, proxy, pipeline):
    first = make_operator("one", config=proxy.config).start()
    pipeline.create().ready()
    pipeline.edit(dit={"maxNumSeqs": 4})
    eventually(lambda: pipeline.status["tuning"]["epoch"] == 2 and pipeline.status["tuning"]["acked"] == "2/2")
    time.sleep(6)
    before, pods = pipeline.versions(), sorted(pod["metadata"]["uid"] for pod in pipeline.pods())
    assert first.stop() == 0
    writes = len(proxy.writes())
    make_operator("two", config=proxy.config).start()
    time.sleep(5)
    assert (pipeline.versions(), sorted(pod["metadata"]["uid"] for pod in pipeline.pods())) == (before, pods)
    assert proxy.writes()[writes:] == []
    pipeline.edit(dit={"maxNumSeqs": 5})
    eventually(lambda: pipeline.status["tuning"]["epoch"] == 3 and pipeline.status["tuning"]["acked"] == "2/2")


def test_row_16_of_two_operators_one_writes(make_operator, proxy, pipeline):
    first = make_operator("one").start()
    pipeline.create().ready()
    second = make_operator("two", config=proxy.config).start()
    pipeline.edit(dit={"maxNumSeqs": 2})
    eventually(lambda: pipeline.status["tuning"]["acked"] == "2/2")
    assert proxy.writes() == [], "a standby writes nothing"
    eventually(lambda: second.answers("/livez"), what="a standby is alive")
    first.kill()
    pipeline.edit(dit={"maxNumSeqs": 3})
    eventually(lambda: pipeline.status["tuning"]["epoch"] == 3, within_s=30, what="the other one took over")
    assert proxy.writes()


@pytest.mark.parametrize("status", [409, 429, 500])
def test_row_17_failing_writes_are_tried_again(make_operator, proxy, pipeline, status):
    fails = {"left": 3}

    def fault(method, path):
        if method in ("PATCH", "POST") and "lease" not in path and fails["left"]:
            fails["left"] -= 1
            return status
        return None

    proxy.fault = fault
    make_operator(config=proxy.config).start()
    pipeline.create().ready(within_s=40)
    fails["left"] = 3
    pipeline.edit(dit={"replicas": 2})
    eventually(lambda: pipeline.status["dit"]["summary"] == "2/2", within_s=40)
    assert len(pipeline.children("Deployment")) == 2


def test_row_17_a_cut_and_expired_watch_loses_nothing(make_operator, proxy, pipeline, api):
    make_operator(config=proxy.config).start()
    pipeline.create().ready()
    expired = {"left": 9}

    def fault(method, path):
        if method == "GET" and "watch=true" in path and expired["left"]:
            expired["left"] -= 1
            return 410
        return None

    proxy.fault = fault
    proxy.cut()
    api.delete("Service", pipeline.namespace, "demo")
    pipeline.edit(dit={"replicas": 2})
    eventually(lambda: pipeline.status["dit"]["summary"] == "2/2", within_s=40)
    eventually(lambda: "demo" in pipeline.children("Service"), within_s=40, what="what was deleted unseen is restored")


def test_row_17_a_restarted_api_server_loses_nothing(operator, pipeline, plane_cluster):
    if not plane_cluster.own:
        pytest.skip("the API server of a named cluster is left alone")
    pipeline.create().ready()
    plane_cluster.restart("kube-apiserver")
    eventually(lambda: pipeline.object, within_s=60)
    pipeline.edit(dit={"replicas": 2})
    eventually(lambda: pipeline.status["dit"]["summary"] == "2/2", within_s=90)
    assert len(pipeline.children("Deployment")) == 2


@pytest.mark.parametrize(
    ("end", "pool_reason", "ready_reason", "fails"),
    [
        pytest.param("crash", "PodsCrashing", "PodsCrashing", "Error", id="crash-loop"),
        pytest.param("oom", "OutOfMemory", "PodsCrashing", "OOMKilled", id="out-of-memory"),
        pytest.param("image", "ImagePullFailed", "ImagePullFailed", None, id="image-pull"),
        pytest.param("gpu", "GpuFault", "PodsCrashing", None, id="gpu-fault"),
    ],
)
def test_row_18_a_failing_pod_gets_a_typed_reason(operator, pipeline, fate, end, pool_reason, ready_reason, fails):
    fate(end, image="mammoth-dit:1")
    pipeline.create()
    message = pipeline.until("DiffusionReady", "False", pool_reason)["message"]
    assert "demo-dit-" in message
    pipeline.until("Ready", "False", ready_reason)
    assert pipeline.status.get("lastFailure", {}).get("reason") == fails


def test_row_18_a_pod_killed_for_its_memory_lowers_the_batch_limit_of_its_pool(operator, pipeline, kubelet):
    pipeline.create(dit={"replicas": 2}).ready()
    revision = pipeline.status["targetRevision"]
    kubelet.kill(pipeline.pods("dit")[0])
    eventually(
        lambda: (
            pipeline.status["tuning"]["applied"]["ditMaxNumSeqs"] == 4 and pipeline.status["tuning"]["acked"] == "3/3"
        )
    )
    assert [kubelet.of(pod).limits.max_num_seqs for pod in pipeline.pods("dit")] == [4, 4]
    assert kubelet.of(pipeline.pods("ar")[0]).limits.max_num_seqs == 32
    assert pipeline.status["targetRevision"] == revision, "nothing restarts"
    assert "OutOfMemory" in pipeline.events()
    pipeline.edit(dit={"maxNumSeqs": 6})
    eventually(
        lambda: (
            pipeline.status["tuning"]["applied"]["ditMaxNumSeqs"] == 6 and pipeline.status["tuning"]["acked"] == "3/3"
        )
    )


def test_row_19_a_changed_secret_that_the_pods_read_is_a_new_revision(operator, pipeline, api):
    def secret(value: str) -> dict:
        return {"data": {"KEY": base64.b64encode(value.encode()).decode()}}

    api.create("Secret", pipeline.namespace, {"metadata": {"name": "keys"}, **secret("one")})
    pipeline.create(dit={"podOverrides": {"envFrom": [{"secretRef": {"name": "keys"}}]}}).ready()
    old = pipeline.status["targetRevision"]
    api.merge("Secret", pipeline.namespace, "keys", secret("two"))
    eventually(lambda: pipeline.status["targetRevision"] != old, within_s=70)
    pipeline.ready()


def test_row_20_a_foreign_object_in_the_way_is_never_adopted(operator, pipeline, api):
    body = {
        "metadata": {"name": "demo", "labels": {"app": "theirs"}},
        "spec": {"ports": [{"port": 80}], "selector": {"app": "theirs"}},
    }
    made = api.create("Service", pipeline.namespace, body)
    pipeline.create()
    message = pipeline.until("Accepted", "False", "NameTaken")["message"]
    assert "Service demo" in message
    always(lambda: not pipeline.children("Deployment"), for_s=2)
    now = api.get("Service", pipeline.namespace, "demo")
    assert now["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    api.delete("Service", pipeline.namespace, "demo")
    pipeline.ready(within_s=40)


def test_row_20_a_labelled_copy_is_not_ours_either(operator, pipeline, api):
    labels = {"mammoth.dev/deployment": "demo", "mammoth.dev/pool": "ar"}
    pipeline.create().ready()
    body = {"metadata": {"name": "theirs", "labels": labels}, "spec": {"ports": [{"port": 80}]}}
    api.create("Service", pipeline.namespace, body)
    always(lambda: api.get("Service", pipeline.namespace, "theirs"), for_s=3)


def test_row_21_an_upgraded_definition_restarts_nothing(operator, pipeline, api, render):
    [crd] = [item for item in render("default") if item["kind"] == "CustomResourceDefinition"]
    pipeline.create().ready()
    revision, pods = pipeline.status["targetRevision"], sorted(pod["metadata"]["uid"] for pod in pipeline.pods())
    newer = copy.deepcopy(crd)
    spec = newer["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    spec["rollout"]["properties"]["soakSeconds"] = {"type": "integer", "default": 5}
    spec["restartToken"]["maxLength"] = 32
    path = f"{where('CustomResourceDefinition', '', crd['metadata']['name'])}?fieldManager=test&force=true"
    try:
        api.call("PATCH", path, newer, APPLY)
        eventually(lambda: pipeline.object["spec"]["rollout"].get("soakSeconds") == 5)
        pipeline.annotate(touched="yes")
        time.sleep(3)
    finally:
        api.call("PATCH", path, crd, APPLY)
    assert pipeline.status["targetRevision"] == revision
    assert sorted(pod["metadata"]["uid"] for pod in pipeline.pods()) == pods


def test_row_22_a_deleted_namespace_goes_without_an_error_loop(operator, pipeline, api):
    pipeline.create().ready()
    api.delete("Namespace", "", pipeline.namespace)
    eventually(lambda: gone(pipeline), within_s=60)
    errors = [
        line for line in operator.log.read_text().splitlines() if '"level": "error"' in line and "kopf" not in line
    ]
    assert len(errors) < 5, errors


def test_row_23_a_node_is_emptied_one_pod_at_a_time(operator, pipeline, api, fate):
    fate(start_s=1.0)
    pipeline.create(dit={"replicas": 2}).ready()
    first, second = (pod["metadata"]["name"] for pod in pipeline.pods("dit"))

    def evict(name: str) -> None:
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": pipeline.namespace},
        }
        api.call("POST", f"{where('Pod', pipeline.namespace, name)}/eviction", body)

    eventually(
        lambda: api.get("PodDisruptionBudget", pipeline.namespace, "demo-dit")["status"]["disruptionsAllowed"] == 1
    )
    evict(first)
    with pytest.raises(Refused) as refused:
        evict(second)
    assert refused.value.status == 429
    pipeline.ready()
    eventually(lambda: len(pipeline.pods("dit")) == 2)


def test_row_24_paused_writes_no_child_and_still_tells(operator, pipeline, api, kubelet):
    pipeline.create().ready()
    pipeline.edit(paused=True)
    pipeline.until("Ready", "False", "Paused")
    before = pipeline.versions()
    pipeline.edit(dit={"image": "mammoth-dit:2", "replicas": 3})
    api.delete("Service", pipeline.namespace, "demo")
    kubelet.of(pipeline.pods("dit")[0]).in_flight = 7
    time.sleep(3)
    after = pipeline.versions()
    assert {key: value for key, value in before.items() if key != ("Service", "demo")} == after
    eventually(lambda: pipeline.status["dit"]["inflight"] == 7, within_s=45)
    assert pipeline.status["phase"] == "Paused"
    pipeline.edit(paused=False)
    pipeline.ready(within_s=40)
    assert "demo" in pipeline.children("Service")


def test_two_deployments_of_a_namespace_do_not_meet(operator, api, space):
    one, two = Pipeline(api, space, "one").create(), Pipeline(api, space, "one-dit").create()
    one.ready()
    two.ready()
    one.delete()
    eventually(lambda: gone(one))
    assert two.has("Ready", "True")
