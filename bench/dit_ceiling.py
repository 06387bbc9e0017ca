"""Do: the library ceiling of a DiT step: its matrix products and the best library attention, alone in one CUDA graph.

36 block evaluations: 16 layers and the two blocks of the noise refiner, in both passes; width 2520, caption 205, nothing
merged across passes, nothing but products. What a step takes above it is everything that is no product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.dit_model import CAPTION_TOKENS

__all__ = ["ceiling", "graphed"]

WIDTH, INNER, HEADS, KEY_HEADS, HEAD = 2520, 10240, 21, 7, 120
LAYERS, REFINERS = 16, 2


def ceiling(size_px: int, batch: int, backend: SDPBackend) -> Callable[[], None]:
    """Return a graph of the products of one guided step of `batch` square pictures."""
    num_image = (size_px // 16) ** 2
    weights = [_weights() for _ in range(LAYERS + REFINERS)]
    lengths = [num_image] * REFINERS + [num_image + CAPTION_TOKENS] * LAYERS
    passes = [lengths, [num_image] * (LAYERS + REFINERS)]
    inputs = {length: _inputs(batch, length) for length in {length for each in passes for length in each}}

    def step() -> None:
        for each in passes:
            for length, weight in zip(each, weights, strict=True):
                _block(inputs[length], weight, backend)

    return graphed(step)


def graphed(compute: Callable[[], object]) -> Callable[[], None]:
    """Warm `compute` up on a side stream, record it, and return its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    return graph.replay


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5


def _weights() -> list[Tensor]:
    num_heads = HEADS + 2 * KEY_HEADS
    return [
        _random(num_heads * HEAD, WIDTH),
        _random(WIDTH, HEADS * HEAD),
        _random(2 * INNER, WIDTH),
        _random(WIDTH, INNER),
    ]


def _inputs(batch: int, length: int) -> list[Tensor]:
    tokens = batch * length
    heads = [_random(batch, count, length, HEAD) for count in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [_random(tokens, WIDTH), _random(tokens, HEADS * HEAD), _random(tokens, INNER), *heads]


def _block(inputs: list[Tensor], weights: list[Tensor], backend: SDPBackend) -> None:
    x, mixed, inner, q, k, v = inputs
    torch.mm(x, weights[0].t())
    with sdpa_kernel(backend):
        scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.mm(mixed, weights[1].t())
    torch.mm(x, weights[2].t())
    torch.mm(inner, weights[3].t())
