"""Decide what one safetensors file holds from its header alone, without reading tensor data.

What is commonly wrong is said here, with the tensor's name; the rest of the format is left to safetensors to refuse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mammoth_serving.files import CheckpointError, parse_object

__all__ = ["FLOATS", "Shard", "Stored"]

FLOATS = ("F64", "F32", "F16", "BF16")  # what weights may be stored as
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
              "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
MAX_HEADER_BYTES = 100 * 2**20  # the safetensors format's own limit
MAX_AXES = 64  # of a torch tensor


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as the header describes it; `dtype` is the format's name, such as BF16."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """A file's raw header, its length word included, and its tensors by name."""

    header: bytes
    tensors: Mapping[str, Stored]

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Read the header of `path`. Raises CheckpointError when the file is not what its header says."""
        try:
            word, text, num_file_bytes = _read_header(path)
            tensors = {
                name: _stored(f"{path}: {name}", entry, num_file_bytes, len(word) + len(text))
                for name, entry in parse_object(text, str(path)).items()
                if name != "__metadata__"
            }
            with safe_open(path, framework="numpy"):
                return cls(word + text, tensors)
        except OSError as err:
            raise CheckpointError(f"{path}: {err.strerror or err}") from err
        except SafetensorError as err:
            raise CheckpointError(f"{path}: not a safetensors file: {err}") from err


def _read_header(path: Path) -> tuple[bytes, bytes, int]:
    """Return the length word, the header's text and the size of the file in bytes."""
    with path.open("rb") as file:
        num_file_bytes = path.stat().st_size
        word = file.read(8)
        num_bytes = int.from_bytes(word, "little")
        if len(word) < 8 or num_bytes > min(num_file_bytes - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path}: not a safetensors file, or truncated in its header ({num_file_bytes} bytes)"
            )
        return word, file.read(num_bytes), num_file_bytes


def _stored(where: str, entry: Any, num_file_bytes: int, begin_of_data: int) -> Stored:
    """Return what a header entry says; CheckpointError when it is ill-formed or does not fit the file."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        item_bytes = ITEM_BYTES.get(dtype)
    except (KeyError, TypeError, ValueError) as err:
        raise CheckpointError(f"{where}: unreadable header entry") from err
    if len(shape) > MAX_AXES or not all(type(count) is int and 0 <= count < 2**63 for count in (*shape, begin, end)):
        raise CheckpointError(f"{where}: unreadable header entry")
    if item_bytes is not None and end - begin != (num_bytes := math.prod(shape) * item_bytes):
        raise CheckpointError(f"{where}: shape {list(shape)} needs {num_bytes} bytes, the header gives {end - begin}")
    if begin_of_data + end > num_file_bytes:
        raise CheckpointError(
            f"{where}: truncated: it ends at byte {begin_of_data + end} of a file of {num_file_bytes}"
        )
    return Stored(dtype, shape)
