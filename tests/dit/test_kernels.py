"""The Triton kernels compute what the reference operations say: in the interpreter here, on the GPU in `make bench-dit`."""

from __future__ import annotations

import pytest
import torch

from mammoth_dit.fast.ops import MASKED, HeadLayout, Quantized, ReferenceOps
from mammoth_dit.testing import TinyEngine
from mammoth_dit.tiling import Tiling, decode_tiled

pytest.importorskip("triton")
from mammoth_dit.fast import decoder  # after the check that Triton is there
from mammoth_dit.fast.kernels import TritonOps

ROWS = torch.tensor([0, 0, 1, 1, 2, 2, 2], dtype=torch.int32)
HEADS = HeadLayout(6, 2, 12)


def matrix(width: int, padded: int) -> torch.Tensor:
    x = torch.zeros(len(ROWS), padded)
    x[:, :width] = 3 * torch.randn(len(ROWS), width)
    return x


def differ(made, expected) -> float:
    """The largest difference; of quantized matrices, of what they stand for, in steps of a row's scale."""
    if isinstance(made, tuple):
        return max(differ(a, b) for a, b in zip(made, expected, strict=True))
    if isinstance(made, Quantized):
        values = made.values.float() * made.scale - expected.values.float() * expected.scale
        return float((values.abs() / expected.scale / 32).max())
    return float((made.float() - expected.float()).abs().max())


def operations(width: int, padded: int):
    x, y, vectors = matrix(width, padded), matrix(width, padded), torch.randn(3, 5, width)
    gate, scale = vectors[:, 1], vectors[:, 3]
    yield "norm", lambda ops: ops.norm(x, scale, ROWS)
    yield "add_norm", lambda ops: ops.add_norm(x, y, gate, scale, ROWS)
    yield "add", lambda ops: ops.add(x, y, gate, ROWS)
    yield "add_layer_norm", lambda ops: ops.add_layer_norm(x, y, gate, scale, ROWS)
    yield "layer_norm", lambda ops: ops.layer_norm(x, scale, ROWS)
    yield "silu_mul", lambda ops: ops.silu_mul(torch.cat((x, y), dim=1))
    yield "quantize", lambda ops: ops.quantize(x)
    heads = torch.randn(len(ROWS), HEADS.num_heads, HEADS.padded)
    weights, angles = torch.randn(2, HEADS.padded), torch.randn(len(ROWS), 2, HEADS.padded // 2)
    mask = torch.tensor([0.0, 0, 0, 0, 0, MASKED, MASKED])

    def rotate(ops):
        turned = heads.clone()
        turned[..., HEADS.width :] = 0
        ops.rotate(turned, weights, angles, mask, HEADS)
        return turned

    yield "rotate", rotate


WIDTHS = [(48, 128), (200, 384)]
NAMES = ["norm", "add_norm", "add", "add_layer_norm", "layer_norm", "silu_mul", "quantize", "rotate"]


@pytest.mark.parametrize("quantizes", [False, True])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_agrees_with_its_reference(name, widths, quantizes):
    torch.manual_seed(0)
    run = dict(operations(*widths))[name]
    made, expected = (run(kind(1e-5, quantizes=quantizes)) for kind in (TritonOps, ReferenceOps))
    # the interpreter rounds to e4m3 less well than a GPU: two steps of the coarsest binade
    assert differ(made, expected) <= (2.01 if quantizes else 1e-4)


def test_no_kernel_is_left_out():
    assert [name for name, _ in operations(48, 128)] == NAMES


@pytest.mark.parametrize("silu", [False, True])
def test_the_fused_group_norm_agrees_with_the_stock_one(silu):
    norm = torch.nn.GroupNorm(8, 16).requires_grad_(False)
    norm.weight.normal_()
    norm.bias.normal_()
    x = (5 + 3 * torch.randn(2, 16, 10, 53)).contiguous(memory_format=torch.channels_last)  # one block and a bit
    expected = norm(x)
    expected = torch.nn.functional.silu(expected) if silu else expected
    assert differ(decoder.FusedGroupNorm(norm, silu=silu)(x), expected) <= 1e-4
    flat = decoder.FusedGroupNorm(norm, silu=silu)(x.flatten(2))
    assert differ(flat, expected.flatten(2)) <= 1e-4


def test_a_fused_decoder_decodes_the_same_whole_and_in_tiles(tmp_path):
    tiny = TinyEngine(tmp_path, dtype=torch.float32)
    latents = torch.randn(1, 16, 2, 6)
    with torch.inference_mode():
        made = decoder.fused(tiny._model.vae)
        assert not any(isinstance(module, torch.nn.GroupNorm | torch.nn.SiLU) for module in made.modules())
        torch.testing.assert_close(made(latents), tiny._model.vae(latents), rtol=0, atol=1e-4)
        both = (decode_tiled(vae, latents, Tiling(max_latents=8, overlap=2)) for vae in (made, tiny._model.vae))
        torch.testing.assert_close(*both, rtol=0, atol=1e-4)
