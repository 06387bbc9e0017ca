"""Translate: receipts, that is everything a picture's bits depend on, between the wire, frozen values and a file.

The file is JSON: `{"format": "mammoth-receipt-1", "receipt": {...}}`, the inner object being protobuf's JSON of
mammoth.v1.Receipt with the names of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar

from google.protobuf import json_format

from mammoth_wire.errors import InvalidRequest
from mammoth_wire.v1 import types_pb2

__all__ = ["ConditioningParameters", "DiffusionParameters", "Environment", "GenerateFields", "Receipt"]

FORMAT = "mammoth-receipt-1"
if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
SHA256_HEX = re.compile(r"[0-9a-f]{64}")


class GenerateFields(TypedDict, total=False):
    """What a request may carry beside its prompt. A field that is left out, or None, takes the deployment's default."""

    request_id: str | None
    negative_prompt: str | None
    height: int | None
    width: int | None
    ar_height: int | None
    ar_width: int | None
    steps: int | None
    guidance: float | None
    cfg_range: tuple[float, float] | list[float] | None
    ar_guidance: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    num_images: int | None
    output_format: str | None
    labels: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class DiffusionParameters:
    """How the DiT draws a picture, every default filled in. Sides are pixels."""

    height: int
    width: int
    steps: int
    guidance: float
    cfg_start: float
    cfg_end: float
    seed: int


@dataclass(frozen=True, slots=True)
class ConditioningParameters:
    """How the AR stage writes a grid of visual tokens, every default filled in. Sides are tokens."""

    ar_height: int
    ar_width: int
    ar_guidance: float
    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a stage ran, as far as bits depend on it."""

    stage: str
    device: str
    dtype: str
    kernels: str
    row_bucket: int
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Receipt:
    """Everything that a picture's bits depend on, and `rgb_sha256`, the digest of those bits (hex)."""

    request_id: str
    image_index: int
    prompt: str
    negative_prompt: str
    conditioning: ConditioningParameters
    diffusion: DiffusionParameters
    model_digest: str
    rows_sha256: str
    rgb_sha256: str
    ar: Environment
    dit: Environment

    @classmethod
    def from_message(cls, message: types_pb2.Receipt) -> Self:
        """Return the value of a wire message."""
        parts = {
            "conditioning": value_of(ConditioningParameters, message.conditioning),
            "diffusion": value_of(DiffusionParameters, message.diffusion),
            "ar": value_of(Environment, message.ar),
            "dit": value_of(Environment, message.dit),
        }
        return value_of(cls, message, **parts)

    def to_message(self) -> types_pb2.Receipt:
        """Return the wire message of this value."""
        return types_pb2.Receipt(**asdict(self))

    def to_json(self) -> str:
        """Return the text of a receipt file: sorted keys, every field present, a newline at the end."""
        text = json_format.MessageToDict(
            self.to_message(), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return json.dumps({"format": FORMAT, "receipt": text}, indent=2, sort_keys=True, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote. Raises InvalidRequest on field `receipt` when `text` is anything else."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as err:
            raise _unreadable(f"is not JSON: {err}") from err
        inner = document.get("receipt") if isinstance(document, dict) and document.get("format") == FORMAT else None
        if not isinstance(inner, dict):
            raise _unreadable(f"is not a receipt of format {FORMAT}")
        try:
            message = json_format.ParseDict(inner, types_pb2.Receipt())
        except json_format.ParseError as err:
            raise _unreadable(f"cannot be read: {str(err).splitlines()[0]}") from err
        if not SHA256_HEX.fullmatch(message.rgb_sha256):
            raise _unreadable("holds no rgb_sha256 to compare with")
        return cls.from_message(message)

    def request_fields(self) -> GenerateFields:
        """Return the fields that, with the prompt, ask for this one picture again.

        Raises InvalidRequest when the two stages used different seeds, which no public request can ask for.
        """
        if self.diffusion.seed != self.conditioning.seed:
            raise _unreadable(f"has two seeds, {self.conditioning.seed} and {self.diffusion.seed}")
        return {
            "negative_prompt": self.negative_prompt,
            "height": self.diffusion.height,
            "width": self.diffusion.width,
            "ar_height": self.conditioning.ar_height,
            "ar_width": self.conditioning.ar_width,
            "steps": self.diffusion.steps,
            "guidance": self.diffusion.guidance,
            "cfg_range": (self.diffusion.cfg_start, self.diffusion.cfg_end),
            "ar_guidance": self.conditioning.ar_guidance,
            "temperature": self.conditioning.temperature,
            "top_k": self.conditioning.top_k,
            "top_p": self.conditioning.top_p,
            "seed": self.diffusion.seed,
            "num_images": 1,
        }

    def differences(self, other: Receipt) -> tuple[str, ...]:
        """Return a line for every part of the two receipts that bits depend on and that is not equal."""
        mine, theirs = _flat(asdict(self)), _flat(asdict(other))
        names = [name for name in mine if name.split(".")[0] not in ("request_id", "image_index")]
        names += [name for name in theirs if name not in mine]
        pairs = ((name, mine.get(name, "absent"), theirs.get(name, "absent")) for name in names)
        return tuple(f"{name}: {ours} then, {new} now" for name, ours, new in pairs if ours != new)


def value_of(kind: type[T], message: Any, **replaced: Any) -> T:
    """Return a `kind` (a dataclass) whose fields are those of the same name in `replaced`, else in `message`."""
    names = [field.name for field in fields(kind)]
    found = {name: replaced[name] if name in replaced else getattr(message, name) for name in names}
    return kind(**{name: dict(value) if name == "versions" else value for name, value in found.items()})


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted names."""
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat |= _flat(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {f"{prefix}{name}": item}
    return flat


def _unreadable(text: str) -> InvalidRequest:
    return InvalidRequest([("receipt", text)])
