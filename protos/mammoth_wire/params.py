"""Decide: the one parameter resolver: defaults, bounds and the batch key of a picture, whatever source they come from.

Client-side checks, AR admission, DiT admission and execution all call it, so they cannot disagree. It takes a neutral
mapping (`prompt`, `sampling` with `extra_args`, `additional_information`) and the flat fields of the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from mammoth_wire.errors import InvalidRequest
from mammoth_wire.v1 import image_generation_pb2, types_pb2

__all__ = [
    "MAX_PIXELS", "MAX_SEED", "MAX_STEPS", "UNBOUNDED", "Bounds", "Conditioning", "Defaults", "Diffusion", "Generation", "conditioning_message",
    "diffusion_message", "from_message", "neutral_diffusion", "resolve_diffusion", "resolve_generation",
]  # fmt: skip

MAX_SEED = 2**63 - 1
MAX_PIXELS, MAX_STEPS = 4 * 2**20, 200  # of a picture, where a deployment says no less
MAX_VIOLATIONS = 12  # named in one answer
FIELDS = (
    "request_id", "prompt", "negative_prompt", "height", "width", "ar_height", "ar_width", "steps", "guidance", "cfg_range",
    "ar_guidance", "temperature", "top_k", "top_p", "seed", "num_images", "output_format", "labels",
)  # fmt: skip
TEXT_FIELDS = ("request_id", "prompt", "negative_prompt", "output_format")
EXTRA_ARGS = ("text_guidance_scale", "cfg_range", "num_inference_steps")
OUTPUT_FORMATS = ("png",)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a deployment accepts. None switches a bound off."""

    max_side_px: int | None = 2048
    max_pixels: int | None = MAX_PIXELS
    max_steps: int | None = MAX_STEPS
    max_num_images: int = 8
    max_guidance: float | None = 100.0
    max_prompt_bytes: int = 8192
    max_ar_side: int = 512
    max_labels: int = 16
    max_label_chars: int = 128


UNBOUNDED = Bounds(max_side_px=None, max_pixels=None, max_steps=None, max_guidance=None)


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values of fields that a request leaves out; a checkpoint's t2i_generation_config.json may replace some."""

    height: int = 1024
    width: int = 1024
    steps: int = 50
    guidance: float = 9.0
    cfg_range: tuple[float, float] = (0.0, 1.0)
    ar_guidance: float = 1.0
    temperature: float = 1.0
    top_k: int = 2048
    top_p: float = 1.0
    repetition_penalty: float = 1.0  # a checkpoint's own; no request sets it

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> Defaults:
        """Take height, width and the sampling values from a checkpoint; `do_sample: false` means greedy."""
        names = ("height", "width", "temperature", "top_k", "top_p", "repetition_penalty")
        found = {name: config[name] for name in names if config.get(name) is not None}
        if config.get("do_sample") is False:
            found["temperature"] = 0.0
        return cls(**found)


@dataclass(frozen=True, slots=True)
class Diffusion:
    """A picture as the DiT draws it. Pictures of equal `key` may share a wave."""

    height: int
    width: int
    guidance: float
    cfg_range: tuple[float, float]
    steps: int

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.height, self.width, self.steps)


@dataclass(frozen=True, slots=True)
class Conditioning:
    """A grid of visual tokens as the AR stage writes it."""

    ar_height: int
    ar_width: int
    ar_guidance: float
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole request. `seed` is None when the server is to choose; image i of `num_images` uses seed + i."""

    prompt: str
    negative_prompt: str
    diffusion: Diffusion
    conditioning: Conditioning
    seed: int | None
    num_images: int
    request_id: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


class _Check:
    """Gathers violations, so that one answer names every bad field."""

    def __init__(self) -> None:
        self.violations: list[tuple[str, str]] = []

    def refuse(self, name: str, text: str) -> None:
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append((name, text))

    def integer(self, name: str, value: Any, low: int, high: int | None, unit: str = "a whole number") -> int:
        """Return `value` as an int within bounds; no boolean and no fraction is truncated."""
        allowed = f"{unit} from {low} to {high}" if high is not None else f"{unit} of at least {low}"
        try:
            number = int(value)
            exact = not isinstance(value, bool) and (isinstance(value, str) or number == value)
        except (TypeError, ValueError, OverflowError):
            exact = False
        if not exact or number < low or (high is not None and number > high):
            self.refuse(name, f"{value!r:.40} is not {allowed}")
            return low
        return number

    def real(self, name: str, value: Any, accepts: Callable[[float], bool], allowed: str) -> float:
        """Return `value` as a finite float that `accepts` holds for."""
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number) or not accepts(number):
            self.refuse(name, f"{value!r:.40} is not {allowed}")
            return 0.0
        return number

    def scale(self, name: str, value: Any, high: float | None) -> float:
        """Return `value` as a guidance scale: from 0 to `high`, or any finite number where that bound is off."""
        if high is None:
            return self.real(name, value, lambda x: True, "a finite number")
        return self.real(name, value, lambda x: 0 <= x <= high, f"a finite number from 0 to {high:g}")

    def done(self) -> None:
        if self.violations:
            raise InvalidRequest(self.violations)


def resolve_diffusion(
    request: Mapping[str, Any], *, defaults: Defaults = Defaults(), bounds: Bounds = UNBOUNDED
) -> Diffusion:
    """Resolve a neutral request to the parameters that form the batch key and that execution uses.

    Precedence (first that is not None wins; a one-item list counts as its item, an empty one as absent):
    size: prompt, additional_information, sampling. guidance: extra_args.text_guidance_scale, sampling.guidance_scale,
    additional_information. steps: extra_args, sampling, additional_information (`num_inference_steps`). cfg_range:
    extra_args, additional_information. Raises InvalidRequest naming every bad field and its range.

    Source: vLLM-Omni's MammothModa2 request contract (PR #7476); differences: nothing is truncated by int().
    """
    check = _Check()
    diffusion = _diffusion(request, defaults, bounds, check)
    check.done()
    return diffusion


def _diffusion(request: Mapping[str, Any], defaults: Defaults, bounds: Bounds, check: _Check) -> Diffusion:
    prompt = _mapping(request.get("prompt"))
    sampling = _mapping(request.get("sampling"))
    extra = _mapping(sampling.get("extra_args"))
    info = {**_mapping(request.get("additional_information")), **_mapping(prompt.get("additional_information"))}
    for name in extra:
        if name not in EXTRA_ARGS:
            check.refuse(f"extra_args.{name}", f"unknown; allowed: {', '.join(EXTRA_ARGS)}")
    if _or(_one(sampling, "num_outputs_per_prompt"), 1) != 1:
        check.refuse("num_outputs_per_prompt", "must be 1: a job is one picture")
    height = _side(check, "height", _first(prompt, info, sampling, name="height"), defaults.height, bounds)
    width = _side(check, "width", _first(prompt, info, sampling, name="width"), defaults.width, bounds)
    if bounds.max_pixels is not None and height * width > bounds.max_pixels:
        check.refuse("height", f"{width} x {height} is more than {bounds.max_pixels} pixels")
    steps = _first(extra, sampling, info, name="num_inference_steps")
    guidance = _first_of(
        _one(extra, "text_guidance_scale"), _one(sampling, "guidance_scale"), _one(info, "text_guidance_scale")
    )
    cfg_range = _first_of(extra.get("cfg_range"), info.get("cfg_range"))
    return Diffusion(
        height=height,
        width=width,
        guidance=check.scale("guidance", _or(guidance, defaults.guidance), bounds.max_guidance),
        cfg_range=_range(check, _or(cfg_range, defaults.cfg_range)),
        steps=check.integer("steps", _or(steps, defaults.steps), 1, bounds.max_steps),
    )


def resolve_generation(
    fields: Mapping[str, Any], *, defaults: Defaults = Defaults(), bounds: Bounds = Bounds()
) -> Generation:
    """Resolve the flat fields of a request (names of GenerateRequest; None and absent mean default).

    Raises InvalidRequest naming every unknown, wrongly typed or out-of-range field and what it may be.
    """
    check = _Check()
    given = {name: value for name, value in fields.items() if value is not None}
    for name in given:
        if name not in FIELDS:
            check.refuse(name, f"unknown field; allowed: {', '.join(FIELDS)}")
    for name, value in given.items():
        if name in TEXT_FIELDS and not isinstance(value, str):
            check.refuse(name, f"{value!r:.40} is not text")
        items = value if isinstance(value, list | tuple) else (value,)
        if name not in TEXT_FIELDS and any(isinstance(item, str | bytes) for item in items):
            check.refuse(name, f"{value!r:.40} is text, not a number")
    check.done()
    diffusion = _diffusion(_neutral(given), defaults, bounds, check)
    num_images = check.integer("num_images", given.get("num_images", 1), 1, bounds.max_num_images)
    seed = given.get("seed")
    if seed is not None:
        seed = check.integer("seed", seed, 0, MAX_SEED + 1 - num_images)
    if given.get("output_format", "png") not in OUTPUT_FORMATS:
        check.refuse("output_format", f"{given['output_format']!r:.40} is not one of: {', '.join(OUTPUT_FORMATS)}")
    generation = Generation(
        prompt=_prompt(check, "prompt", given.get("prompt", ""), bounds),
        negative_prompt=_prompt(check, "negative_prompt", given.get("negative_prompt", ""), bounds, required=False),
        diffusion=diffusion,
        conditioning=_conditioning(check, given, diffusion, defaults, bounds),
        seed=seed,
        num_images=num_images,
        request_id=_request_id(check, given.get("request_id", "")),
        labels=_labels(check, given.get("labels", {}), bounds),
    )
    check.done()
    return generation


def from_message(message: image_generation_pb2.GenerateRequest) -> dict[str, Any]:
    """Return the fields that the caller set; an unknown field (a newer client's) is kept, to be refused by name."""
    unknown = UnknownFieldSet(message)
    num_named = min(len(unknown), MAX_VIOLATIONS)
    fields: dict[str, Any] = {f"field {unknown[i].field_number}": True for i in range(num_named)}
    for descriptor, value in message.ListFields():
        repeated = descriptor.name == "cfg_range"
        fields[descriptor.name] = list(value) if repeated else dict(value) if descriptor.name == "labels" else value
    return fields


def diffusion_message(diffusion: Diffusion, seed: int) -> types_pb2.DiffusionParameters:
    """Return the resolved parameters as they travel to the DiT and in receipts."""
    lo, hi = diffusion.cfg_range
    return types_pb2.DiffusionParameters(
        height=diffusion.height, width=diffusion.width, steps=diffusion.steps, guidance=diffusion.guidance,
        cfg_start=lo, cfg_end=hi, seed=seed,
    )  # fmt: skip


def neutral_diffusion(message: types_pb2.DiffusionParameters) -> dict[str, Any]:
    """Return travelled parameters as a neutral request, for the resolver to check again."""
    return _neutral(
        {"height": message.height, "width": message.width, "steps": message.steps, "guidance": message.guidance,
         "cfg_range": [message.cfg_start, message.cfg_end]}
    )  # fmt: skip


def conditioning_message(conditioning: Conditioning, seed: int) -> types_pb2.ConditioningParameters:
    """Return the resolved parameters as they stand in receipts."""
    return types_pb2.ConditioningParameters(
        ar_height=conditioning.ar_height, ar_width=conditioning.ar_width, ar_guidance=conditioning.ar_guidance,
        temperature=conditioning.temperature, top_k=conditioning.top_k, top_p=conditioning.top_p, seed=seed,
        repetition_penalty=conditioning.repetition_penalty,
    )  # fmt: skip


def _neutral(given: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {"height": given.get("height"), "width": given.get("width"), "guidance_scale": given.get("guidance"),
                "num_inference_steps": given.get("steps"), "extra_args": {"cfg_range": given.get("cfg_range")}}  # fmt: skip
    return {"sampling": sampling}


def _conditioning(
    check: _Check, given: Mapping[str, Any], diffusion: Diffusion, defaults: Defaults, bounds: Bounds
) -> Conditioning:
    def real(name: str, default: float, accepts: Callable[[float], bool], allowed: str) -> float:
        return check.real(name, given.get(name, default), accepts, allowed)

    return Conditioning(
        ar_height=check.integer(
            "ar_height", given.get("ar_height", max(1, diffusion.height // 16)), 1, bounds.max_ar_side
        ),
        ar_width=check.integer("ar_width", given.get("ar_width", max(1, diffusion.width // 16)), 1, bounds.max_ar_side),
        ar_guidance=check.scale("ar_guidance", given.get("ar_guidance", defaults.ar_guidance), bounds.max_guidance),
        temperature=real("temperature", defaults.temperature, lambda x: 0 <= x <= 100, "from 0 (greedy) to 100"),
        top_k=check.integer("top_k", given.get("top_k", defaults.top_k), 0, 2**31 - 1, "0 (off) or a whole number"),
        top_p=real("top_p", defaults.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1"),
        repetition_penalty=check.real("repetition_penalty", defaults.repetition_penalty, lambda x: x > 0, "above 0"),
    )


def _side(check: _Check, name: str, value: Any, default: int, bounds: Bounds) -> int:
    side = check.integer(name, _or(value, default), 16, bounds.max_side_px, "pixels, a multiple of 16")
    if side % 16:
        check.refuse(name, f"{side} is not a multiple of 16")
    return side


def _range(check: _Check, value: Any) -> tuple[float, float]:
    if isinstance(value, list | tuple) and len(value) == 1 and isinstance(value[0], list | tuple):
        value = value[0]
    if isinstance(value, str) or not isinstance(value, list | tuple) or len(value) != 2:
        check.refuse("cfg_range", f"{value!r:.40} is not two numbers")
        return (0.0, 1.0)
    before = len(check.violations)
    lo, hi = (check.real("cfg_range", item, lambda x: True, "a finite number") for item in value)
    if len(check.violations) == before and not 0 <= lo <= hi <= 1:
        check.refuse("cfg_range", f"[{lo}, {hi}] does not satisfy 0 <= start <= end <= 1")
    return (lo, hi)


def _prompt(check: _Check, name: str, text: str, bounds: Bounds, *, required: bool = True) -> str:
    num_bytes = len(text.encode(errors="replace"))
    if required and not text.strip():
        check.refuse(name, f"is empty; 1 to {bounds.max_prompt_bytes} bytes of UTF-8 text")
    elif num_bytes > bounds.max_prompt_bytes:
        check.refuse(name, f"has {num_bytes} bytes; at most {bounds.max_prompt_bytes} bytes of UTF-8 text")
    return text


def _request_id(check: _Check, text: str) -> str:
    if len(text) > 64 or not text.isprintable() or "/" in text:
        check.refuse("request_id", "at most 64 printable characters without '/'")
    return text


def _labels(check: _Check, labels: Any, bounds: Bounds) -> Mapping[str, str]:
    try:
        pairs = {str(key): str(value) for key, value in dict(labels).items()}
    except (TypeError, ValueError):
        check.refuse("labels", f"{labels!r:.40} is not a mapping of text to text")
        return {}
    if len(pairs) > bounds.max_labels or any(
        len(text) > bounds.max_label_chars for pair in pairs.items() for text in pair
    ):
        check.refuse("labels", f"at most {bounds.max_labels} labels of at most {bounds.max_label_chars} characters")
    return pairs


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _one(source: Mapping[str, Any], name: str) -> Any:
    """Return source[name]; a list counts as its first item, an empty one as absent."""
    value = source.get(name)
    if isinstance(value, list | tuple):
        return value[0] if value else None
    return value


def _first(*sources: Mapping[str, Any], name: str) -> Any:
    return _first_of(*(_one(source, name) for source in sources))


def _first_of(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
