"""Own one checkpoint directory: its config files, its shards, its digest.

The format is the upstream one: `config.json`, an optional `t2i_generation_config.json`, tokenizer files, and safetensors
in shards under `model.safetensors.index.json` or in one `model.safetensors`. Everything is checked against the shard
headers before a byte of tensor data is read. What the tensors mean is left to the stages; torch is reached only through
safetensors, so that this package imports without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from mammoth_serving.files import CheckpointError, as_object, parse_object, read_bytes, read_object
from mammoth_serving.shards import FLOATS, Shard, Stored
from mammoth_wire.errors import InvalidRequest
from mammoth_wire.params import Defaults, resolve_generation

__all__ = ["Checkpoint", "CheckpointError", "write_index"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
GENERATION_NAME = "t2i_generation_config.json"
GENERATION_NUMBERS = ("height", "width", "temperature", "top_k", "top_p", "repetition_penalty")
NUM_NAMED = 6  # problems spelled out in one error; the rest is counted


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: parsed JSON and shard headers, no tensor data.

    `digest` is the SHA-256 (hex) over config.json, the index when there is one, and every shard's header in name order.
    """

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    digest: str
    _tensors: Mapping[str, Stored]
    _shard_of: Mapping[str, str]

    @classmethod
    def open(cls, source: str | Path) -> Checkpoint:
        """Open a folder, or fetch a hub repository (`owner/name`, optionally `@revision`) and open its snapshot.

        Raises CheckpointError when the folder is missing, a file is absent, truncated or not what its name says.
        """
        path = _local(source)
        config_bytes = read_bytes(path / "config.json")
        digest = hashlib.sha256(config_bytes)
        index_path = path / INDEX_NAME
        if index_path.exists():
            index_bytes = read_bytes(index_path)
            digest.update(index_bytes)
            weight_map = as_object(
                parse_object(index_bytes, str(index_path)).get("weight_map"), f"{index_path}: weight_map"
            )
            shards = sorted({str(shard) for shard in weight_map.values()})
        elif (path / SINGLE_NAME).exists():
            weight_map, shards = None, [SINGLE_NAME]
        else:
            raise CheckpointError(f"{path}: neither {INDEX_NAME} nor {SINGLE_NAME} is there")
        tensors: dict[str, Stored] = {}
        shard_of: dict[str, str] = {}
        for name in shards:
            if Path(name).name != name or not name.isprintable():
                raise CheckpointError(f"{index_path}: shard name {name!r} is no name of a file in the folder")
            shard = Shard.open(path / name)
            digest.update(shard.header)
            tensors |= shard.tensors
            shard_of |= dict.fromkeys(shard.tensors, name)
        if weight_map is not None:
            _agree(index_path, {str(name): str(shard) for name, shard in weight_map.items()}, shard_of)
        generation_path = path / GENERATION_NAME
        return cls(
            path=path,
            config=parse_object(config_bytes, str(path / "config.json")),
            generation=read_object(generation_path) if generation_path.exists() else {},
            digest=digest.hexdigest(),
            _tensors=tensors,
            _shard_of=shard_of,
        )

    def names(self, prefix: str = "") -> list[str]:
        """Return the stored tensor names that start with `prefix`, sorted."""
        return sorted(name for name in self._tensors if name.startswith(prefix))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the stored tensor `name`; KeyError when it is not there."""
        return self._tensors[name].shape

    def defaults(self) -> Defaults:
        """Return the values of fields that a request leaves out: ours, where t2i_generation_config.json sets none.

        Raises CheckpointError naming the file, every unusable key and what it may be.
        """
        path = self.path / GENERATION_NAME
        try:
            defaults = Defaults.from_generation_config(self.generation)
            resolve_generation({"prompt": "x"}, defaults=defaults)
        except InvalidRequest as err:
            raise CheckpointError(f"{path}: {err}") from err
        if quoted := [key for key in GENERATION_NUMBERS if isinstance(self.generation.get(key), str)]:
            raise CheckpointError(f"{path}: {quoted[0]}: {self.generation[quoted[0]]!r} is text, not a number")
        if not isinstance(do_sample := self.generation.get("do_sample"), bool | None):
            raise CheckpointError(f"{path}: do_sample: {do_sample!r:.40} is not true or false")
        return defaults

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
        `ignored` (asked with the canonical name) is an error, and so is a missing one, another shape, or a dtype that
        is not floating point of 16 bits or more.
        """
        stored = {name: canonical(name) for name in self._tensors}
        mine = {name: to for name, to in stored.items() if to.startswith(tuple(prefixes)) and not ignored(to)}
        found = set(mine.values())
        problems = [f"missing {name}" for name in expected if name not in found]
        problems += [f"unexpected {name}" for name, to in sorted(mine.items()) if to not in expected]
        for name, to in sorted(mine.items()):
            if to in expected:
                problems += _misfits(name, self._tensors[name], tuple(expected[to]))
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
        shard_of |= dict.fromkeys(Shard.open(shard).tensors, shard.name)
        total += shard.stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))}
    (path / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")


def _local(source: str | Path) -> Path:
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            return path
    except (OSError, RuntimeError) as err:  # a folder closed to us, a home that nobody has
        raise CheckpointError(f"{source}: {err}") from err
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


def _misfits(name: str, stored: Stored, expected: tuple[int, ...]) -> Iterator[str]:
    if stored.shape != expected:
        yield f"{name} has shape {list(stored.shape)}, expected {list(expected)}"
    if stored.dtype not in FLOATS:
        yield f"{name} is stored as {stored.dtype}, not as {', '.join(FLOATS[:-1])} or {FLOATS[-1]}"


def _agree(index_path: Path, promised: Mapping[str, str], found: Mapping[str, str]) -> None:
    wrong = sorted(name for name in promised.keys() | found.keys() if promised.get(name) != found.get(name))
    if wrong:
        more = f" and {len(wrong) - NUM_NAMED} more" if len(wrong) > NUM_NAMED else ""
        raise CheckpointError(f"{index_path}: index and shards disagree about {', '.join(wrong[:NUM_NAMED])}{more}")
