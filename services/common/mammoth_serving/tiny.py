"""Decide what a tiny random checkpoint holds: configuration, tokenizer files, weights drawn by name.

It has the upstream format and real structure at toy width, so that every path runs on a CPU in milliseconds; its
pictures are noise. Each stage lists its own tensor shapes and writes its own shard (`mammoth_ar.tiny`,
`mammoth_dit.tiny`), because neither package imports the other.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

__all__ = ["FAMILIES", "Family", "checkpoint_files", "tiny_config", "write_shard"]

Family = Literal["preview", "dev"]
FAMILIES: tuple[Family, ...] = ("preview", "dev")

NUM_RANKS = 256  # one token a byte: any UTF-8 prompt encodes, no merges needed
GEN_VOCAB_START = 512
NUM_GEN_EXTRAS = 5  # endofline, endoffile, gen_placeholder, useless token, beginoftext
NUM_CODES = 64
GEN_VOCAB_SIZE = 128  # reserved range, larger than what is used, as upstream
EOL = GEN_VOCAB_START
VISUAL_START = GEN_VOCAB_START + NUM_GEN_EXTRAS + 3
LLM_WIDTH = 64
DIT_WIDTH = 48
IMAGE_PX = 128  # the default size of a request


def tiny_config(family: Family) -> dict[str, Any]:
    """Return config.json of the tiny checkpoint: Preview (flat text keys, standalone Q-Former) or Dev (nested)."""
    preview = family == "preview"
    gen_keys = {"extra_gen_vocab": True, "gen_vocab_size": GEN_VOCAB_SIZE, "gen_vocab_start_index": GEN_VOCAB_START,
                "moe_type": "ffn-2:4"}  # fmt: skip
    text = {
        "vocab_size": GEN_VOCAB_START if preview else 480,
        "hidden_size": LLM_WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6 if preview else 5e6,
        "tie_word_embeddings": False,
    }
    ids = {"vision_start_token_id": 265, "vision_end_token_id": 266, "image_token_id": 268, "video_token_id": 269}
    if preview:
        text["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
        llm = {"model_type": "mammothmoda2_qwen2_5_vl", **text, **ids, **gen_keys}
    else:
        text |= {"model_type": "mammothmoda2_qwen3_vl_text", "head_dim": 24, "attention_bias": False,
                 "rope_scaling": {"rope_type": "default", "mrope_section": [4, 4, 4], "mrope_interleaved": True}}  # fmt: skip
        llm = {"model_type": "mammothmoda2_qwen3_vl", "text_config": text, **ids, **gen_keys}
    config = {
        "model_type": "mammothmoda2",
        "architectures": ["Mammothmoda2Model"],
        "llm_config": llm,
        "gen_condition_mode": "text_image",
        "gen_image_condition_refiner_config": {"num_queries": 8, "num_layers": 2, "dropout": 0.0, "norm_eps": 1e-5},
        "gen_axes_dim_rope": [4, 4, 4],
        "gen_axes_lens": [10000, 10000, 10000],
        "gen_dit_config": {
            "patch_size": 2, "in_channels": 16, "out_channels": None, "hidden_size": DIT_WIDTH, "num_layers": 3,
            "num_refiner_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 32,
            "ffn_dim_multiplier": None, "norm_eps": 1e-5, "axes_dim_rope": [4, 4, 4],
            "axes_lens": [10000, 10000, 10000], "text_feat_dim": 32, "timestep_scale": 1000.0,
        },
        "gen_vae_config": {
            "_class_name": "AutoencoderKL", "act_fn": "silu", "block_out_channels": [16, 16, 16, 16],
            "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
            "force_upcast": True, "in_channels": 3, "out_channels": 3, "latent_channels": 16, "layers_per_block": 1,
            "mid_block_add_attention": True, "norm_num_groups": 8, "sample_size": IMAGE_PX, "scaling_factor": 0.3611,
            "shift_factor": 0.1159, "use_quant_conv": False, "use_post_quant_conv": False,
        },
        "gen_transport_config": {},
        "initializer_range": 0.02,
    }  # fmt: skip
    if not preview:
        config |= {"gen_condition_layers": [-2, -4], "gen_text_condition_with_answer": False}
    return config


def checkpoint_files(family: Family) -> dict[str, str]:
    """Return {file name: text} of everything in the tiny checkpoint but its shards and their index."""
    ranks = "".join(f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(NUM_RANKS))
    vision = ["<|image token|>", "<|image start|>", "<|image end|>"]
    vision += [f"<|visual token {code:06d}|>" for code in range(NUM_CODES)]
    generation = {"do_sample": True, "temperature": 1.0, "top_k": 2048, "top_p": 1.0, "eol_token_id": EOL,
                  "visual_token_start_id": VISUAL_START, "visual_token_end_id": VISUAL_START + NUM_CODES,
                  "height": IMAGE_PX, "width": IMAGE_PX}  # fmt: skip
    return {
        "config.json": json.dumps(tiny_config(family), indent=1) + "\n",
        "t2i_generation_config.json": json.dumps(generation, indent=1) + "\n",
        "mammothu.tiktoken": ranks,
        "mammothu_vision_tokens.txt": "\n".join(vision) + "\n",
    }


def write_shard(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write float32 weights of `shapes` to `path`: each tensor drawn from a counter-based stream keyed by its name."""
    save_file({name: _draw(name, shape) for name, shape in shapes.items()}, path)
    path.chmod(0o644)  # safetensors leaves it to its owner alone


def _draw(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Norm weights near one, biases near zero, the rest scaled by the inputs of a unit: nothing is exactly constant."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    noise = np.random.Generator(np.random.Philox(key=key)).standard_normal(shape, np.float32)
    if len(shape) == 1:
        return (0.1 * noise if name.endswith("bias") else 1 + 0.1 * noise).astype(np.float32)
    return (noise / math.sqrt(math.prod(shape[1:]))).astype(np.float32)
