"""Translate: the DiT stage's flags and variables, on top of what both stages take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mammoth_serving.config import ConfigError, ServingSettings, setting

__all__ = ["DitSettings", "parse_sizes"]


@dataclass(frozen=True, slots=True)
class DitSettings(ServingSettings):
    """mammoth-dit: the DiT stage."""

    batching: Literal["request", "step"] = setting(
        "request: waves of equal height, width and steps; step: pictures join and leave at any step, the most urgent first",
        default="request",
    )
    request_batch_max_wait_ms: float = setting("longest wait for company", default=20.0, low=0, high=10_000)
    kernels: Literal["auto", "plain", "fast"] = setting(
        "auto: fast for bfloat16 on a GPU, plain elsewhere; what cannot run fast runs plain", default="auto"
    )
    precision: Literal["bf16", "fp8"] = setting("of the block linears in the fast path", default="bf16")
    step_cache: Literal["off", "residual"] = setting(
        "reuse of what the main blocks added, in the fast path: faster pictures that differ a little", default="off"
    )
    warm_sizes: str = setting("WIDTHxHEIGHT,... drawn before serving; empty: the default size", default="")
    max_rows: int = setting("most conditioning rows of a picture", default=16_384, low=1, high=262_144)


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """Return (height, width) of each `WIDTHxHEIGHT` in a comma list; ConfigError for anything else."""
    sizes = []
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        width, _, height = item.partition("x")
        if not (width.isdecimal() and height.isdecimal()):
            raise ConfigError(f"--warm-sizes: {item!r} is not WIDTHxHEIGHT in pixels")
        sizes.append((int(height), int(width)))
    return sizes
