"""Decide: a MammothDeployment's spec as a frozen value. These declarations are also what the CRD is generated from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from mammoth_operator.fields import NAME, Rule, flag, listing, number, part, quantity, text
from mammoth_operator.names import Pool
from mammoth_operator.parsing import SpecError, read
from mammoth_operator.pool_spec import ArPool, DitPool, PoolSpec

__all__ = ["MAX_PIXELS", "MAX_STEPS", "Model", "PipelineSpec", "Rollout", "SpecError", "Tuning", "parse"]

MAX_PIXELS, MAX_STEPS = 4 * 2**20, 200  # as the wire has them, whose module would bring gRPC into decisions

PATH = r"^/[A-Za-z0-9._/-]*$"
CLOCK = r"^([01][0-9]|2[0-3]):[0-5][0-9]$"


@dataclass(frozen=True, slots=True)
class Hub:
    """A repository of the model hub."""

    repo: str = text("OWNER/NAME", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
    revision: str | None = text("full commit where possible; the default branch unless given", default=None,
                                max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pvc:
    """A folder of a volume."""

    claim_name: str = text("PersistentVolumeClaim", pattern=NAME)
    path: str = text("folder in the volume", default="/", pattern=PATH)


@dataclass(frozen=True, slots=True)
class ModelImage:
    """An image volume."""

    reference: str = text("image that holds the checkpoint at its root", max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """Where the checkpoint comes from: exactly one of these."""

    hub: Hub | None = part("repository of the model hub", Hub, default=None)
    pvc: Pvc | None = part("folder of a volume", Pvc, default=None)
    image: ModelImage | None = part("image volume", ModelImage, default=None)
    path: str | None = text("folder inside the container image", default=None, max_length=512, pattern=PATH)

    RULES: ClassVar = (
        Rule("[has(self.hub), has(self.pvc), has(self.image), has(self.path)].filter(x, x).size() == 1",
             "give exactly one of hub, pvc, image, path",
             lambda self: sum(x is not None for x in (self.hub, self.pvc, self.image, self.path)) == 1),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SecretKey:
    """One key of a Secret in the same namespace."""

    name: str = text("Secret", pattern=NAME)
    key: str = text("key of the Secret", default="token", max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")


@dataclass(frozen=True, slots=True)
class Cache:
    """Where downloaded files are kept."""

    type: str = text("none: the pod's own disk; emptyDir, pvc or image: a volume", default="none",
                     choices=("none", "emptyDir", "pvc", "image"))  # fmt: skip
    size: str | None = quantity("limit of an emptyDir")
    claim_name: str | None = text("PersistentVolumeClaim, for type pvc", default=None, pattern=NAME)
    reference: str | None = text("image that holds a hub cache, for type image", default=None, max_length=512)
    read_only: bool = flag("never write to it", default=False)

    RULES: ClassVar = (
        Rule("self.type != 'pvc' || has(self.claimName)", "type pvc needs claimName",
             lambda self: self.type != "pvc" or self.claim_name is not None, "claimName"),
        Rule("self.type != 'image' || has(self.reference)", "type image needs reference",
             lambda self: self.type != "image" or self.reference is not None, "reference"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """Which checkpoint."""

    source: Source = part("where the checkpoint comes from", Source)
    variant: str = text("model family; cannot be changed", default="Preview", choices=("Preview", "Dev"))
    token_secret_ref: SecretKey | None = part("hub token; only the downloader sees it", SecretKey, default=None)
    cache: Cache = part("where downloaded files are kept", Cache, default=Cache)

    IMMUTABLE: ClassVar = ("variant",)


@dataclass(frozen=True, slots=True)
class SloClass:
    """A promise for pictures up to a size."""

    name: str = text("unique name", max_length=32, pattern=NAME)
    p95_seconds: float = number("95th percentile of the time to a picture", low=0.01, high=3600, whole=False)
    max_pixels: int = number("largest picture", default=MAX_PIXELS, low=256, high=MAX_PIXELS)
    max_steps: int = number("most denoising steps", default=MAX_STEPS, low=1, high=MAX_STEPS)


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of a knob."""

    min: float = number("smallest value", low=0, high=10_000, whole=False)
    max: float = number("largest value", low=0, high=10_000, whole=False)

    RULES: ClassVar = (Rule("self.min <= self.max", "min must be at most max", lambda self: self.min <= self.max, "min"),)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far the tuner may go."""

    ar_max_num_seqs: Range | None = part("AR cap", Range, default=None)
    dit_max_num_seqs: Range | None = part("DiT cap", Range, default=None)
    request_batch_max_wait_ms: Range | None = part("DiT wait", Range, default=None)


@dataclass(frozen=True, slots=True)
class Freeze:
    """Hours, in UTC, in which the tuner changes nothing."""

    start: str = text("HH:MM", pattern=CLOCK, max_length=5)
    end: str = text("HH:MM, the next day when it is before start", pattern=CLOCK, max_length=5)


@dataclass(frozen=True, slots=True)
class Guard:
    """When the tuner may act, and when it takes a change back."""

    min_samples: int = number("pictures in a window before it is judged", default=30, low=1, high=10_000)
    cooldown_seconds: int = number("time between two changes", default=120, low=0, high=86_400)
    max_regression_percent: int = number("worsening of the 95th percentile that reverts a change", default=10, low=0, high=100)  # fmt: skip
    freeze_windows: tuple[Freeze, ...] = listing("hours without changes", Freeze, max_items=8)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Whether and how the live caps are tuned."""

    mode: str = text("Off, Recommend: say it in status, Auto: do it", default="Recommend", choices=("Off", "Recommend", "Auto"))  # fmt: skip
    objective: str | None = text("slo: cheapest that meets every class; throughput: most pictures", default=None,
                                 choices=("slo", "throughput"))  # fmt: skip
    slo_classes: tuple[SloClass, ...] = listing("promises, for objective slo", SloClass, max_items=16, keys=("name",))
    bounds: Bounds = part("how far the tuner may go", Bounds, default=Bounds)
    gpu_budget: int | None = number(
        "most devices of both pools together, for pools in scaling mode Operator", default=None, low=2, high=10_000
    )
    guard: Guard = part("when the tuner may act", Guard, default=Guard)

    RULES: ClassVar = (
        Rule("self.mode != 'Auto' || has(self.objective)", "mode Auto needs an objective",
             lambda self: self.mode != "Auto" or self.objective is not None, "objective"),
        Rule("!has(self.objective) || self.objective != 'slo' || (has(self.sloClasses) && size(self.sloClasses) > 0)",
             "objective slo needs at least one of sloClasses",
             lambda self: self.objective != "slo" or len(self.slo_classes) > 0, "sloClasses"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SecretName:
    """A Secret in the same namespace."""

    name: str = text("Secret", pattern=NAME)


@dataclass(frozen=True, slots=True)
class Tls:
    """Encryption between pools and operator."""

    mode: str = text("Disabled: plain text, Mutual: both sides show certificates", default="Disabled", choices=("Disabled", "Mutual"))  # fmt: skip
    secret_ref: SecretName | None = part("Secret with tls.crt, tls.key, ca.crt", SecretName, default=None)


@dataclass(frozen=True, slots=True)
class Transport:
    """How rows travel from AR to DiT."""

    chunk_rows: int = number("rows in a message", default=64, low=1, high=256)
    max_inflight_bytes_per_stream: int | None = number("unsent bytes of a stream", default=None, low=2**16, high=2**30)
    compression: str = text("of rows", default="none", choices=("none",))
    tls: Tls = part("encryption", Tls, default=Tls)


@dataclass(frozen=True, slots=True)
class Rollout:
    """How a new revision replaces the old one."""

    strategy: str = text("Paired: both pools side by side; Recreate: old ones leave first", default="Paired", choices=("Paired", "Recreate"))  # fmt: skip
    max_surge: int = number("replicas of a pool above the wanted number", default=1, low=0, high=1000)
    max_unavailable: int = number("replicas of a pool that may be missing", default=0, low=0, high=1000)
    progress_deadline_seconds: int = number("time without progress after which a rollout has failed", default=1800, low=10, high=86_400)  # fmt: skip
    auto_rollback: bool = flag("return to the last ready revision when a rollout has failed", default=True)

    RULES: ClassVar = (
        Rule("self.maxSurge + self.maxUnavailable > 0", "maxSurge and maxUnavailable must not both be 0",
             lambda self: self.max_surge + self.max_unavailable > 0, "maxSurge"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpenAi:
    """The HTTP images endpoint."""

    enabled: bool = flag("serve POST /v1/images/generations", default=False)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What clients call."""

    type: str = text("Service type", default="ClusterIP", choices=("ClusterIP", "NodePort", "LoadBalancer"))
    port: int = number("Service port", default=50051, low=1, high=65535)
    public_name: str | None = text("name under which clients reach it, shown in status", default=None, pattern=NAME)
    openai_compat: OpenAi = part("HTTP images endpoint", OpenAi, default=OpenAi)


@dataclass(frozen=True, slots=True)
class Tracing:
    """Where traces go."""

    endpoint: str = text("OTLP address", max_length=512)
    sampling_ratio: float = number("share of requests that is traced", default=0.1, low=0, high=1, whole=False)


@dataclass(frozen=True, slots=True)
class Observability:
    """What is watched, and by whom."""

    service_monitor: bool = flag("make a ServiceMonitor", default=False)
    pod_monitor: bool = flag("make a PodMonitor", default=False)
    tracing: Tracing | None = part("OpenTelemetry", Tracing, default=None)
    dashboards: bool = flag("make dashboards", default=False)


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """All of `spec`."""

    model: Model = part("which checkpoint", Model)
    ar: ArPool = part("the AR pool: the front door", ArPool)
    dit: DitPool = part("the DiT pool", DitPool)
    tuning: Tuning = part("whether and how the live caps are tuned", Tuning, default=Tuning)
    transport: Transport = part("how rows travel from AR to DiT", Transport, default=Transport)
    rollout: Rollout = part("how a new revision replaces the old one", Rollout, default=Rollout)
    endpoint: Endpoint = part("what clients call", Endpoint, default=Endpoint)
    observability: Observability = part("what is watched", Observability, default=Observability)
    restart_token: str = text("a new value rolls all pods once", default="", max_length=64)
    paused: bool = flag("write no owned object; status goes on", default=False)
    revision_history_limit: int = number("old revisions that can be returned to", default=10, low=0, high=20)
    deletion_policy: str = text("Drain: accepted work is finished before the pods go; Immediate", default="Drain", choices=("Drain", "Immediate"))  # fmt: skip

    RULES: ClassVar = (
        Rule("!has(self.tuning.bounds.arMaxNumSeqs) || self.tuning.bounds.arMaxNumSeqs.max <= double(self.ar.capacity.maxNumSeqs)",
             "tuning.bounds.arMaxNumSeqs.max must be at most ar.capacity.maxNumSeqs",
             lambda self: _within(self.tuning.bounds.ar_max_num_seqs, self.ar), "tuning.bounds.arMaxNumSeqs.max"),
        Rule("!has(self.tuning.bounds.ditMaxNumSeqs) || self.tuning.bounds.ditMaxNumSeqs.max <= double(self.dit.capacity.maxNumSeqs)",
             "tuning.bounds.ditMaxNumSeqs.max must be at most dit.capacity.maxNumSeqs",
             lambda self: _within(self.tuning.bounds.dit_max_num_seqs, self.dit), "tuning.bounds.ditMaxNumSeqs.max"),
    )  # fmt: skip

    def pool(self, pool: Pool) -> PoolSpec:
        """Return the pool of that name."""
        return self.ar if pool == "ar" else self.dit


def _within(bounds: Range | None, pool: PoolSpec) -> bool:
    return bounds is None or bounds.max <= pool.capacity.max_num_seqs


def parse(mapping: Mapping[str, Any]) -> PipelineSpec:
    """Return the spec that `mapping` holds.

    Raises SpecError with a line for each field that is unknown, missing, of the wrong type or beyond its limit, and for each
    broken rule; a line names the field and the limit.
    """
    return read(PipelineSpec, mapping, "spec")
