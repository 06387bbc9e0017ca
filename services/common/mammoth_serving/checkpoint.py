"""Own one checkpoint directory: its config files, its shards, its digest.

The format is the upstream one: `config.json`, an optional `t2i_generation_config.json`, tokenizer files, and safetensors
in shards under `model.safetensors.index.json` or in one `model.safetensors`. Everything is checked against the shard
headers before a byte of tensor data is read. What the tensors mean is left to the stages; torch is reached only through
safetensors, so that this package imports without it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

__all__ = ["Checkpoint", "CheckpointError", "write_index"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100 * 2**20  # the safetensors format's own limit
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
              "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
NUM_NAMED = 6  # problems spelled out in one error; the rest is counted


class CheckpointError(ValueError):
    """A folder that is no usable checkpoint. The message names the file and every offending key."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: parsed JSON and shard headers, no tensor data.

    `digest` is the SHA-256 (hex) over config.json, the index when there is one, and every shard's header in name order.
    """

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    digest: str
    _shapes: Mapping[str, tuple[int, ...]]
    _shard_of: Mapping[str, str]

    @classmethod
    def open(cls, source: str | Path) -> Checkpoint:
        """Open a folder, or fetch a hub repository (`owner/name`, optionally `@revision`) and open its snapshot.

        Raises CheckpointError when the folder is missing, a file is absent, truncated or not what its name says.
        """
        path = _local(source)
        config_bytes = _read(path / "config.json")
        digest = hashlib.sha256(config_bytes)
        index_path = path / INDEX_NAME
        if index_path.exists():
            index_bytes = _read(index_path)
            digest.update(index_bytes)
            weight_map = _object(_json(index_path, index_bytes).get("weight_map"), f"{index_path}: weight_map")
            shards = sorted({str(shard) for shard in weight_map.values()})
        elif (path / SINGLE_NAME).exists():
            weight_map, shards = None, [SINGLE_NAME]
        else:
            raise CheckpointError(f"{path}: neither {INDEX_NAME} nor {SINGLE_NAME} is there")
        shapes: dict[str, tuple[int, ...]] = {}
        shard_of: dict[str, str] = {}
        for shard in shards:
            if Path(shard).name != shard:
                raise CheckpointError(f"{index_path}: shard name {shard!r} leaves the folder")
            header, found = _header(path / shard)
            digest.update(header)
            shapes |= found
            shard_of |= dict.fromkeys(found, shard)
        if weight_map is not None:
            _agree(index_path, {str(name): str(shard) for name, shard in weight_map.items()}, shard_of)
        generation_path = path / "t2i_generation_config.json"
        return cls(
            path=path,
            config=_json(path / "config.json", config_bytes),
            generation=_json(generation_path, _read(generation_path)) if generation_path.exists() else {},
            digest=digest.hexdigest(),
            _shapes=shapes,
            _shard_of=shard_of,
        )

    def names(self, prefix: str = "") -> list[str]:
        """Return the stored tensor names that start with `prefix`, sorted."""
        return sorted(name for name in self._shapes if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the stored tensor `name`; KeyError when it is not there."""
        return self._shapes[name]

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        *,
        prefixes: Sequence[str],
        ignored: Callable[[str], bool] = lambda name: False,
        canonical: Callable[[str], str] = lambda name: name,
    ) -> dict[str, str]:
        """Return {stored name: expected name}; raise CheckpointError naming every key that does not fit.

        `expected` maps canonical names to shapes. A stored name under one of `prefixes` that is neither expected nor
        `ignored` (asked with the canonical name) is an error, and so is a missing one or another shape.
        """
        stored = {name: canonical(name) for name in self._shapes}
        mine = {name: to for name, to in stored.items() if to.startswith(tuple(prefixes)) and not ignored(to)}
        found = set(mine.values())
        problems = [f"missing {name}" for name in expected if name not in found]
        problems += [f"unexpected {name}" for name, to in sorted(mine.items()) if to not in expected]
        problems += [
            f"{name} has shape {list(self._shapes[name])}, expected {list(expected[to])}"
            for name, to in sorted(mine.items())
            if to in expected and self._shapes[name] != tuple(expected[to])
        ]
        if problems:
            more = f"; and {len(problems) - NUM_NAMED} more" if len(problems) > NUM_NAMED else ""
            raise CheckpointError(f"{self.path}: " + "; ".join(problems[:NUM_NAMED]) + more)
        return mine

    def tensors(self, stored_names: Sequence[str], *, device: str = "cpu") -> Iterator[tuple[str, Any]]:
        """Yield (stored name, torch tensor on `device`), opening each shard once and only the shards that are needed."""
        by_shard: dict[str, list[str]] = {}
        for name in stored_names:
            by_shard.setdefault(self._shard_of[name], []).append(name)
        for shard in sorted(by_shard):
            with safe_open(self.path / shard, framework="pt", device=device) as file:
                for name in by_shard[shard]:
                    yield name, file.get_tensor(name)


def write_index(path: Path) -> None:
    """Write the index of every `model-*.safetensors` shard in `path`."""
    shard_of: dict[str, str] = {}
    total = 0
    for shard in sorted(path.glob("model-*.safetensors")):
        _, found = _header(shard)
        shard_of |= dict.fromkeys(found, shard.name)
        total += shard.stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))}
    (path / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")


def _local(source: str | Path) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    text = str(source)
    if path.exists() or text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise CheckpointError(
            f"{text}: not a checkpoint folder (a folder with config.json) and not a hub repository OWNER/NAME"
        )
    from huggingface_hub import snapshot_download  # slow to import, and only a download needs it
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo, _, revision = text.partition("@")
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision or None,
                allow_patterns=["*.json", "*.safetensors", "*.tiktoken", "*.txt", "*.jinja"],
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as err:
        raise CheckpointError(f"{text}: no such folder, and the hub did not answer with a snapshot: {err}") from err


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise CheckpointError(f"{path}: {err.strerror or err}") from err


def _json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as err:
        raise CheckpointError(f"{path}: not JSON: {err}") from err
    return _object(value, str(path))


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: an object is expected, not {type(value).__name__}")
    return value


def _header(path: Path) -> tuple[bytes, dict[str, tuple[int, ...]]]:
    """Return a shard's raw header (length word included) and its {name: shape}, checked against the file size."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            word = file.read(8)
            num_bytes = int.from_bytes(word, "little")
            if len(word) < 8 or num_bytes > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{path}: not a safetensors file, or truncated in its header ({size} bytes)")
            text = file.read(num_bytes)
    except OSError as err:
        raise CheckpointError(f"{path}: {err.strerror or err}") from err
    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in _json(path, text).items():
        if name == "__metadata__":
            continue
        try:
            shape = tuple(int(side) for side in entry["shape"])
            begin, end = (int(offset) for offset in entry["data_offsets"])
            num_tensor_bytes = math.prod(shape) * ITEM_BYTES[entry["dtype"]]
        except (KeyError, TypeError, ValueError) as err:
            raise CheckpointError(f"{path}: {name}: unreadable header entry") from err
        if end - begin != num_tensor_bytes:
            raise CheckpointError(
                f"{path}: {name}: shape {list(shape)} needs {num_tensor_bytes} bytes, the header gives {end - begin}"
            )
        if 8 + num_bytes + end > size:
            raise CheckpointError(
                f"{path}: {name}: truncated: it ends at byte {8 + num_bytes + end} of a file of {size}"
            )
        shapes[name] = shape
    return word + text, shapes


def _agree(index_path: Path, promised: Mapping[str, str], found: Mapping[str, str]) -> None:
    wrong = sorted(name for name in promised.keys() | found.keys() if promised.get(name) != found.get(name))
    if wrong:
        more = f" and {len(wrong) - NUM_NAMED} more" if len(wrong) > NUM_NAMED else ""
        raise CheckpointError(f"{index_path}: index and shards disagree about {', '.join(wrong[:NUM_NAMED])}{more}")
