"""Decide: every object that a deployment owns, in the order in which they are applied. Pure: names derive from the parent's.

What belongs to one revision carries its hash; everything else carries the parent's name alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mammoth_operator.limits import Caps
from mammoth_operator.names import (
    API_VERSION,
    APPLIED_ANNOTATION,
    CONTRACT_LABEL,
    DEPLOYMENT_LABEL,
    GRPC_PORT,
    KIND,
    MANAGER,
    METRICS_PORT,
    OUTCOME_LABEL,
    POOL_LABEL,
    POOLS,
    PROVEN_LABEL,
    REVISION_LABEL,
    Pool,
    child_name,
    profile_name,
    revision_name,
    selector,
)
from mammoth_operator.network import network_policies
from mammoth_operator.pods import pod_template
from mammoth_operator.revision import Revision, contract, digest
from mammoth_operator.spec import PipelineSpec

__all__ = ["Manifest", "Options", "Owner", "Record", "Wanted", "desired_objects", "fingerprint", "profile_object", "record_object", "revision_objects", "shared_objects"]  # fmt: skip

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Owner:
    """The parent, as its children refer to it."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Options:
    """What the operator's own settings say about children. `operator_namespace` is where Control calls come from."""

    network_policies: bool = True
    operator_namespace: str = "default"


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a revision beyond its body: when it came (ordinal), whether it was ever ready or has failed."""

    ordinal: int
    outcome: str = ""
    proven: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """Everything that decides the children: `replicas` by pool (None: somebody else's), `admit` the revision that clients
    reach (None: every ready AR pod)."""

    spec: PipelineSpec
    revision: Revision
    record: Record
    replicas: Mapping[Pool, int | None]
    admit: str | None
    caps: Caps
    epoch: int


def desired_objects(owner: Owner, wanted: Wanted, options: Options) -> list[Manifest]:
    """Return every object of the target revision and every shared one, in the order to apply them."""
    return [*shared_objects(owner, wanted, options), *revision_objects(owner, wanted)]


def shared_objects(owner: Owner, wanted: Wanted, options: Options) -> list[Manifest]:
    """Return what outlives a revision: account, limits, the clients' door, budgets, policies, monitors."""
    objects = [
        _object(owner, "v1", "ServiceAccount", owner.name, automountServiceAccountToken=False),
        _config_map(owner, wanted),
        _client_service(owner, wanted),
        *(_budget(owner, pool) for pool in POOLS if (wanted.replicas[pool] or 0) > 1),
    ]
    if options.network_policies:
        objects += [
            _object(owner, "networking.k8s.io/v1", "NetworkPolicy", child_name(owner.name, pool), pool, spec=policy)
            for pool, policy in network_policies(owner.name, wanted.spec, options.operator_namespace).items()
        ]
    return [_stamped(item) for item in [*objects, *_monitors(owner, wanted.spec)]]


def revision_objects(owner: Owner, wanted: Wanted) -> list[Manifest]:
    """Return what one revision has: its record, the headless Service of its DiT pods, two Deployments."""
    return [
        record_object(owner, wanted.spec, wanted.revision, wanted.record),
        _stamped(_headless_service(owner, wanted)),
        *(_stamped(_deployment(owner, wanted, pool)) for pool in reversed(POOLS)),
    ]


def record_object(owner: Owner, spec: PipelineSpec, revision: Revision, record: Record) -> Manifest:
    """Return the ControllerRevision that says what a revision is made of and how it fared."""
    item = _object(
        owner, "apps/v1", "ControllerRevision", revision_name(owner.name, revision.hash),
        labels=_revision_labels(spec, revision), revision=record.ordinal, data=dict(revision.body),
    )  # fmt: skip
    if record.outcome:
        item["metadata"]["labels"][OUTCOME_LABEL] = record.outcome
    if record.proven:
        item["metadata"]["labels"][PROVEN_LABEL] = "proven"
    return _stamped(item)


def profile_object(owner: Owner, data: Mapping[str, str]) -> Manifest:
    """Return the ConfigMap that keeps what was measured of the hardware, an entry for each hardware and versions."""
    return _stamped(_object(owner, "v1", "ConfigMap", profile_name(owner.name), data=dict(data)))


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """Return a digest of a manifest as it is sent, its own stamp left out."""
    meta = manifest["metadata"]
    annotations = {key: value for key, value in meta.get("annotations", {}).items() if key != APPLIED_ANNOTATION}
    return digest({**manifest, "metadata": {**meta, "annotations": annotations}})[:16]


def _stamped(manifest: Manifest) -> Manifest:
    stamp = fingerprint(manifest)
    manifest["metadata"].setdefault("annotations", {})[APPLIED_ANNOTATION] = stamp
    return manifest


def _object(
    owner: Owner, api_version: str, kind: str, name: str, pool: Pool | None = None, *,
    labels: Mapping[str, str] | None = None, **rest: Any,
) -> Manifest:  # fmt: skip
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": {**_labels(owner.name, pool), **(labels or {})},
            "ownerReferences": [
                {"apiVersion": API_VERSION, "kind": KIND, "name": owner.name, "uid": owner.uid, "controller": True, "blockOwnerDeletion": True}
            ],
        },
        **rest,
    }  # fmt: skip


def _labels(name: str, pool: Pool | None = None) -> dict[str, str]:
    labels = {
        "app.kubernetes.io/name": "mammoth",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/managed-by": MANAGER,
        DEPLOYMENT_LABEL: name,
    }
    return labels | ({"app.kubernetes.io/component": pool, POOL_LABEL: pool} if pool else {})


def _revision_labels(spec: PipelineSpec, revision: Revision) -> dict[str, str]:
    return {REVISION_LABEL: revision.hash, CONTRACT_LABEL: contract(spec)}


def _config_map(owner: Owner, wanted: Wanted) -> Manifest:
    data = {**wanted.caps.data(), "epoch": str(wanted.epoch), "tuning.json": json.dumps({"mode": wanted.spec.tuning.mode})}  # fmt: skip
    return _object(owner, "v1", "ConfigMap", owner.name, data=data)


def _client_service(owner: Owner, wanted: Wanted) -> Manifest:
    endpoint = wanted.spec.endpoint
    port = {"name": "grpc", "port": endpoint.port, "targetPort": "grpc", "protocol": "TCP", "appProtocol": "kubernetes.io/h2c"}  # fmt: skip
    spec = {"type": endpoint.type, "selector": selector(owner.name, "ar", wanted.admit or ""), "ports": [port]}
    return _object(owner, "v1", "Service", owner.name, spec=spec)


def _headless_service(owner: Owner, wanted: Wanted) -> Manifest:
    labels = _revision_labels(wanted.spec, wanted.revision)
    pods = {**selector(owner.name, "dit", wanted.revision.hash), CONTRACT_LABEL: labels[CONTRACT_LABEL]}
    port = {"name": "grpc", "port": GRPC_PORT, "targetPort": "grpc", "protocol": "TCP", "appProtocol": "kubernetes.io/h2c"}  # fmt: skip
    name = child_name(owner.name, "dit", wanted.revision.hash)
    return _object(owner, "v1", "Service", name, "dit", labels=labels, spec={"clusterIP": "None", "selector": pods, "ports": [port]})  # fmt: skip


def _deployment(owner: Owner, wanted: Wanted, pool: Pool) -> Manifest:
    spec, labels = wanted.spec, _revision_labels(wanted.spec, wanted.revision)
    pod_labels = {**_labels(owner.name, pool), **labels}
    body: Manifest = {
        "selector": {"matchLabels": selector(owner.name, pool, wanted.revision.hash)},
        "revisionHistoryLimit": 0,
        "progressDeadlineSeconds": spec.rollout.progress_deadline_seconds,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": spec.rollout.max_surge, "maxUnavailable": spec.rollout.max_unavailable},
        },
        "template": pod_template(owner.name, spec, pool, wanted.revision.hash, pod_labels),
    }
    replicas = wanted.replicas[pool]
    if replicas is not None:
        body["replicas"] = replicas
    name = child_name(owner.name, pool, wanted.revision.hash)
    return _object(owner, "apps/v1", "Deployment", name, pool, labels=labels, spec=body)


def _budget(owner: Owner, pool: Pool) -> Manifest:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": selector(owner.name, pool)}}
    return _object(owner, "policy/v1", "PodDisruptionBudget", child_name(owner.name, pool), pool, spec=spec)


def _monitors(owner: Owner, spec: PipelineSpec) -> list[Manifest]:
    target = {"selector": {"matchLabels": selector(owner.name)}}
    monitors = []
    if spec.observability.pod_monitor:
        monitors.append(_object(owner, "monitoring.coreos.com/v1", "PodMonitor", owner.name,
                                spec={**target, "podMetricsEndpoints": [{"port": "metrics"}]}))  # fmt: skip
    if spec.observability.service_monitor:
        port = {"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics", "protocol": "TCP"}
        monitors += [
            _object(owner, "v1", "Service", f"{owner.name}-metrics",
                    spec={"clusterIP": "None", "selector": selector(owner.name), "ports": [port]}),
            _object(owner, "monitoring.coreos.com/v1", "ServiceMonitor", owner.name,
                    spec={**target, "endpoints": [{"port": "metrics"}]}),
        ]  # fmt: skip
    return monitors
