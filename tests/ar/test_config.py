"""`config.json` in all its layouts, and what is refused with the key's name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mammoth_ar.model.config import LLMConfig
from mammoth_ar.model.rotary import axis_of_frequency
from mammoth_serving.checkpoint import CheckpointError
from mammoth_serving.tiny import FAMILIES, Family, tiny_config

GEN_KEYS = {"extra_gen_vocab", "gen_vocab_size", "gen_vocab_start_index", "moe_type"}
OUTER_KEYS = GEN_KEYS | {
    "model_type",
    "vision_start_token_id",
    "vision_end_token_id",
    "image_token_id",
    "video_token_id",
}


def nested(family: Family) -> dict[str, Any]:
    config = copy.deepcopy(tiny_config(family))
    llm = config["llm_config"]
    if "text_config" not in llm:
        llm["text_config"] = {key: llm.pop(key) for key in list(llm) if key not in OUTER_KEYS}
    return config


def flat(family: Family) -> dict[str, Any]:
    config = copy.deepcopy(tiny_config(family))
    llm = config["llm_config"]
    if "text_config" in llm:
        text = llm.pop("text_config")
        text.pop("model_type")
        llm |= text
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_flat_and_nested_say_the_same(family: Family) -> None:
    assert LLMConfig.parse(flat(family)) == LLMConfig.parse(nested(family)) == LLMConfig.parse(tiny_config(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_rope_parameters_replace_theta_and_scaling(family: Family) -> None:
    config = nested(family)
    text = config["llm_config"]["text_config"]
    text["rope_parameters"] = text.pop("rope_scaling") | {"rope_theta": text.pop("rope_theta"), "rope_type": "default"}
    assert LLMConfig.parse(config) == LLMConfig.parse(tiny_config(family))


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        pytest.param({"gen_vocab_start_index": 350}, {"gen_vocab_start_index": 200}, 350, id="text-config-wins"),
        pytest.param({}, {"gen_vocab_start_index": 200}, 200, id="outer-alone"),
        pytest.param({"gen_vocab_start_index": None}, {"gen_vocab_start_index": 200}, 200, id="null-is-absent"),
        pytest.param({}, {}, 512, id="preview-defaults-to-the-vocabulary"),
        pytest.param({"extra_gen_vocab": False, "gen_vocab_size": 100}, {}, 412, id="preview-without-extra-vocabulary"),
    ],
)
def test_the_generation_vocabulary_starts(inner: dict[str, Any], outer: dict[str, Any], expected: int) -> None:
    config = nested("preview")
    llm = config["llm_config"]
    for key in GEN_KEYS:
        llm.pop(key)
    llm |= outer
    llm["text_config"] |= inner
    assert LLMConfig.parse(config).gen_vocab_start_index == expected


def test_dev_defaults_to_the_released_start_and_layers() -> None:
    config = nested("dev")
    del config["llm_config"]["gen_vocab_start_index"], config["gen_condition_layers"]
    config["llm_config"]["text_config"]["num_hidden_layers"] = 36
    parsed = LLMConfig.parse(config)
    assert parsed.gen_vocab_start_index == 152064
    assert parsed.condition_layers == (35, 32, 29, 26, 23, 20)


@pytest.mark.parametrize(
    ("family", "norm_eps", "theta", "kv_heads"), [("preview", 1e-5, 1e6, 8), ("dev", 1e-6, 5e6, 32)], ids=FAMILIES
)
def test_absent_keys_take_the_class_defaults(family: Family, norm_eps: float, theta: float, kv_heads: int) -> None:
    config = nested(family)
    text = config["llm_config"]["text_config"]
    for key in ("rms_norm_eps", "rope_theta", "num_key_value_heads", "hidden_act", "max_position_embeddings"):
        del text[key]
    text |= {"num_attention_heads": 32, "hidden_size": 512}
    text["rope_scaling"]["mrope_section"] = [2, 3, 3]
    parsed = LLMConfig.parse(config)
    assert (parsed.norm_eps, parsed.rope_theta, parsed.num_kv_heads) == (norm_eps, theta, kv_heads)


@pytest.mark.parametrize(
    ("moe_type", "family", "ffn", "attention"),
    [
        pytest.param("none", "preview", [], [], id="none"),
        pytest.param("ffn", "preview", [0, 1, 2, 3], [], id="ffn-everywhere"),
        pytest.param(None, "preview", [0, 1, 2, 3], [], id="default"),
        pytest.param("ffn-1:3", "preview", [1, 2], [], id="ffn-range"),
        pytest.param("ffn-2:9", "preview", [2, 3], [], id="range-beyond-the-layers"),
        pytest.param("attention-0:1", "preview", [], [0], id="attention-range"),
        pytest.param("ffn_attention-3:4", "preview", [3], [3], id="both"),
        pytest.param("ffn_attention", "dev", [0, 1, 2, 3], [], id="dev-has-no-attention-experts"),
    ],
)
def test_moe_type_says_which_layers_have_experts(
    moe_type: str | None, family: Family, ffn: list[int], attention: list[int]
) -> None:
    config = nested(family)
    config["llm_config"]["moe_type"] = moe_type
    parsed = LLMConfig.parse(config)
    assert (list(parsed.ffn_experts), list(parsed.attention_experts)) == (ffn, attention)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", None), ("hidden_size", 0), ("num_hidden_layers", "4"), ("vocab_size", True),
        ("num_attention_heads", 5), ("num_key_value_heads", 3), ("hidden_act", "gelu"), ("tie_word_embeddings", True),
        ("use_sliding_window", True), ("rope_scaling", None), ("rms_norm_eps", -1.0), ("moe_type", "ffn-2"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_text_key_is_named(key: str, value: Any) -> None:
    config = nested("preview")
    config["llm_config"]["text_config"][key] = value
    with pytest.raises(CheckpointError, match=key):
        LLMConfig.parse(config)


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        pytest.param({"type": "mrope"}, "mrope_section", id="no-section"),
        pytest.param({"type": "mrope", "mrope_section": [1, 1, 1]}, "mrope_section", id="section-too-short"),
        pytest.param({"rope_type": "yarn", "mrope_section": [2, 3, 3]}, "rope_type", id="scaled"),
    ],
)
def test_a_bad_rope_key_is_named(rope: dict[str, Any], key: str) -> None:
    config = flat("preview")
    config["llm_config"]["rope_scaling"] = rope
    with pytest.raises(CheckpointError, match=key):
        LLMConfig.parse(config)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        pytest.param({}, "llm_config", id="no-llm"),
        pytest.param({"llm_config": {"model_type": "llama"}}, "model_type", id="another-model"),
        pytest.param(tiny_config("dev") | {"gen_condition_layers": [-9]}, "gen_condition_layers", id="layer-too-deep"),
        pytest.param(tiny_config("dev") | {"gen_condition_layers": []}, "gen_condition_layers", id="no-layer"),
    ],
)
def test_a_bad_outer_key_is_named(config: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        LLMConfig.parse(config)


@pytest.mark.parametrize(
    ("family", "axes"),
    [("preview", [0, 0, 1, 1, 1, 2, 2, 2]), ("dev", [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2])],
    ids=["chunked", "interleaved"],
)
def test_frequencies_are_split_between_axes(family: Family, axes: list[int]) -> None:
    assert axis_of_frequency(LLMConfig.parse(tiny_config(family))) == axes
