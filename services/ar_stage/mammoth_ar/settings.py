"""Translate: the AR stage's flags and variables, on top of what both stages take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mammoth_serving.config import ConfigError, ServingSettings, setting

__all__ = ["ArSettings", "parse_targets"]


@dataclass(frozen=True, slots=True)
class ArSettings(ServingSettings):
    """mammoth-ar: the AR stage, the public front door."""

    dit_target: str = setting("DiT replicas: dns:///NAME:PORT, or HOST:PORT,HOST:PORT,...", default="127.0.0.1:50061")
    capacity: int = setting("rows allocated for at start; a guided picture takes two", default=32, low=1, high=1024)
    drain_seconds: float = setting("longest wait for accepted work on SIGTERM", default=120.0, low=0, high=3600)
    kernels: Literal["auto", "plain", "fast"] = setting(
        "auto: fast for bfloat16 on a GPU, plain elsewhere; what cannot run fast runs plain", default="auto"
    )
    weights: Literal["bf16", "fp8"] = setting("storage of the layers' matrices in the fast path", default="bf16")
    head_alignment: Literal["concat", "aligned"] = setting("which gen_head row scores an id (Dev)", default="concat")
    max_context: int = setting("positions of a row: prompt, grid and one", default=8192, low=16, high=262_144)
    prefill_chunk: int = setting("prompt tokens of one prefill call", default=256, low=1, high=8192)


def parse_targets(text: str) -> list[str]:
    """Return the gRPC targets of the DiT replicas; ConfigError when there is none or one has no port."""
    targets = [item.strip() for item in text.split(",") if item.strip()]
    for target in targets:
        if not target.rpartition(":")[2].isdecimal():
            raise ConfigError(f"--dit-target: {target!r} is not HOST:PORT and not dns:///NAME:PORT")
    if not targets:
        raise ConfigError("--dit-target: names no replica; HOST:PORT,... or dns:///NAME:PORT")
    return targets
