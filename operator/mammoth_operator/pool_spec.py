"""Decide: one GPU pool as a user writes it: what runs, where, on how much, and how many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mammoth_operator.fields import NAME, Declaration, Rule, listing, mapping, number, opaque, part, quantity, text

__all__ = ["Accelerator", "ArPool", "Capacity", "DitPool", "NodePool", "PoolSpec", "Resources", "Scaling"]

IMAGE = r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$"
MAX_REPLICAS = 1000
MAX_CAPACITY = 1024


@dataclass(frozen=True, slots=True)
class Scaling:
    """Who decides how many replicas there are."""

    mode: str = text("Static: this object; Operator: the planner, within the bounds; External: whoever writes the scale subresource",
                     default="Static", choices=("Static", "Operator", "External"))  # fmt: skip
    min_replicas: int = number("fewest replicas in mode Operator", default=1, low=0, high=MAX_REPLICAS)
    max_replicas: int = number("most replicas in mode Operator", default=1, low=0, high=MAX_REPLICAS)

    RULES: ClassVar = (
        Rule("self.mode != 'Operator' || self.minReplicas <= self.maxReplicas", "minReplicas must be at most maxReplicas",
             lambda self: self.mode != "Operator" or self.min_replicas <= self.max_replicas, "minReplicas"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The device of a replica: a counted resource, or a claim."""

    resource_name: str = text("extended resource that is counted", default="nvidia.com/gpu", max_length=128)
    count: int | None = number("devices a replica; 0 runs on the CPU; 1 unless given", default=None, low=0, high=16)
    claim_template_name: str | None = text("ResourceClaimTemplate for dynamic resource allocation, instead of count",
                                           default=None, pattern=NAME)  # fmt: skip
    mig_profile: str | None = text("MIG slice, such as 3g.40gb: the resource becomes nvidia.com/mig-3g.40gb", default=None,
                                   max_length=32, pattern=r"^[0-9]+g\.[0-9]+gb$")  # fmt: skip

    RULES: ClassVar = (
        Rule("!(has(self.count) && has(self.claimTemplateName))", "give count or claimTemplateName, not both",
             lambda self: self.count is None or self.claim_template_name is None, "claimTemplateName"),
    )  # fmt: skip

    @property
    def on_cpu(self) -> bool:
        return self.count == 0

    @property
    def resource(self) -> str:
        return f"nvidia.com/mig-{self.mig_profile}" if self.mig_profile else self.resource_name


@dataclass(frozen=True, slots=True)
class Toleration:
    """A taint that replicas put up with."""

    key: str = text("taint key; empty matches all with operator Exists", default="", max_length=316)
    operator: str = text("how value is compared", default="Equal", choices=("Equal", "Exists"))
    value: str = text("taint value", default="", max_length=63)
    effect: str = text("taint effect; empty matches all", default="", choices=("", "NoSchedule", "PreferNoSchedule", "NoExecute"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class TopologySpread:
    """How replicas spread over nodes or zones."""

    topology_key: str = text("node label whose values are the domains", max_length=316)
    max_skew: int = number("largest difference between domains", default=1, low=1, high=100)
    when_unsatisfiable: str = text("what then", default="ScheduleAnyway", choices=("ScheduleAnyway", "DoNotSchedule"))


@dataclass(frozen=True, slots=True)
class NodePool:
    """Which nodes."""

    node_selector: Mapping[str, str] = mapping("labels that a node must have", max_length=63)
    tolerations: tuple[Toleration, ...] = listing("taints that replicas put up with", Toleration, max_items=16)
    affinity: Mapping[str, Any] = opaque("node and pod affinity, as in a pod; replaces the soft defaults")
    topology_spread: tuple[TopologySpread, ...] = listing("spread; one soft rule by host unless given", TopologySpread,
                                                          max_items=4, keys=("topologyKey",))  # fmt: skip
    runtime_class_name: str | None = text("RuntimeClass of the pods", default=None, pattern=NAME)
    priority_class_name: str | None = text("PriorityClass of the pods", default=None, pattern=NAME)
    scheduler_name: str | None = text("scheduler other than the default one", default=None, pattern=NAME)
    queue_name: str | None = text("Kueue local queue", default=None, max_length=63, pattern=NAME)


@dataclass(frozen=True, slots=True)
class Resources:
    """What a replica takes besides its device; limits equal requests."""

    cpu: str | None = quantity("cores")
    memory: str | None = quantity("memory, shared memory included")
    ephemeral_storage: str | None = quantity("local disk")
    shm_size: str = quantity("size of /dev/shm", default="8Gi")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a process allocates when it starts; a change is a rollout."""

    max_num_seqs: int = number("jobs in one batch", default=8, low=1, high=MAX_CAPACITY)


@dataclass(frozen=True, slots=True)
class ArCapacity(Capacity):
    """What an AR process allocates when it starts; a change is a rollout."""

    max_num_seqs: int = number("rows in the KV cache; guidance doubles a picture's rows", default=32, low=1, high=MAX_CAPACITY)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One pool. Absent means the default; an empty object means its defaults."""

    image: str = text("container image, by digest where possible", max_length=512, pattern=IMAGE)
    replicas: int | None = number("replicas in mode Static; the scale subresource writes it in mode External", default=None,
                                  low=0, high=MAX_REPLICAS)  # fmt: skip
    scaling: Scaling = part("who decides how many replicas", Scaling, default=Scaling)
    image_pull_policy: str = text("when the image is pulled", default="IfNotPresent", choices=("Always", "IfNotPresent", "Never"))  # fmt: skip
    image_pull_secrets: tuple[str, ...] = listing("Secrets that the image is pulled with", Declaration("text", "", pattern=NAME), max_items=8)  # fmt: skip
    accelerator: Accelerator = part("device of a replica", Accelerator, default=Accelerator)
    node_pool: NodePool = part("which nodes", NodePool, default=NodePool)
    resources: Resources = part("what a replica takes besides its device", Resources, default=Resources)
    capacity: Capacity = part("what a process allocates; a change is a rollout", Capacity, default=Capacity)
    max_num_seqs: int | None = number("live cap within the capacity; the capacity unless given. No restart", default=None,
                                      low=1, high=MAX_CAPACITY)  # fmt: skip
    drain_seconds: int = number("longest wait for accepted work when a replica leaves", default=90, low=0, high=3600)
    pod_overrides: Mapping[str, Any] = opaque("labels, annotations, env, envFrom, volumes, volumeMounts, hostAliases, dnsPolicy, "
                                              "dnsConfig, securityContext of the pods")  # fmt: skip

    RULES: ClassVar = (
        Rule("self.scaling.mode != 'Static' || has(self.replicas)", "scaling.mode Static needs replicas",
             lambda self: self.scaling.mode != "Static" or self.replicas is not None, "replicas"),
        Rule("!has(self.maxNumSeqs) || self.maxNumSeqs <= self.capacity.maxNumSeqs", "maxNumSeqs must be at most capacity.maxNumSeqs",
             lambda self: self.max_num_seqs is None or self.max_num_seqs <= self.capacity.max_num_seqs, "maxNumSeqs"),
    )  # fmt: skip

    @property
    def cap(self) -> int:
        """Return the live cap in force unless the tuner has another one."""
        return self.capacity.max_num_seqs if self.max_num_seqs is None else self.max_num_seqs


@dataclass(frozen=True, slots=True)
class ArPool(PoolSpec):
    """The AR stage: the public front door."""

    capacity: Capacity = part("what a process allocates; a change is a rollout", ArCapacity, default=ArCapacity)
    drain_seconds: int = number("longest wait for accepted work when a replica leaves", default=120, low=0, high=3600)
    weights: str = text("storage of the weights; a change is a rollout", default="bf16", choices=("bf16", "fp8"))
    head_alignment: str = text("which gen_head row scores an id (Dev); a change is a rollout", default="concat",
                               choices=("concat", "aligned"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class DitPool(PoolSpec):
    """The DiT stage."""

    request_batch_max_wait_ms: float = number("live: longest wait of an idle device for company; no use in step mode", default=20.0,
                                              low=0, high=10_000, whole=False)  # fmt: skip
    batching: str = text("request: waves of equal shape; step: jobs join at step boundaries; a change is a rollout",
                         default="request", choices=("request", "step"))  # fmt: skip
    precision: str = text("of the block linears; a change is a rollout", default="bf16", choices=("bf16", "fp8"))
    step_cache: str = text("reuse between steps; a change is a rollout", default="off", choices=("off", "residual"))
