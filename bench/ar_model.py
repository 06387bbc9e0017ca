"""Do: build the LLM of both families at its real widths with random weights, and what it is compared with.

Widths are those of the public base models (Qwen2.5-VL-7B, Qwen3-VL-8B) with MammothModa2's generation experts. Random
weights cost what trained ones cost; only the pictures would mean nothing.

`floor` is the time of the same weights through the library's bare products at the engine's bucket, in one graph, plus the
keys and values of the rows present at the measured read rate: norms, rotation, softmax, sampling and launches are free.
`peer` is what a user would pick instead: transformers' Qwen2 decoder of these widths, static cache, compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mammoth_ar.conditioning import Scope
from mammoth_ar.fast.cuts import best
from mammoth_ar.fast.weights import StepWeights
from mammoth_ar.model.config import Family, LLMConfig
from mammoth_ar.model.decoder import Decoder

__all__ = ["ROWS", "SCOPE", "config", "floor_ms", "graph_ms", "peer_ms", "random_decoder", "read_rate"]

SCOPE = Scope(eol_id=152064, visual_start=152072, visual_end=168456)
TEXT: dict[Family, dict[str, Any]] = {
    "preview": {
        "model_type": "mammothmoda2_qwen2_5_vl",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "moe_type": "ffn-14:28",
    },
    "dev": {
        "model_type": "mammothmoda2_qwen3_vl",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e6,
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        "moe_type": "ffn-18:36",
    },
}
ROWS = best("preview", "bf16").rows
NORM_SPREAD, BIAS_SPREAD = 0.05, 0.1
NUM_REPEATS = 9


def config(family: Family) -> LLMConfig:
    return LLMConfig.parse({"llm_config": TEXT[family], "gen_condition_layers": [-2, -5, -8, -11, -14, -17]})


def random_decoder(family: Family, *, seed: int = 0) -> Decoder:
    """Return a bf16 decoder on the GPU: weights of variance 1 / inner width, norms near 1."""
    generator = torch.Generator("cuda").manual_seed(seed)
    with torch.device("meta"):
        decoder = Decoder(config(family)).to(torch.bfloat16)
    decoder = decoder.to_empty(device="cuda")
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1.0, NORM_SPREAD, generator=generator)
        elif name.endswith("bias"):
            parameter.data.normal_(0.0, BIAS_SPREAD, generator=generator)
        else:
            spread = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
            parameter.data.normal_(0.0, spread, generator=generator)
    return decoder.eval().requires_grad_(False)


def graph_ms(step: Callable[[], object], *, repeats: int = NUM_REPEATS) -> list[float]:
    """Return the milliseconds of `repeats` replays of `step` in one graph, one warm-up before."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def read_rate() -> float:
    """Return the bytes per second of a streaming read of 4 GiB."""
    data = torch.empty(2**29, dtype=torch.int64, device="cuda")
    return data.numel() * 8 / (float(np.median(graph_ms(data.sum))) / 1e3)


def floor_ms(weights: StepWeights) -> float:
    """Return the milliseconds of one step's products alone, a full bucket of rows."""
    products = [m for layer in weights.layers for m in (layer.heads, layer.out, layer.gated, layer.down)] + [
        weights.head
    ]
    inputs: dict[int, Tensor] = {
        inner: torch.randn(ROWS, inner, dtype=torch.bfloat16, device="cuda") for inner in {m.shape[1] for m in products}
    }

    def step() -> None:
        for matrix in products:
            functional.linear(inputs[matrix.shape[1]], matrix.values)

    return float(np.median(graph_ms(step)))


def peer_ms(num_rows: int, context: int, *, num_steps: int = 20) -> list[float]:
    """Return the milliseconds of decode steps of transformers' Qwen2 decoder at Preview's widths, head included.

    Static cache, `torch.compile(mode="reduce-overhead")`; the cache is as long as the context, which flatters it.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM, StaticCache

    text = TEXT["preview"]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    peer_config = Qwen2Config(vocab_size=SCOPE.visual_end - SCOPE.visual_start, **{name: text[name] for name in names})
    with torch.device("cuda"):
        peer = Qwen2ForCausalLM._from_config(peer_config, dtype=torch.bfloat16).eval()
    cache = StaticCache(config=peer_config, max_cache_len=context + num_steps + 8)
    heads, head_dim = text["num_key_value_heads"], text["hidden_size"] // text["num_attention_heads"]
    cache.early_initialization(num_rows, heads, head_dim, torch.bfloat16, torch.device("cuda"))
    step = torch.compile(peer.forward, mode="reduce-overhead", fullgraph=True)
    ids = torch.zeros(num_rows, 1, dtype=torch.int64, device="cuda")
    times = []
    with torch.inference_mode():
        for index in range(num_steps + 5):
            position = torch.full((num_rows, 1), context + index, device="cuda")
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.compiler.cudagraph_mark_step_begin()
            begin.record()
            step(ids, past_key_values=cache, position_ids=position, cache_position=position[0], use_cache=True)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return times[5:]
