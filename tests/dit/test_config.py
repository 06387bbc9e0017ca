"""What config.json means: defaults, derived values, and errors that name the key."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mammoth_dit.model.config import ModelConfig, RefinerConfig, RotaryConfig, TokenIds, padded_width
from mammoth_serving.checkpoint import CheckpointError
from mammoth_serving.tiny import tiny_config


def edited(family: str = "preview", **changes: Any) -> dict[str, Any]:
    """The tiny config with values replaced at dotted paths (`__` for the dot); `...` removes a key."""
    config = copy.deepcopy(tiny_config(family))
    for path, value in changes.items():
        *parents, key = path.split("__")
        section = config
        for parent in parents:
            section = section[parent]
        if value is ...:
            del section[key]
        else:
            section[key] = value
    return config


@pytest.mark.parametrize(
    ("llm", "start"),
    [
        pytest.param({"gen_vocab_start_index": 200}, 200, id="parent only"),
        pytest.param(
            {"gen_vocab_start_index": 200, "text_config": {"gen_vocab_start_index": 350}}, 350, id="nested wins"
        ),
        pytest.param({"text_config": {"gen_vocab_start_index": 350}}, 350, id="nested only"),
        pytest.param(
            {"gen_vocab_start_index": 200, "text_config": {"gen_vocab_start_index": None}}, 200, id="null nested"
        ),
        pytest.param({"text_config": {"vocab_size": 120}}, 120, id="extra vocabulary by default"),
        pytest.param({"vocab_size": 120, "extra_gen_vocab": True}, 120, id="extra vocabulary, flat"),
        pytest.param({"vocab_size": 500, "extra_gen_vocab": False, "gen_vocab_size": 64}, 436, id="ids inside"),
        pytest.param({"vocab_size": 184864, "extra_gen_vocab": False}, 152064, id="ids inside, size by default"),
        pytest.param({}, 152064, id="nothing"),
        pytest.param({"model_type": "mammothmoda2_qwen3_vl", "vocab_size": 151936}, 152064, id="Dev has a constant"),
    ],
)
def test_the_first_generation_id_has_one_resolution(llm, start):
    assert TokenIds.parse(llm).gen_vocab_start == start


def test_vision_markers_have_the_ids_of_the_vocabulary_by_default():
    assert TokenIds.parse({}).visual == {151655, 151656, 151652, 151653}
    assert TokenIds.parse({"image_token_id": 7, "vision_end_token_id": 9}).visual == {7, 151656, 151652, 9}


def test_an_empty_transformer_section_takes_the_class_defaults():
    config = edited(gen_dit_config={}, gen_axes_dim_rope=[32, 32, 32], gen_axes_lens=...)
    dit = ModelConfig.parse(config).transformer
    assert (dit.patch_size, dit.in_channels, dit.out_channels, dit.hidden_size) == (2, 16, 16, 2304)
    assert (dit.num_attention_heads, dit.num_kv_heads, dit.head_dim) == (24, 8, 96)
    assert (dit.num_layers, dit.num_refiner_layers, dit.ffn_width, dit.temb_width) == (26, 2, 9216, 1024)
    assert (dit.norm_eps, dit.timestep_scale) == (1e-5, 1.0)
    assert ModelConfig.parse(config).rotary.lengths == (10000, 10000, 10000)


def test_preview_widths_follow_from_its_keys():
    dit = {
        "hidden_size": 2520,
        "num_attention_heads": 21,
        "num_kv_heads": 7,
        "num_layers": 16,
        "_class_name": "ignored",
    }
    config = ModelConfig.parse(edited(gen_dit_config=dit, gen_axes_dim_rope=..., gen_axes_lens=...))
    assert (config.transformer.head_dim, config.transformer.ffn_width, config.rotary.widths) == (
        120,
        10240,
        (40, 40, 40),
    )


def test_an_empty_refiner_section_takes_the_class_defaults():
    config = ModelConfig.parse(edited(gen_image_condition_refiner_config={}))
    assert config.refiner == RefinerConfig(num_queries=128, num_layers=2, num_heads=None, norm_eps=1e-5, nested=False)
    assert config.num_caption_tokens(5, 900) == 133


def test_without_a_refiner_every_image_row_is_a_caption_token():
    assert ModelConfig.parse(edited(gen_image_condition_refiner_config=None)).num_caption_tokens(5, 900) == 905


@pytest.mark.parametrize(("family", "nested"), [("preview", False), ("dev", True)])
def test_the_llm_decides_where_the_refiner_lives(family, nested):
    config = ModelConfig.parse(tiny_config(family))
    assert config.refiner is not None
    assert config.refiner.nested == nested
    assert config.llm_width == 64


@pytest.mark.parametrize(
    ("multiple_of", "multiplier", "width"),
    [(256, None, 10240), (256, 1.0, 10240), (32, None, 10080), (256, 1.3, 13312), (64, 0.5, 5056)],
)
def test_a_feed_forward_is_four_widths_scaled_and_rounded_up(multiple_of, multiplier, width):
    assert padded_width(2520, multiple_of, multiplier) == width


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"gen_dit_config": ...}, "gen_dit_config", id="no transformer"),
        pytest.param({"llm_config": None}, "llm_config", id="null llm"),
        pytest.param({"llm_config__hidden_size": ...}, "llm_config.hidden_size", id="no llm width"),
        pytest.param({"llm_config__gen_vocab_start_index": "x"}, "gen_vocab_start_index", id="ill-typed id"),
        pytest.param({"gen_dit_config__num_layers": "3"}, "gen_dit_config.num_layers", id="text for a count"),
        pytest.param({"gen_dit_config__num_layers": True}, "gen_dit_config.num_layers", id="boolean for a count"),
        pytest.param({"gen_dit_config__num_attention_heads": 5}, "num_attention_heads", id="heads do not divide"),
        pytest.param({"gen_dit_config__num_kv_heads": 3}, "num_kv_heads", id="kv heads do not divide"),
        pytest.param(
            {"gen_dit_config__axes_dim_rope": [4, 4, 8]}, "gen_dit_config.axes_dim_rope", id="axes do not add up"
        ),
        pytest.param({"gen_axes_dim_rope": ...}, "gen_axes_dim_rope", id="default axes do not fit"),
        pytest.param({"gen_axes_dim_rope": [3, 5, 4]}, "gen_axes_dim_rope", id="odd axes"),
        pytest.param({"gen_axes_lens": [10, 10]}, "gen_axes_lens", id="two axes"),
        pytest.param({"gen_dit_config__out_channels": 8}, "out_channels", id="no velocity"),
        pytest.param({"gen_dit_config__norm_eps": 0}, "norm_eps", id="zero eps"),
        pytest.param({"gen_vae_config__latent_channels": 4}, "gen_vae_config.latent_channels", id="another latent"),
        pytest.param({"gen_image_condition_refiner_config": 7}, "refiner_config", id="refiner is no object"),
    ],
)
def test_a_bad_value_is_refused_by_name(changes, named):
    with pytest.raises(CheckpointError, match=named):
        ModelConfig.parse(edited(**changes))


def test_a_nested_refiner_takes_no_head_count():
    with pytest.raises(CheckpointError, match="num_heads"):
        ModelConfig.parse(edited("dev", gen_image_condition_refiner_config__num_heads=4))


@pytest.mark.parametrize(
    ("num_caption", "num_rows", "num_columns", "admitted"),
    [
        pytest.param(9, 8, 8, True, id="fits"),
        pytest.param(10, 4, 4, False, id="the image sits at the caption's length"),
        pytest.param(9, 13, 4, False, id="rows past the table"),
        pytest.param(9, 12, 14, True, id="both at the end"),
        pytest.param(9, 12, 15, False, id="columns past the table"),
    ],
)
def test_rotary_tables_bound_every_axis(num_caption, num_rows, num_columns, admitted):
    assert RotaryConfig((4, 4, 4), (10, 12, 14)).admits(num_caption, num_rows, num_columns) == admitted
