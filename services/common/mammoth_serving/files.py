"""Translate: the small files of a checkpoint to bytes, text and JSON objects, or to one line that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["CheckpointError", "as_object", "parse_object", "read_bytes", "read_object", "read_text"]


class CheckpointError(ValueError):
    """A folder that is no usable checkpoint. The message names the file and every offending key."""


def read_bytes(path: Path) -> bytes:
    """Return what `path` holds; CheckpointError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as err:
        raise CheckpointError(f"{path}: {err.strerror or err}") from err


def read_text(path: Path) -> str:
    """Return `path` read as UTF-8; CheckpointError when it is something else."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as err:
        raise CheckpointError(f"{path}: not UTF-8 text: {err}") from err


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; CheckpointError when it holds anything else."""
    return parse_object(read_bytes(path), str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object that `data` spells; the CheckpointError starts with `where`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise CheckpointError(f"{where}: not JSON: {err}") from err
    return as_object(value, where)


def as_object(value: Any, where: str) -> dict[str, Any]:
    """Return `value`, a parsed JSON value, when it is an object; the CheckpointError starts with `where`."""
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: an object is expected, not {type(value).__name__}")
    return value
