"""Decide what the LLM is: `config.json` parsed into one frozen value, for Preview (Qwen2.5-VL) and Dev (Qwen3-VL).

Plain parsing instead of transformers configuration classes: the checkpoint's own classes are remote code, which stays
off, and the stock classes neither know the generation keys nor agree on where the rope keys live between releases.
Sizes have no default, because the defaults upstream are placeholders; whatever is wrong raises CheckpointError with the
key's name.

**Source** MammothModa2 `configuration_mammothmoda2*.py` (branches `qwen25vl` and `main`). Known differences: a null
key counts as absent (upstream ends with a null `gen_vocab_start_index` in the flat layout), and what this engine does
not compute (tied heads, sliding windows, scaled rope) is refused instead of ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mammoth_serving.checkpoint import CheckpointError

__all__ = ["FAMILIES", "Family", "HeadAlignment", "LLMConfig"]

Family = Literal["preview", "dev"]
HeadAlignment = Literal["concat", "aligned"]

FAMILIES: dict[str, Family] = {"mammothmoda2_qwen2_5_vl": "preview", "mammothmoda2_qwen3_vl": "dev"}
DEV_CONDITION_LAYERS = (-2, -5, -8, -11, -14, -17)
DEV_MROPE_SECTION = (24, 20, 20)
DEV_HEAD_DIM = 128
DEV_GEN_VOCAB_START = 152064
GEN_VOCAB_SIZE = 32800
KV_HEADS: dict[Family, int] = {"preview": 8, "dev": 32}
MAX_POSITIONS: dict[Family, int] = {"preview": 32768, "dev": 128_000}
NORM_EPS: dict[Family, float] = {"preview": 1e-5, "dev": 1e-6}
ROPE_THETA: dict[Family, float] = {"preview": 1e6, "dev": 5e6}
MOE_TYPE = re.compile(r"(none|attention|ffn|ffn_attention)(?:-(\d+):(\d+))?")


@dataclass(frozen=True, slots=True)
class LLMConfig:
    """Everything the decoder's shapes and numerics depend on.

    `ffn_experts` and `attention_experts` are the layers that own generation experts. `condition_layers` index the
    hidden-state tuple (0 = embeddings, i = residual stream after layer i, counted from one) and are empty when the
    condition is the last normed layer. `head_alignment` says which `gen_head` row scores an id: `concat` reads the
    column of concat(lm_head, gen_head), `aligned` counts from `gen_vocab_start_index`.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_bias: bool
    norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    extra_gen_vocab: bool
    gen_vocab_size: int
    gen_vocab_start_index: int
    ffn_experts: range
    attention_experts: range
    condition_layers: tuple[int, ...]
    max_positions: int
    head_alignment: HeadAlignment = "concat"

    @property
    def gen_head_offset(self) -> int:
        """The id that row 0 of `gen_head` scores."""
        return self.vocab_size if self.head_alignment == "concat" else self.gen_vocab_start_index

    @classmethod
    def parse(cls, config: Mapping[str, Any], *, head_alignment: HeadAlignment = "concat") -> LLMConfig:
        """Parse the whole `config.json`; raise CheckpointError naming the key that is missing or makes no sense."""
        llm = _Keys.at(config, "llm_config")
        family = _family(llm)
        text = _Keys.at(llm.values, "text_config", "llm_config.") if llm.get("text_config") is not None else llm
        _refuse_unsupported(text, llm)
        hidden_size, num_heads = text.count("hidden_size"), text.count("num_attention_heads")
        num_layers = text.count("num_hidden_layers")
        head_dim = text.count("head_dim", DEV_HEAD_DIM) if family == "dev" else _split_evenly(hidden_size, num_heads)
        theta, section = _rope(text, family, head_dim)
        gen = text.over(llm)
        ffn_experts, attention_experts = _experts(gen, family, num_layers)
        return cls(
            family=family,
            vocab_size=text.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=text.count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_kv_heads(text, family, num_heads),
            head_dim=head_dim,
            attention_bias=text.flag("attention_bias", False) if family == "dev" else True,
            norm_eps=text.number("rms_norm_eps", NORM_EPS[family]),
            rope_theta=theta,
            mrope_section=section,
            extra_gen_vocab=gen.flag("extra_gen_vocab", True),
            gen_vocab_size=gen.count("gen_vocab_size", GEN_VOCAB_SIZE),
            gen_vocab_start_index=_gen_vocab_start(gen, text.count("vocab_size"), family),
            ffn_experts=ffn_experts,
            attention_experts=attention_experts,
            condition_layers=_condition_layers(config, family, num_layers),
            max_positions=text.count("max_position_embeddings", MAX_POSITIONS[family]),
            head_alignment=head_alignment,
        )


@dataclass(frozen=True, slots=True)
class _Keys:
    """One object of config.json and the way to it, for error messages."""

    values: Mapping[str, Any]
    path: str

    @classmethod
    def at(cls, parent: Mapping[str, Any], key: str, path: str = "") -> _Keys:
        value = parent.get(key)
        if not isinstance(value, Mapping):
            raise CheckpointError(f"config.json: {path}{key}: an object is expected, not {value!r}")
        return cls(value, f"{path}{key}.")

    def over(self, outer: _Keys) -> _Keys:
        """Return keys that are looked up here first, then in `outer`."""
        mine = {key: value for key, value in self.values.items() if value is not None}
        return _Keys({**outer.values, **mine}, self.path)

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def wrong(self, key: str, text: str) -> CheckpointError:
        return CheckpointError(f"config.json: {self.path}{key}: {text}")

    def count(self, key: str, default: int | None = None) -> int:
        value = default if self.get(key) is None else self.get(key)
        if value is None:
            raise self.wrong(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.wrong(key, f"a positive integer is expected, not {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = default if self.get(key) is None else self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.wrong(key, f"a positive number is expected, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = default if self.get(key) is None else self.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, f"true or false is expected, not {value!r}")
        return value


def _family(llm: _Keys) -> Family:
    model_type = llm.get("model_type")
    if model_type not in FAMILIES:
        raise llm.wrong("model_type", f"one of {', '.join(FAMILIES)} is expected, not {model_type!r}")
    return FAMILIES[model_type]


def _refuse_unsupported(text: _Keys, llm: _Keys) -> None:
    if text.get("hidden_act") not in (None, "silu"):
        raise text.wrong("hidden_act", f"only silu is supported, not {text.get('hidden_act')!r}")
    for keys in (text, llm):
        if keys.flag("tie_word_embeddings", False):
            raise keys.wrong("tie_word_embeddings", "tied heads are not supported")
    sliding = text.flag("use_sliding_window", False) and (text.get("max_window_layers") or 0) < text.count(
        "num_hidden_layers"
    )
    if sliding or any(kind != "full_attention" for kind in text.get("layer_types") or ()):
        raise text.wrong("use_sliding_window", "sliding-window layers are not supported")


def _split_evenly(hidden_size: int, num_heads: int) -> int:
    if hidden_size % (2 * num_heads):
        raise CheckpointError(
            f"config.json: num_attention_heads: {num_heads} heads of even width do not divide {hidden_size}"
        )
    return hidden_size // num_heads


def _kv_heads(text: _Keys, family: Family, num_heads: int) -> int:
    explicit_null = "num_key_value_heads" in text.values and text.get("num_key_value_heads") is None
    count = num_heads if explicit_null else text.count("num_key_value_heads", KV_HEADS[family])
    if num_heads % count:
        raise text.wrong("num_key_value_heads", f"{count} does not divide {num_heads} attention heads")
    return count


def _rope(text: _Keys, family: Family, head_dim: int) -> tuple[float, tuple[int, int, int]]:
    key = "rope_parameters" if text.get("rope_parameters") is not None else "rope_scaling"
    rope = _Keys.at(text.values, key, text.path)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "mrope"):
        raise rope.wrong("rope_type", f"only default and mrope are supported, not {kind!r}")
    section = rope.get("mrope_section") or (DEV_MROPE_SECTION if family == "dev" else None)
    if (
        not isinstance(section, list | tuple)
        or len(section) != 3
        or not all(isinstance(s, int) and s >= 0 for s in section)
    ):
        raise rope.wrong("mrope_section", f"three counts are expected, not {section!r}")
    if family == "preview" and sum(section) != head_dim // 2:
        raise rope.wrong("mrope_section", f"{section} does not add up to half of head_dim {head_dim}")
    theta = rope.number("rope_theta", text.number("rope_theta", ROPE_THETA[family]))
    return theta, (section[0], section[1], section[2])


def _gen_vocab_start(gen: _Keys, vocab_size: int, family: Family) -> int:
    if family == "dev":
        return gen.count("gen_vocab_start_index", DEV_GEN_VOCAB_START)
    extra = gen.flag("extra_gen_vocab", True)
    return gen.count(
        "gen_vocab_start_index", vocab_size if extra else vocab_size - gen.count("gen_vocab_size", GEN_VOCAB_SIZE)
    )


def _experts(gen: _Keys, family: Family, num_layers: int) -> tuple[range, range]:
    """Parse `moe_type` = KIND or KIND-START:END; Dev's attention has no experts whatever it says."""
    moe_type = gen.get("moe_type") or "ffn"
    match = MOE_TYPE.fullmatch(moe_type) if isinstance(moe_type, str) else None
    if match is None:
        raise gen.wrong(
            "moe_type",
            f"KIND or KIND-START:END with KIND none, attention, ffn or ffn_attention is expected, not {moe_type!r}",
        )
    kind, start, end = match.group(1), int(match.group(2) or 0), int(match.group(3) or num_layers)
    layers = range(min(start, num_layers), min(end, num_layers))
    has_attention = family == "preview" and "attention" in kind
    return layers if "ffn" in kind else range(0), layers if has_attention else range(0)


def _condition_layers(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int, ...]:
    if family == "preview":
        return ()
    layers = config.get("gen_condition_layers")
    layers = DEV_CONDITION_LAYERS if layers is None else layers
    valid = range(-num_layers - 1, num_layers + 1)
    if not isinstance(layers, list | tuple) or not layers or not all(isinstance(i, int) and i in valid for i in layers):
        raise CheckpointError(
            f"config.json: gen_condition_layers: a list of indices of {num_layers} layers is expected, not {layers!r}"
        )
    return tuple(index % (num_layers + 1) for index in layers)
