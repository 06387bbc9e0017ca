"""Decide: the pod of a pool: flags, probes, volumes, security. Pure; equal specs give equal pods."""

from __future__ import annotations

from typing import Any

from mammoth_operator.names import (
    CONTROL_PORT,
    GROUP,
    GRPC_PORT,
    HEALTH_PORT,
    LIVENESS_SERVICE,
    METRICS_PORT,
    Pool,
    child_name,
    selector,
)
from mammoth_operator.pool_spec import PoolSpec
from mammoth_operator.quantities import cores
from mammoth_operator.spec import PipelineSpec

__all__ = ["checkpoint_path", "pod_template"]

Manifest = dict[str, Any]
PORTS = (("grpc", GRPC_PORT), ("control", CONTROL_PORT), ("health", HEALTH_PORT), ("metrics", METRICS_PORT))
STARTUP_TRIES = {"ar": 180, "dit": 90}
PROBE_PERIOD_S = 10
PRE_STOP_S = 5
GRACE_S = 30
MODEL_DIR, CACHE_DIR = "/var/lib/mammoth/model", "/var/cache/huggingface"
GPU_TAINT = "nvidia.com/gpu"
ZONE, HOST = "topology.kubernetes.io/zone", "kubernetes.io/hostname"
THREADS = "OMP_NUM_THREADS"
LOCKED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def pod_template(name: str, spec: PipelineSpec, pool: Pool, revision: str, labels: dict[str, str]) -> Manifest:
    """Return the pod template of `pool` in `revision`; `labels` are on every pod."""
    wanted = spec.pool(pool)
    extra = wanted.pod_overrides
    queue = {"kueue.x-k8s.io/queue-name": wanted.node_pool.queue_name} if wanted.node_pool.queue_name else {}
    annotations = {f"{GROUP}/restart-token": spec.restart_token} if spec.restart_token else {}
    annotations |= extra.get("annotations", {})
    return {
        "metadata": {
            "labels": {**extra.get("labels", {}), **labels, **queue},
            **({"annotations": annotations} if annotations else {}),
        },
        "spec": _pod(name, spec, pool, revision),
    }


def _pod(name: str, spec: PipelineSpec, pool: Pool, revision: str) -> Manifest:
    wanted = spec.pool(pool)
    extra = wanted.pod_overrides
    pod: Manifest = {
        "serviceAccountName": name,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": wanted.drain_seconds + GRACE_S,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **extra.get("securityContext", {})},
        "containers": [_container(name, spec, pool, revision)],
        "volumes": [*_volumes(spec, wanted), *extra.get("volumes", [])],
        **_placement(name, wanted, pool),
    }  # fmt: skip
    if spec.model.source.hub:
        pod["initContainers"] = [_downloader(spec, wanted)]
    if wanted.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": secret} for secret in wanted.image_pull_secrets]
    if wanted.accelerator.claim_template_name:
        pod["resourceClaims"] = [{"name": "device", "resourceClaimTemplateName": wanted.accelerator.claim_template_name}]  # fmt: skip
    return pod | {key: extra[key] for key in ("hostAliases", "dnsPolicy", "dnsConfig") if key in extra}


def _container(name: str, spec: PipelineSpec, pool: Pool, revision: str) -> Manifest:
    wanted = spec.pool(pool)
    extra = wanted.pod_overrides
    container = {
        "name": pool,
        "image": wanted.image,
        "imagePullPolicy": wanted.image_pull_policy,
        "command": [f"mammoth-{pool}"],
        "args": _flags(name, spec, pool, revision),
        "env": [*_environment(name, pool, wanted), *extra.get("env", [])],
        "ports": [{"name": port, "containerPort": number, "protocol": "TCP"} for port, number in PORTS],
        "startupProbe": _probe(PROBE_PERIOD_S, STARTUP_TRIES[pool]),
        "readinessProbe": _probe(5, 2),
        "livenessProbe": _probe(PROBE_PERIOD_S, 6, LIVENESS_SERVICE),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_S)]}}},
        "securityContext": LOCKED,
        "volumeMounts": [*_mounts(spec), *extra.get("volumeMounts", [])],
    }
    resources = _resources(wanted)
    if resources:
        container["resources"] = resources
    return container | ({"envFrom": list(extra["envFrom"])} if "envFrom" in extra else {})


def _flags(name: str, spec: PipelineSpec, pool: Pool, revision: str) -> list[str]:
    wanted = spec.pool(pool)
    values = {
        "model": checkpoint_path(spec),
        "device": "cpu" if wanted.accelerator.on_cpu else "cuda",
        "host": "0.0.0.0",
        "capacity": wanted.capacity.max_num_seqs,
        "drain-seconds": wanted.drain_seconds,
    }
    if pool == "ar":
        target = f"dns:///{child_name(name, 'dit', revision)}:{GRPC_PORT}"
        values |= {"dit-target": target, "weights": spec.ar.weights, "head-alignment": spec.ar.head_alignment}
    else:
        values |= {"batching": spec.dit.batching, "precision": spec.dit.precision, "step-cache": spec.dit.step_cache}
    return [f"--{flag}={value}" for flag, value in values.items()]


def _environment(name: str, pool: Pool, wanted: PoolSpec) -> list[Manifest]:
    """Return the variables: the live caps come from the ConfigMap, so that a late pod starts with those in force.

    A container sees every core of its node; more threads than it may use wait for each other.
    """
    knobs = ["max-num-seqs"] + (["request-batch-max-wait-ms"] if pool == "dit" else [])
    caps = [
        {
            "name": f"MAMMOTH_{knob.replace('-', '_').upper()}",
            "valueFrom": {"configMapKeyRef": {"name": name, "key": f"{pool}.{knob}", "optional": True}},
        }
        for knob in knobs
    ]
    theirs = {entry.get("name") for entry in wanted.pod_overrides.get("env", [])}
    limit = "" if THREADS in theirs else wanted.resources.cpu
    threads = [{"name": THREADS, "value": str(cores(limit))}] if limit else []
    return [*caps, *threads, {"name": "HF_HUB_OFFLINE", "value": "1"}, {"name": "HF_HOME", "value": CACHE_DIR}]


def checkpoint_path(spec: PipelineSpec) -> str:
    """Return the folder in which the container finds the checkpoint."""
    source = spec.model.source
    if source.path is not None:
        return source.path
    if source.pvc:
        return MODEL_DIR + source.pvc.path.rstrip("/")
    return MODEL_DIR


def _probe(period_s: int, tries: int, service: str = "") -> Manifest:
    asked = {"port": HEALTH_PORT} | ({"service": service} if service else {})
    return {"grpc": asked, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": tries}


def _resources(wanted: PoolSpec) -> Manifest:
    amounts: dict[str, str] = {}
    for key, amount in (("cpu", wanted.resources.cpu), ("memory", wanted.resources.memory), ("ephemeral-storage", wanted.resources.ephemeral_storage)):  # fmt: skip
        if amount:
            amounts[key] = amount
    device = wanted.accelerator
    if device.claim_template_name:
        claims = [{"name": "device"}]
        return {"claims": claims} | ({"requests": amounts, "limits": amounts} if amounts else {})
    if not device.on_cpu:
        amounts[device.resource] = str(1 if device.count is None else device.count)
    return {"requests": amounts, "limits": amounts} if amounts else {}


def _volumes(spec: PipelineSpec, wanted: PoolSpec) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": wanted.resources.shm_size}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", **_cache(spec)},
    ]
    source = spec.model.source
    if source.pvc:
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": source.pvc.claim_name, "readOnly": True}})  # fmt: skip
    elif source.image:
        volumes.append({"name": "model", "image": {"reference": source.image.reference, "pullPolicy": "IfNotPresent"}})
    elif source.hub:
        volumes.append({"name": "model", **(_cache(spec) if spec.model.cache.type == "pvc" else {"emptyDir": {}})})
    return volumes


def _cache(spec: PipelineSpec) -> Manifest:
    cache = spec.model.cache
    match cache.type:
        case "pvc":
            return {"persistentVolumeClaim": {"claimName": cache.claim_name}}
        case "image":
            return {"image": {"reference": cache.reference, "pullPolicy": "IfNotPresent"}}
        case _:
            return {"emptyDir": {"sizeLimit": cache.size} if cache.size else {}}


def _mounts(spec: PipelineSpec) -> list[Manifest]:
    cache = _mount(spec, "cache", CACHE_DIR)
    if spec.model.cache.type == "image" or spec.model.cache.read_only:
        cache["readOnly"] = True
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}, {"name": "tmp", "mountPath": "/tmp"}, cache]
    if spec.model.source.path is None:
        mounts.append(_mount(spec, "model", MODEL_DIR) | {"readOnly": True})
    return mounts


def _mount(spec: PipelineSpec, volume: str, path: str) -> Manifest:
    """Return a mount; the hub's files and its cache are two folders of one volume when that is a claim."""
    shared = spec.model.source.hub and spec.model.cache.type == "pvc"
    return {"name": volume, "mountPath": path, **({"subPath": volume} if shared else {})}


def _downloader(spec: PipelineSpec, wanted: PoolSpec) -> Manifest:
    """Return the init container that fetches the checkpoint: the only one that sees the token and the network."""
    hub, secret = spec.model.source.hub, spec.model.token_secret_ref
    assert hub is not None
    revision = ["--revision", hub.revision] if hub.revision else []
    environment: list[Manifest] = [{"name": "HF_HOME", "value": CACHE_DIR}, {"name": "HF_HUB_OFFLINE", "value": "0"}]
    if secret:
        environment.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}})  # fmt: skip
    return {
        "name": "download",
        "image": wanted.image,
        "imagePullPolicy": wanted.image_pull_policy,
        "command": ["hf", "download", hub.repo, *revision, "--local-dir", MODEL_DIR],
        "env": environment,
        "securityContext": LOCKED,
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            _mount(spec, "cache", CACHE_DIR),
            _mount(spec, "model", MODEL_DIR),
        ],
    }


def _placement(name: str, wanted: PoolSpec, pool: Pool) -> Manifest:
    nodes = wanted.node_pool
    spread = [
        {"maxSkew": rule.max_skew, "topologyKey": rule.topology_key, "whenUnsatisfiable": rule.when_unsatisfiable,
         "labelSelector": {"matchLabels": selector(name, pool)}}
        for rule in nodes.topology_spread
    ] or [
        {"maxSkew": 1, "topologyKey": HOST, "whenUnsatisfiable": "ScheduleAnyway",
         "labelSelector": {"matchLabels": selector(name, pool)}}
    ]  # fmt: skip
    placement: Manifest = {"topologySpreadConstraints": spread, "affinity": dict(nodes.affinity) or _near(name, pool)}
    tolerations = [
        {key: value for key, value in (("key", rule.key), ("operator", rule.operator), ("value", rule.value), ("effect", rule.effect)) if value}
        for rule in nodes.tolerations
    ]  # fmt: skip
    if not wanted.accelerator.on_cpu and not any(rule.key == GPU_TAINT for rule in nodes.tolerations):
        tolerations.append({"key": GPU_TAINT, "operator": "Exists", "effect": "NoSchedule"})
    for key, value in (
        ("tolerations", tolerations),
        ("nodeSelector", dict(nodes.node_selector)),
        ("runtimeClassName", None if wanted.accelerator.on_cpu else nodes.runtime_class_name),
        ("priorityClassName", nodes.priority_class_name),
        ("schedulerName", nodes.scheduler_name),
    ):
        if value:
            placement[key] = value
    return placement


def _near(name: str, pool: Pool) -> Manifest:
    """Return soft rules: apart from pool mates by host, in the zone of the other pool."""
    other: Pool = "dit" if pool == "ar" else "ar"
    return {
        "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [_term(name, pool, HOST, 50)]},
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [_term(name, other, ZONE, 50)]},
    }


def _term(name: str, pool: Pool, topology: str, weight: int) -> Manifest:
    return {
        "weight": weight,
        "podAffinityTerm": {"topologyKey": topology, "labelSelector": {"matchLabels": selector(name, pool)}},
    }
