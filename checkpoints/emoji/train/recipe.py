"""Decide the model: config.json of the emoji checkpoint, its special ids, and the steps of each training stage. Pure.

Widths are chosen so that everything fits into 16 MB of bfloat16: about 2.3 M parameters for the LLM, 0.7 M for the
Q-Former, 3.9 M for the transformer, 0.8 M for the VAE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["FULL", "NUM_CODES", "NUM_RANKS", "SIDE_PX", "SMOKE", "StagePlan", "config", "generation_config"]

SIDE_PX = 128
NUM_CODES = 512
NUM_RANKS = 1024
GEN_VOCAB_START = 1232  # ranks, 203 special tokens, 5 of margin
EOL = GEN_VOCAB_START
VISUAL_START = GEN_VOCAB_START + 8  # after end of line and its four neighbours, image token, image start, image end
LLM_WIDTH, LLM_LAYERS, LLM_HEADS = 128, 6, 4
DIT_WIDTH, DIT_HEADS, DIT_AXES = 192, 6, [8, 12, 12]
VAE_WIDTHS = [24, 32, 48, 64]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """How long a stage trains: `lr` is the peak, reached after `warm_up` steps and left for zero over the last part."""

    steps: int
    batch: int
    lr: float
    warm_up: int = 200
    decay: float = 0.5
    ema: float = 0.999
    save_every: int = 2000


FULL = {
    "vae": StagePlan(steps=3215, batch=64, lr=2e-3),
    "llm": StagePlan(steps=3464, batch=256, lr=2e-3),
    "dit": StagePlan(steps=6087, batch=512, lr=2e-3),
}
SMOKE = {
    "vae": StagePlan(steps=4, batch=2, lr=1e-3, warm_up=1),
    "llm": StagePlan(steps=4, batch=4, lr=1e-3, warm_up=1),
    "dit": StagePlan(steps=4, batch=4, lr=1e-3, warm_up=1),
}


def config(scaling_factor: float = 1.0, shift_factor: float = 0.0) -> dict[str, Any]:
    """Return config.json; the two factors normalise the latents of the trained VAE."""
    return {
        "model_type": "mammothmoda2",
        "architectures": ["Mammothmoda2Model"],
        "llm_config": _llm(),
        "gen_condition_mode": "text_image",
        "gen_image_condition_refiner_config": {
            "num_queries": 32, "num_layers": 2, "num_heads": 4, "dropout": 0.0, "norm_eps": 1e-5,
        },
        "gen_axes_dim_rope": DIT_AXES,
        "gen_axes_lens": [10000, 10000, 10000],
        "gen_dit_config": {
            "patch_size": 2, "in_channels": 16, "out_channels": None, "hidden_size": DIT_WIDTH, "num_layers": 6,
            "num_refiner_layers": 1, "num_attention_heads": DIT_HEADS, "num_kv_heads": 3, "multiple_of": 64,
            "ffn_dim_multiplier": 0.5, "norm_eps": 1e-5, "axes_dim_rope": DIT_AXES, "axes_lens": [10000, 10000, 10000],
            "text_feat_dim": LLM_WIDTH, "timestep_scale": 1000.0,
        },
        "gen_vae_config": {
            "_class_name": "AutoencoderKL", "act_fn": "silu", "block_out_channels": VAE_WIDTHS,
            "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
            "force_upcast": True, "in_channels": 3, "out_channels": 3, "latent_channels": 16, "layers_per_block": 1,
            "mid_block_add_attention": True, "norm_num_groups": 8, "sample_size": SIDE_PX,
            "scaling_factor": scaling_factor, "shift_factor": shift_factor, "use_quant_conv": False,
            "use_post_quant_conv": False,
        },
        "gen_transport_config": {},
        "initializer_range": 0.02,
    }  # fmt: skip


def _llm() -> dict[str, Any]:
    return {
        "model_type": "mammothmoda2_qwen2_5_vl",
        "vocab_size": GEN_VOCAB_START, "hidden_size": LLM_WIDTH, "intermediate_size": 384,
        "num_hidden_layers": LLM_LAYERS, "num_attention_heads": LLM_HEADS, "num_key_value_heads": 2, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "vision_start_token_id": NUM_RANKS + 9, "vision_end_token_id": NUM_RANKS + 10,
        "image_token_id": NUM_RANKS + 12, "video_token_id": NUM_RANKS + 13,
        "extra_gen_vocab": True, "gen_vocab_size": NUM_CODES + 8, "gen_vocab_start_index": GEN_VOCAB_START,
        "moe_type": f"ffn-2:{LLM_LAYERS}",
    }  # fmt: skip


def generation_config() -> dict[str, Any]:
    """Return t2i_generation_config.json: the one trained size, the ids of a grid, how it is sampled."""
    return {
        "do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 1.0, "eol_token_id": EOL,
        "visual_token_start_id": VISUAL_START, "visual_token_end_id": VISUAL_START + NUM_CODES,
        "height": SIDE_PX, "width": SIDE_PX,
    }  # fmt: skip
