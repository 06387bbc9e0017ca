"""Decide: what a stage's bits depend on besides the request, as it stands in receipts and in GetState."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version

from mammoth_wire.v1 import types_pb2

__all__ = ["describe"]


def describe(
    stage: str, *, device: str, dtype: str, kernels: str, row_bucket: int, packages: Sequence[str]
) -> types_pb2.Environment:
    """Return the environment of a stage; `packages` are those whose numerics it uses.

    `device` names the accelerator, or is `cpu` with its number of threads: both decide how sums are split.
    """
    versions = {name: version(name) for name in ("mammoth-serve", *packages)}
    return types_pb2.Environment(
        stage=stage,
        device=f"{platform.machine()} {device}" if device.startswith("cpu") else device,
        dtype=dtype,
        kernels=kernels,
        row_bucket=row_bucket,
        versions={"python": platform.python_version(), **versions},
    )
