"""Without generation experts the decoder is the stock LLM of transformers: checked on other widths, heads and biases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3VLTextConfig, Qwen3VLTextModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

from mammoth_ar.model.config import LLMConfig
from mammoth_ar.model.decoder import Decoder

NUM_TOKENS = 11
TEXT = {
    "vocab_size": 50, "intermediate_size": 72, "num_hidden_layers": 3, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def stock_preview(section: list[int], **text: Any) -> tuple[nn.Module, dict[str, Any]]:
    text |= TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": section, "rope_theta": 12345.0}}
    llm = {"model_type": "mammothmoda2_qwen2_5_vl", "text_config": text, "moe_type": "none"}
    return Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**text)), {"llm_config": llm}


def stock_dev(section: list[int], **text: Any) -> tuple[nn.Module, dict[str, Any]]:
    rope = {"rope_type": "default", "mrope_section": section, "mrope_interleaved": True, "rope_theta": 12345.0}
    text |= TEXT | {"rope_parameters": rope}
    llm = {
        "model_type": "mammothmoda2_qwen3_vl",
        "text_config": text,
        "moe_type": "none",
        "gen_vocab_start_index": TEXT["vocab_size"],
    }
    config = {"llm_config": llm, "gen_condition_layers": [-1]}
    return Qwen3VLTextModel(Qwen3VLTextConfig(**text)), config


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param(
            stock_preview,
            {"section": [4, 6, 6], "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2},
            id="preview-no-sharing",
        ),
        pytest.param(
            stock_preview,
            {"section": [2, 1, 1], "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1},
            id="preview-one-kv-head",
        ),
        pytest.param(
            stock_dev,
            {
                "section": [4, 3, 3],
                "hidden_size": 96,
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 20,
                "attention_bias": True,
            },
            id="dev-biases",
        ),
        pytest.param(
            stock_dev,
            {
                "section": [6, 3, 3],
                "hidden_size": 60,
                "num_attention_heads": 3,
                "num_key_value_heads": 3,
                "head_dim": 24,
                "attention_bias": False,
            },
            id="dev-heads-wider-than-the-model",
        ),
    ],
)
def test_hidden_states_at_positions_that_differ_between_axes(build: Any, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    stock, config = build(**settings)
    for parameter in stock.eval().requires_grad_(False).parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
    decoder = Decoder(LLMConfig.parse(config)).requires_grad_(False)
    fit = decoder.load_state_dict(stock.state_dict(), strict=False)
    assert fit.unexpected_keys == []
    assert {key.split(".")[0] for key in fit.missing_keys} == {"lm_head", "gen_head", "gen_embed_tokens"}
    ids_BL, position_3BL = torch.randint(0, 50, (2, NUM_TOKENS)), torch.randint(0, 40, (3, 2, NUM_TOKENS))
    mask_BLL = torch.ones(2, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).tril()
    expected = stock(input_ids=ids_BL, position_ids=position_3BL, attention_mask=torch.ones(2, NUM_TOKENS))
    hidden = decoder(ids_BL, position_3BL, mask_BLL)
    torch.testing.assert_close(hidden.normed_BLH, expected.last_hidden_state, rtol=0, atol=2e-5)
