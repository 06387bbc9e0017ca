"""The CRD, the chart and the code say the same: checked field by field, so that none drifts."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mammoth_operator import crd, names
from mammoth_operator.cluster import PATHS
from mammoth_operator.fields import camel, declaration, default_of, sparse
from mammoth_operator.limits import asked
from mammoth_operator.manifests import Options, Owner, Record, Wanted, desired_objects
from mammoth_operator.revision import Reference, contract, references, revision_of, spec_of
from mammoth_operator.spec import MAX_PIXELS, MAX_STEPS, PipelineSpec, SpecError, parse
from mammoth_serving.lifecycle import LIVENESS
from mammoth_wire import params

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "mammoth-operator"
SPEC: dict[str, Any] = {
    "model": {"source": {"path": "/opt/checkpoint"}},
    "ar": {"image": "ar:1", "replicas": 2},
    "dit": {"image": "dit:1", "replicas": 2},
}
SCHEMA = crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]


def test_the_chart_holds_what_the_generator_prints():
    assert (CHART / "files" / "crd.yaml").read_text() == crd.text(), "make crd"


def test_a_class_is_bounded_as_a_picture_is():
    assert (MAX_PIXELS, MAX_STEPS) == (params.MAX_PIXELS, params.MAX_STEPS)


def test_the_definition_is_small():
    assert len(crd.text()) < 100 * 1024


def declared(kind: Any, path: str = "spec"):
    for item in fields(kind):
        held = declaration(item)
        yield f"{path}.{camel(item.name)}", item, held
        inner = held.of if held.kind == "part" else getattr(held.of, "of", None)
        if is_dataclass(inner):
            yield from declared(inner, f"{path}.{camel(item.name)}" + ("[]" if held.kind == "list" else ""))


def schema_at(path: str) -> Any:
    found: Any = {"properties": SCHEMA}
    for word in path.split("."):
        found = found["properties"][word.removesuffix("[]")]
        if word.endswith("[]"):
            found = found["items"]
    return found


@pytest.mark.parametrize(
    ("path", "item", "held"), [pytest.param(*entry, id=entry[0]) for entry in declared(PipelineSpec)]
)
def test_a_field_of_the_spec_is_in_the_schema_with_its_default_and_bounds(path, item, held):
    schema = schema_at(path)
    default = default_of(item)
    if isinstance(default, int | float | str) and not isinstance(default, bool) and default != "":
        assert schema["default"] == default
    if held.low is not None:
        assert (schema["minimum"], schema["maximum"]) == (held.low, held.high)
    assert schema.get("enum", []) == list(held.choices)


def unbounded(schema: Any, path: str):
    match schema.get("type"):
        case "string" if not ({"maxLength", "enum", "format"} & schema.keys()):
            yield path
        case "array":
            if "maxItems" not in schema:
                yield path
            yield from unbounded(schema["items"], path + "[]")
        case "object":
            is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
            if is_open and "maxProperties" not in schema:
                yield path
            for name, inner in schema.get("properties", {}).items():
                yield from unbounded(inner, f"{path}.{name}")


def test_every_list_and_string_is_bounded():
    assert not list(unbounded(SCHEMA["spec"], "spec"))
    assert not list(unbounded(SCHEMA["status"], "status"))


def unknown(value: Any, schema: Any, path: str):
    if isinstance(value, dict) and "properties" in schema:
        for name, inner in value.items():
            if name not in schema["properties"]:
                yield f"{path}.{name}"
            else:
                yield from unknown(inner, schema["properties"][name], f"{path}.{name}")
    elif isinstance(value, list):
        for entry in value:
            yield from unknown(entry, schema["items"], path + "[]")


def test_the_schema_keeps_all_of_a_status(world):
    world.settle()
    for _ in range(7):
        world.children["Service", "demo"] = world.apply({**_service(world), "spec": {}})
        world.step()
    assert not list(unknown(world.status, SCHEMA["status"], "status"))


def _service(world):
    return next(dict(item) for item in desired(parse(SPEC)) if item["kind"] == "Service")


def desired(spec: PipelineSpec, options: Options = Options()):
    wanted = Wanted(spec, revision_of(spec, {}), Record(1), {"ar": 2, "dit": 2}, "x", asked(spec), 1)
    return desired_objects(Owner("space", "n" * 40, "uid"), wanted, options)


def test_names_of_children_fit():
    assert all(len(item["metadata"]["name"]) <= 63 for item in desired(parse(SPEC)))
    assert all(len(value) <= 63 for item in desired(parse(SPEC)) for value in item["metadata"]["labels"].values())


def test_every_kind_that_is_made_has_a_path_and_a_rule():
    seen = {"serviceMonitor": True, "podMonitor": True}
    kinds = {item["kind"] for item in desired(parse({**SPEC, "observability": seen}))}
    assert kinds <= PATHS.keys()
    rules = (CHART / "templates" / "_helpers.tpl").read_text()
    assert all(PATHS[kind][1] in rules for kind in kinds)


def test_no_role_of_the_chart_has_a_wildcard():
    for template in (CHART / "templates").rglob("*.*"):
        assert not re.search(r"(verbs|resources|apiGroups): *\[[^]]*\*", template.read_text()), template


def test_network_policies_can_be_left_out():
    assert "NetworkPolicy" not in {item["kind"] for item in desired(parse(SPEC), Options(network_policies=False))}


@pytest.mark.parametrize("pool", names.POOLS)
def test_a_pod_is_locked_down_and_drains_in_time(pool):
    pod = next(
        item
        for item in desired(parse(SPEC))
        if item["kind"] == "Deployment" and item["metadata"]["labels"]["mammoth.dev/pool"] == pool
    )["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["terminationGracePeriodSeconds"] == {"ar": 150, "dit": 120}[pool]
    assert container["resources"]["limits"] == container["resources"]["requests"] == {"nvidia.com/gpu": "1"}
    assert container["startupProbe"]["failureThreshold"] == {"ar": 180, "dit": 90}[pool]
    assert container["readinessProbe"]["grpc"] == container["startupProbe"]["grpc"] == {"port": 50053}
    assert container["livenessProbe"]["grpc"] == {"port": 50053, "service": LIVENESS}, "a drain is no reason to kill"


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        pytest.param({}, [], id="every-core"),
        pytest.param({"resources": {"cpu": "1500m"}}, ["2"], id="as-many-as-it-may-use"),
        pytest.param({"resources": {"cpu": 4}, "podOverrides": {"env": [{"name": "OMP_NUM_THREADS", "value": "1"}]}}, ["1"], id="as-asked"),
    ],
)  # fmt: skip
def test_a_container_runs_as_many_threads_as_it_has_cores(changes, threads):
    spec = parse({**SPEC, "dit": {**SPEC["dit"], **changes}})
    [deployment] = [
        item for item in desired(spec) if item["kind"] == "Deployment" and "-dit-" in item["metadata"]["name"]
    ]
    env = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    assert [entry["value"] for entry in env if entry["name"] == "OMP_NUM_THREADS"] == threads


def test_a_pool_on_the_cpu_asks_for_no_gpu():
    spec = parse({**SPEC, "dit": {**SPEC["dit"], "accelerator": {"count": 0}}})
    text = yaml.safe_dump(
        next(item for item in desired(spec) if "-dit-" in item["metadata"]["name"] and item["kind"] == "Deployment"),
        default_flow_style=False,
    )
    assert "nvidia" not in text
    assert "--device=cpu" in text


def test_only_the_downloader_sees_the_token_and_the_network():
    model = {"source": {"hub": {"repo": "a/b", "revision": "c"}}, "tokenSecretRef": {"name": "hf"}}
    pod = next(item for item in desired(parse({**SPEC, "model": model})) if item["kind"] == "Deployment")["spec"][
        "template"
    ]["spec"]
    [download] = pod["initContainers"]
    assert download["command"][:3] == ["hf", "download", "a/b"]
    assert "HF_TOKEN" in yaml.safe_dump(download["env"])
    assert "HF_TOKEN" not in yaml.safe_dump(pod["containers"])
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in pod["containers"][0]["env"]


LIVE = [
    {"dit": {"maxNumSeqs": 1}},
    {"dit": {"requestBatchMaxWaitMs": 1}},
    {"ar": {"replicas": 9}},
    {"tuning": {"mode": "Off"}},
    {"paused": True},
    {"dit": {"scaling": {"mode": "External"}}},
]
ROLLING = [
    {"ar": {"image": "x"}},
    {"dit": {"capacity": {"maxNumSeqs": 2}}},
    {"restartToken": "again"},
    {"model": {"source": {"path": "/x"}}},
    {"dit": {"batching": "step"}},
    {"ar": {"drainSeconds": 1}},
]


def changed(changes: dict[str, Any]) -> PipelineSpec:
    return parse(
        {
            **SPEC,
            **{
                key: {**SPEC.get(key, {}), **value} if isinstance(value, dict) else value
                for key, value in changes.items()
            },
        }
    )


@pytest.mark.parametrize("changes", LIVE, ids=str)
def test_what_is_live_is_not_in_the_revision(changes):
    assert revision_of(changed(changes), {}).hash == revision_of(parse(SPEC), {}).hash


@pytest.mark.parametrize("changes", ROLLING, ids=str)
def test_what_makes_pods_is_in_the_revision(changes):
    assert revision_of(changed(changes), {}).hash != revision_of(parse(SPEC), {}).hash


def test_written_out_defaults_are_the_same_revision():
    written = changed({"dit": {"capacity": {"maxNumSeqs": 8}, "precision": "bf16"}, "restartToken": ""})
    assert revision_of(written, {}).hash == revision_of(parse(SPEC), {}).hash


def test_a_revision_is_made_again_from_its_record():
    old, new = (
        changed({"dit": {"image": "dit:0", "capacity": {"maxNumSeqs": 2}}}),
        changed({"dit": {"replicas": 7, "maxNumSeqs": 8}}),
    )
    again = spec_of(revision_of(old, {}).body, new)
    assert revision_of(again, {}).hash == revision_of(old, {}).hash
    assert (again.dit.replicas, again.dit.cap) == (7, 2)


def test_a_spec_is_what_its_sparse_form_parses_to():
    spec = changed(
        {
            "ar": {"nodePool": {"tolerations": [{"key": "a", "operator": "Exists"}]}},
            "tuning": {"sloClasses": [{"name": "a", "p95Seconds": 1}]},
        }
    )
    assert parse(sparse(spec)) == spec


def test_pods_of_another_model_do_not_share_a_contract():
    assert contract(parse(SPEC)) == contract(changed({"dit": {"image": "other"}}))
    assert contract(parse(SPEC)) != contract(changed({"model": {"source": {"path": "/other"}}}))


def test_what_the_pods_read_when_they_start_is_found():
    overrides = {
        "envFrom": [{"secretRef": {"name": "a"}}],
        "env": [{"name": "X", "valueFrom": {"configMapKeyRef": {"name": "b", "key": "k"}}}],
        "volumes": [{"name": "v", "secret": {"secretName": "c"}}],
    }
    found = references(changed({"dit": {"podOverrides": overrides}}))
    assert found == {Reference("Secret", "a"), Reference("ConfigMap", "b"), Reference("Secret", "c")}


def test_faults_are_found_at_once_and_name_field_and_limit():
    with pytest.raises(SpecError) as caught:
        parse(
            {"model": {"source": {}}, "ar": {"image": "a", "maxNumSeqs": 99, "drainSeconds": 9999}, "dit": 3, "foo": 1}
        )
    fields_named = {field for field, _ in caught.value.faults}
    assert {"spec.foo", "spec.model.source", "spec.dit", "spec.ar.drainSeconds"} <= fields_named
    assert "from 0 to 3600" in str(caught.value)
