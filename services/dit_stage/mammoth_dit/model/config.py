"""Decide what the checkpoint's config.json says about this stage: one frozen value, every key checked.

Values come from the file; a missing key takes the default of the upstream class; unknown keys are ignored. The AR half of
the file (attention, experts, rope of the LLM) belongs to `mammoth_ar`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mammoth_serving.checkpoint import CheckpointError

__all__ = [
    "LATENT_FACTOR",
    "ModelConfig",
    "RefinerConfig",
    "RotaryConfig",
    "TokenIds",
    "TransformerConfig",
    "padded_width",
]

NESTED_REFINER_TYPE = "mammothmoda2_qwen3_vl"
FIRST_GEN_ID = 152064  # of the Qwen vocabulary that both checkpoints extend
GEN_VOCAB_SIZE = 32800
VISUAL_IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
LATENT_FACTOR = 8  # pixels a latent cell, on each axis, whatever the decoder


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """`gen_dit_config`."""

    patch_size: int
    in_channels: int
    out_channels: int
    hidden_size: int
    num_layers: int
    num_refiner_layers: int
    num_attention_heads: int
    num_kv_heads: int
    ffn_width: int
    norm_eps: float
    timestep_scale: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def temb_width(self) -> int:
        return min(self.hidden_size, 1024)

    @property
    def side_multiple_px(self) -> int:
        """Both sides of a picture are multiples of this many pixels."""
        return LATENT_FACTOR * self.patch_size


@dataclass(frozen=True, slots=True)
class RefinerConfig:
    """`gen_image_condition_refiner_config`; `nested` when the Q-Former lives inside the transformer (Dev)."""

    num_queries: int
    num_layers: int
    num_heads: int | None
    norm_eps: float
    nested: bool


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Widths (they add up to the head dimension) and table lengths of the three axes: caption, row, column."""

    widths: tuple[int, int, int]
    lengths: tuple[int, int, int]

    def admits(self, num_caption_tokens: int, num_rows: int, num_columns: int) -> bool:
        """Tell whether every position of such a row lies inside the tables (the image's axis 0 is the caption length)."""
        caption, row, column = self.lengths
        return (
            num_caption_tokens < caption
            and max(num_caption_tokens, num_rows) <= row
            and max(num_caption_tokens, num_columns) <= column
        )


@dataclass(frozen=True, slots=True)
class TokenIds:
    """What selects conditioning rows: the first id of the generation vocabulary, and the ids of the vision markers."""

    gen_vocab_start: int
    visual: frozenset[int]

    @classmethod
    def parse(cls, llm: Mapping[str, Any]) -> TokenIds:
        """Read both from `llm_config`. The one resolution: admission and selection use its result.

        Nested `text_config` values win over the parent's. Without `gen_vocab_start_index` it is `vocab_size`, or
        `vocab_size - gen_vocab_size` when the vocabulary already contains the generation ids; Dev's class has a constant.
        """
        start = _llm_value(llm, "gen_vocab_start_index")
        vocab_size = _llm_value(llm, "vocab_size")
        if start is None and vocab_size is not None and llm.get("model_type") != NESTED_REFINER_TYPE:
            extra = _llm_value(llm, "extra_gen_vocab")
            inside = 0 if extra or extra is None else _or(_llm_value(llm, "gen_vocab_size"), GEN_VOCAB_SIZE)
            start = vocab_size - inside
        ids = {key: _or(_llm_value(llm, key), default) for key, default in VISUAL_IDS.items()}
        ids["gen_vocab_start_index"] = _or(start, FIRST_GEN_ID)
        for key, value in ids.items():
            if not _is_count(value):
                raise CheckpointError(f"llm_config.{key}: {value!r} is no token id")
        return cls(gen_vocab_start=ids.pop("gen_vocab_start_index"), visual=frozenset(ids.values()))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything this stage takes from config.json. `vae` stays the mapping that diffusers reads; None without one."""

    transformer: TransformerConfig
    refiner: RefinerConfig | None
    rotary: RotaryConfig
    vae: Mapping[str, Any] | None
    llm_width: int
    tokens: TokenIds

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Raise CheckpointError, naming the key, when a value is missing, ill-typed or at odds with another."""
        llm = _mapping(config, "llm_config")
        transformer = _transformer(_Section(_mapping(config, "gen_dit_config"), "gen_dit_config"))
        nested = llm.get("model_type") == NESTED_REFINER_TYPE
        width = _llm_value(llm, "hidden_size")
        if not _is_count(width) or width < 1:
            raise CheckpointError(f"llm_config.hidden_size: a positive whole number is expected, not {width!r}")
        rotary = _rotary(_Section(config, ""), transformer.head_dim)
        return cls(
            transformer=transformer,
            refiner=_refiner(config.get("gen_image_condition_refiner_config"), nested),
            rotary=rotary,
            vae=_vae(config, transformer),
            llm_width=width,
            tokens=TokenIds.parse(llm),
        )

    @property
    def num_queries(self) -> int | None:
        """Tokens that the Q-Former makes of any number of image rows; None when image rows pass as they are."""
        return self.refiner.num_queries if self.refiner else None

    def num_caption_tokens(self, num_text_rows: int, num_image_rows: int) -> int:
        """Return the length of the caption that such rows become."""
        return num_text_rows + (num_image_rows if self.num_queries is None else self.num_queries)


@dataclass(frozen=True, slots=True)
class _Section:
    values: Mapping[str, Any]
    name: str

    def at(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    def count(self, key: str, default: int, *, least: int = 1) -> int:
        value = self.values.get(key, default)
        if not _is_count(value) or value < least:
            raise CheckpointError(f"{self.at(key)}: a whole number of at least {least} is expected, not {value!r}")
        return int(value)

    def real(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise CheckpointError(f"{self.at(key)}: a positive number is expected, not {value!r}")
        return float(value)

    def axes(self, key: str, default: tuple[int, int, int]) -> tuple[int, int, int]:
        value = self.values.get(key, default)
        if (
            not isinstance(value, list | tuple)
            or len(value) != 3
            or not all(_is_count(axis) and axis > 0 for axis in value)
        ):
            raise CheckpointError(f"{self.at(key)}: three positive whole numbers are expected, not {value!r}")
        return (value[0], value[1], value[2])


def padded_width(width: int, multiple_of: int, multiplier: float | None = None) -> int:
    """Return the inner width of a feed-forward over `width`: 4 x width, scaled, rounded up to a multiple."""
    inner = 4 * width if multiplier is None else int(multiplier * 4 * width)
    return multiple_of * -(-inner // multiple_of)


def _transformer(dit: _Section) -> TransformerConfig:
    hidden_size, heads = dit.count("hidden_size", 2304), dit.count("num_attention_heads", 24)
    kv_heads, in_channels = dit.count("num_kv_heads", 8), dit.count("in_channels", 16)
    if hidden_size % heads:
        raise CheckpointError(f"{dit.at('num_attention_heads')}: {heads} does not divide hidden_size {hidden_size}")
    if heads % kv_heads:
        raise CheckpointError(f"{dit.at('num_kv_heads')}: {kv_heads} does not divide num_attention_heads {heads}")
    if (
        dit.values.get("axes_dim_rope") is not None
        and sum(dit.axes("axes_dim_rope", (0, 0, 0))) != hidden_size // heads
    ):
        raise CheckpointError(f"{dit.at('axes_dim_rope')}: must add up to the head dimension {hidden_size // heads}")
    out_channels = in_channels if dit.values.get("out_channels") is None else dit.count("out_channels", 0)
    if out_channels != in_channels:
        raise CheckpointError(f"{dit.at('out_channels')}: {out_channels}: a velocity has in_channels {in_channels}")
    multiplier = dit.values.get("ffn_dim_multiplier")
    multiplier = None if multiplier is None else dit.real("ffn_dim_multiplier", 1.0)
    return TransformerConfig(
        patch_size=dit.count("patch_size", 2),
        in_channels=in_channels,
        out_channels=out_channels,
        hidden_size=hidden_size,
        num_layers=dit.count("num_layers", 26),
        num_refiner_layers=dit.count("num_refiner_layers", 2, least=0),
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        ffn_width=padded_width(hidden_size, dit.count("multiple_of", 256), multiplier),
        norm_eps=dit.real("norm_eps", 1e-5),
        timestep_scale=dit.real("timestep_scale", 1.0),
    )


def _rotary(top: _Section, head_dim: int) -> RotaryConfig:
    widths = top.axes("gen_axes_dim_rope", (40, 40, 40))
    if sum(widths) != head_dim or any(width % 2 for width in widths):
        raise CheckpointError(
            f"gen_axes_dim_rope: {list(widths)} must be even and add up to the head dimension {head_dim}"
        )
    return RotaryConfig(widths=widths, lengths=top.axes("gen_axes_lens", (10000, 10000, 10000)))


def _refiner(values: Any, nested: bool) -> RefinerConfig | None:
    if values is None:
        return None
    name = "gen_image_condition_refiner_config"
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{name}: an object or null is expected, not {values!r}")
    section = _Section(values, name)
    num_heads = None if values.get("num_heads") is None else section.count("num_heads", 0, least=0)
    if nested and num_heads is not None:
        raise CheckpointError(f"{name}.num_heads: {num_heads}: the nested refiner derives its heads from its width")
    return RefinerConfig(
        num_queries=section.count("num_queries", 128),
        num_layers=section.count("num_layers", 2, least=0),
        num_heads=num_heads,
        norm_eps=section.real("norm_eps", 1e-5),
        nested=nested,
    )


def _vae(config: Mapping[str, Any], transformer: TransformerConfig) -> Mapping[str, Any] | None:
    if config.get("gen_vae_config") is None:
        return None
    vae = _mapping(config, "gen_vae_config")
    channels = vae.get("latent_channels", 4)
    if channels != transformer.in_channels:
        raise CheckpointError(
            f"gen_vae_config.latent_channels: {channels!r}, the transformer has {transformer.in_channels}"
        )
    return vae


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{key}: an object is expected, not {value!r}")
    return value


def _llm_value(llm: Mapping[str, Any], key: str) -> Any:
    nested = (llm.get("text_config") or {}).get(key)
    return llm.get(key) if nested is None else nested


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
