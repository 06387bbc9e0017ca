"""The definition and the chart on a real API server: every rule with an accepted and a refused example, defaults, columns, scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from playing.api import API_VERSIONS, APPLY, Refused, eventually, where
from playing.pipeline import SPEC, merged

from mammoth_operator.spec import SpecError, parse

CHART = Path(__file__).resolve().parents[3] / "charts" / "mammoth-operator"
HUB = {"hub": {"repo": "owner/name"}}
SLO = {"name": "fast", "p95Seconds": 20}
# a rule, what it accepts, what it refuses, and what the refusal must say
RULES = [
    ("one-model-source", {"model": {"source": {"pvc": {"claimName": "m"}, "path": None}}}, {"model": {"source": HUB}}, "exactly one"),
    ("count-or-claim", {"ar": {"accelerator": {"claimTemplateName": "gpu"}}}, {"ar": {"accelerator": {"claimTemplateName": "gpu", "count": 1}}}, "not both"),
    ("static-needs-replicas", {"ar": {"scaling": {"mode": "External"}, "replicas": None}}, {"ar": {"replicas": None}}, "needs replicas"),
    ("operator-bounds", {"dit": {"scaling": {"mode": "Operator", "minReplicas": 1, "maxReplicas": 4}}},
     {"dit": {"scaling": {"mode": "Operator", "minReplicas": 5, "maxReplicas": 4}}}, "minReplicas must be at most maxReplicas"),
    ("cap-within-capacity", {"dit": {"maxNumSeqs": 8}}, {"dit": {"maxNumSeqs": 9}}, "at most capacity.maxNumSeqs"),
    ("ar-cap-within-capacity", {"ar": {"maxNumSeqs": 32}}, {"ar": {"maxNumSeqs": 33}}, "at most capacity.maxNumSeqs"),
    ("bounds-in-order", {"tuning": {"bounds": {"ditMaxNumSeqs": {"min": 1, "max": 8}}}}, {"tuning": {"bounds": {"ditMaxNumSeqs": {"min": 8, "max": 1}}}}, "min must be at most max"),
    ("bounds-within-capacity", {"tuning": {"bounds": {"arMaxNumSeqs": {"min": 1, "max": 32}}}},
     {"tuning": {"bounds": {"arMaxNumSeqs": {"min": 1, "max": 33}}}}, "at most ar.capacity.maxNumSeqs"),
    ("wait", {"dit": {"requestBatchMaxWaitMs": 10000}}, {"dit": {"requestBatchMaxWaitMs": 10001}}, "10000"),
    ("surge-or-unavailable", {"rollout": {"maxSurge": 0, "maxUnavailable": 1}}, {"rollout": {"maxSurge": 0, "maxUnavailable": 0}}, "not both be 0"),
    ("drain", {"ar": {"drainSeconds": 3600}}, {"ar": {"drainSeconds": 3601}}, "3600"),
    ("auto-needs-an-objective", {"tuning": {"mode": "Auto", "objective": "throughput"}}, {"tuning": {"mode": "Auto"}}, "needs an objective"),
    ("slo-needs-a-class", {"tuning": {"objective": "slo", "sloClasses": [SLO]}}, {"tuning": {"objective": "slo"}}, "at least one of sloClasses"),
    ("unique-classes", {"tuning": {"sloClasses": [SLO, {**SLO, "name": "b"}]}}, {"tuning": {"sloClasses": [SLO, SLO]}}, "sloClasses"),
    ("few-classes", {"tuning": {"sloClasses": [{**SLO, "name": f"c{n}"} for n in range(16)]}},
     {"tuning": {"sloClasses": [{**SLO, "name": f"c{n}"} for n in range(17)]}}, "16"),
    ("cache-claim", {"model": {"cache": {"type": "pvc", "claimName": "c"}}}, {"model": {"cache": {"type": "pvc"}}}, "needs claimName"),
    ("cache-image", {"model": {"cache": {"type": "image", "reference": "r:1"}}}, {"model": {"cache": {"type": "image"}}}, "needs reference"),
    ("choices", {"dit": {"batching": "step"}}, {"dit": {"batching": "clever"}}, "batching"),
    ("string-length", {"restartToken": "x" * 64}, {"restartToken": "x" * 65}, "restartToken"),
    ("pattern", {"model": {"source": {"path": "/a/b"}}}, {"model": {"source": {"path": "a b"}}}, "path"),
    ("replicas", {"dit": {"replicas": 0}}, {"dit": {"replicas": -1}}, "replicas"),
    ("quantity", {"ar": {"resources": {"memory": "64Gi", "cpu": 4}}}, {"ar": {"resources": {"memory": "lots"}}}, "memory"),
    ("history", {"revisionHistoryLimit": 0}, {"revisionHistoryLimit": 21}, "20"),
    ("endpoint-port", {"endpoint": {"port": 443}}, {"endpoint": {"port": 0}}, "port"),
]  # fmt: skip
IDS = [rule[0] for rule in RULES]


def tried(api, space, changes, name="demo"):
    body = {
        "apiVersion": "mammoth.dev/v1alpha1",
        "kind": "MammothDeployment",
        "metadata": {"name": name},
        "spec": merged(SPEC, changes),
    }
    return api.call("POST", where("MammothDeployment", space) + "?dryRun=All&fieldValidation=Strict", body)


@pytest.mark.parametrize(("accepted", "refused", "said"), [rule[1:] for rule in RULES], ids=IDS)
def test_a_rule_accepts_and_refuses_here_and_in_the_parser(api, space, accepted, refused, said):
    assert parse(tried(api, space, accepted)["spec"]) == parse(merged(SPEC, accepted))
    with pytest.raises(Refused, match=said):
        tried(api, space, refused)
    with pytest.raises(SpecError):
        parse(merged(SPEC, refused))


def test_names_leave_room_for_those_of_the_children(api, space):
    tried(api, space, {}, name="n" * 40)
    with pytest.raises(Refused, match="at most 40 characters"):
        tried(api, space, {}, name="n" * 41)


def test_unknown_fields_are_refused(api, space):
    with pytest.raises(Refused, match=r"unknown field .*spec\.dit\.bacthing"):
        tried(api, space, {"dit": {"bacthing": "step"}})


def test_the_variant_cannot_be_changed(api, pipeline):
    pipeline.create()
    with pytest.raises(Refused, match="cannot be changed"):
        pipeline.edit(model={"variant": "Dev"})


def test_absent_and_empty_mean_the_defaults(api, space):
    bare = tried(api, space, {})["spec"]
    empty = tried(
        api, space, {"tuning": {}, "rollout": {}, "transport": {"tls": {}}, "dit": {"capacity": {}, "scaling": {}}}
    )["spec"]
    assert bare == empty
    assert (bare["dit"]["capacity"], bare["ar"]["capacity"]) == ({"maxNumSeqs": 8}, {"maxNumSeqs": 32})
    assert (bare["rollout"]["maxSurge"], bare["tuning"]["guard"]["minSamples"]) == (1, 30)
    assert parse(bare) == parse(SPEC)


def test_columns_show_what_is_asked_first(operator, pipeline, api):
    pipeline.create().ready()
    table = api.call("GET", where("MammothDeployment", pipeline.namespace), None)
    assert table["items"][0]["status"]["phase"] == "Ready"
    response = api._client.call_api("GET", f"{api._client.configuration.host}/{where('MammothDeployment', pipeline.namespace)}",
                                    {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}, None, _request_timeout=(5, 30))  # fmt: skip
    table = yaml.safe_load(response.read())
    columns = [column["name"] for column in table["columnDefinitions"]]
    assert columns == [
        "Name",
        "Ready",
        "Reason",
        "AR",
        "DiT",
        "Batch",
        "Wait",
        "Age",
        "Revision",
        "P95",
        "Img/h",
        "Tuning",
        "Decision",
        "Endpoint",
    ]
    row = dict(zip(columns, table["rows"][0]["cells"], strict=True))
    assert (row["Ready"], row["Reason"], row["AR"], row["DiT"], row["Batch"], row["Wait"]) == (
        "True",
        "Available",
        "1/1",
        "1/1",
        8,
        20,
    )


def test_the_scale_subresource_is_the_dit_pool(operator, pipeline, api):
    pipeline.create().ready()
    scale = f"{where('MammothDeployment', pipeline.namespace, 'demo')}/scale"
    found = api.call("GET", scale)
    assert (found["spec"]["replicas"], found["status"]["replicas"]) == (1, 1)
    assert found["status"]["selector"] == "mammoth.dev/deployment=demo,mammoth.dev/pool=dit"
    api.merge("MammothDeployment", pipeline.namespace, "demo", {"spec": {"replicas": 2}}, sub="/scale")
    eventually(lambda: pipeline.status["dit"]["summary"] == "2/2")


def test_replicas_in_a_manifest_conflict_with_an_external_scaler(operator, pipeline):
    pipeline.create(dit={"scaling": {"mode": "External"}, "replicas": 1})
    assert "scaling.mode is External" in pipeline.until("Degraded", "True", "ScalingConflict")["message"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}, "hostPath"),
        ({"hostNetwork": True}, "hostNetwork"),
        ({"serviceAccountName": "root"}, "serviceAccountName"),
        ({"securityContext": {"privileged": True}}, "privileged"),
        ({"labels": {"mammoth.dev/revision": "x"}}, "belongs to the operator"),
        ({"env": [{"name": "MAMMOTH_MODEL", "value": "x"}]}, "belongs to the operator"),
    ],
)
def test_what_pods_must_not_have_is_refused_by_the_operator(operator, pipeline, overrides, said):
    pipeline.create(dit={"podOverrides": overrides})
    assert said in pipeline.until("Accepted", "False", "InvalidSpec")["message"]
    assert not pipeline.children("Deployment")


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("watchNamespaces={default}",),
        ("admissionPolicy.enabled=true", "admissionPolicy.allowedRegistries={ghcr.io/}"),
    ],
    ids=["plain", "namespaced", "policy"],
)
def test_the_server_takes_everything_that_the_chart_renders(api, render, values):
    plurals = {"ClusterRole": "clusterroles", "ClusterRoleBinding": "clusterrolebindings", "Role": "roles", "RoleBinding": "rolebindings",
               "ValidatingAdmissionPolicy": "validatingadmissionpolicies", "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings"}  # fmt: skip
    for document in render("default", *values):
        kind, meta = document["kind"], document["metadata"]
        if kind in API_VERSIONS:
            path = where(kind, meta.get("namespace", ""), meta["name"])
            if kind == "ServiceAccount":
                api.call(
                    "PATCH", f"{path}?fieldManager=test&force=true", document, APPLY
                )  # a pod is admitted only with one
        else:
            space = f"namespaces/{meta['namespace']}/" if "namespace" in meta else ""
            path = f"apis/{document['apiVersion']}/{space}{plurals[kind]}/{meta['name']}"
        api.call("PATCH", f"{path}?fieldManager=test&force=true&dryRun=All&fieldValidation=Strict", document, APPLY)


@pytest.mark.parametrize("sample", ["cpu-demo", "preview-h200", "preview-small-gpus"])
def test_the_server_takes_the_samples(api, space, sample):
    document = yaml.safe_load((CHART / "samples" / f"{sample}.yaml").read_text())
    made = api.call("POST", where("MammothDeployment", space) + "?dryRun=All&fieldValidation=Strict", document)
    parse(made["spec"])
