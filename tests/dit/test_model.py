"""The model's own laws: what may depend on what, at toy width in float64.

Axes: C caption tokens, n image tokens, D width.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mammoth_dit.model.config import RefinerConfig
from mammoth_dit.model.embeddings import patchify, sinusoid, unpatchify
from mammoth_dit.model.layers import RMSNorm, attend
from mammoth_dit.model.qformer import QFormer, choose_num_heads, propose_num_heads
from mammoth_dit.model.rotary import caption_positions, image_positions, rotate, rotation
from mammoth_dit.model.vae import ImageDecoder, to_rgb
from mammoth_serving.tiny import tiny_config

CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("width", "proposed", "heads"),
    [(3584, 28, 28), (2520, 19, 20), (4096, 32, 32), (48, 5, 1), (385, 3, 5), (2520, 0, 20), (192, 0, 2), (1, 0, 1)],
)
def test_a_head_count_divides_the_width(width, proposed, heads):
    assert choose_num_heads(width, proposed) == heads


@pytest.mark.parametrize(("width", "proposed"), [(3584, 28), (2520, 19), (40, 1)])
def test_heads_are_proposed_128_wide(width, proposed):
    assert propose_num_heads(width) == proposed


def small_qformer(num_queries: int) -> QFormer:
    module = QFormer(12, 8, RefinerConfig(num_queries, 2, None, 1e-5, nested=False), 2).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return module.requires_grad_(False)


@pytest.mark.parametrize("num_rows", [1, 3, 4, 9], ids=["one", "shorter", "equal", "longer"])
def test_all_queries_come_out_whatever_goes_in(num_rows):  # F1
    assert small_qformer(4)(randn(2, num_rows, 12)).shape == (2, 4, 8)


def test_padding_of_image_rows_is_invisible():
    module, rows = small_qformer(4), randn(1, 5, 12)
    padded = torch.cat((rows, 100 * randn(1, 3, 12, seed=1)), dim=1)
    keep = torch.arange(8)[None] < 5
    torch.testing.assert_close(module(padded, keep), module(rows), rtol=0, atol=1e-12)
    assert (module(padded) - module(rows)).abs().max() > 1e-3


def test_a_norm_rounds_before_it_multiplies():
    norm = RMSNorm(64, 1e-5).bfloat16()
    torch.nn.init.constant_(norm.weight, 1.7)
    x = randn(64).bfloat16()
    wide = x.float()
    expected = norm.weight * (wide * torch.rsqrt(wide.square().mean() + 1e-5)).bfloat16()
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_query_heads_share_key_heads_in_order(num_kv_heads):
    q, k, v = randn(2, 5, 4, 6), randn(2, 7, num_kv_heads, 6, seed=1), randn(2, 7, num_kv_heads, 6, seed=2)
    out = attend(q, k, v, None).view(2, 5, 4, 6)
    for head in range(4):
        key = k[:, :, head * num_kv_heads // 4]
        weights = torch.softmax(q[:, :, head] @ key.transpose(1, 2) / math.sqrt(6), dim=-1)
        torch.testing.assert_close(out[:, :, head], weights @ v[:, :, head * num_kv_heads // 4], rtol=0, atol=1e-12)


def test_rotary_turns_pairs_and_keeps_only_distances():
    widths = (4, 2, 6)
    by = rotation(caption_positions(9), widths, torch.float64, CPU)
    q, k = randn(1, 1, 1, 12), randn(1, 1, 1, 12, seed=1)

    def product(i: int, j: int) -> Tensor:
        at = [type(by)(cos=by.cos[p, None], sin=by.sin[p, None]) for p in (i, j)]
        return (rotate(q, at[0]) * rotate(k, at[1])).sum()

    torch.testing.assert_close(product(7, 4), product(3, 0), rtol=0, atol=1e-12)
    assert (product(7, 4) - product(7, 3)).abs() > 1e-3
    angle = 5 * 10000 ** (-2 / 4)
    turned = rotate(q, type(by)(cos=by.cos[5, None], sin=by.sin[5, None]))[0, 0, 0]
    x = q[0, 0, 0]
    torch.testing.assert_close(turned[2], x[2] * math.cos(angle) - x[3] * math.sin(angle), rtol=0, atol=1e-12)
    torch.testing.assert_close(turned[3], x[2] * math.sin(angle) + x[3] * math.cos(angle), rtol=0, atol=1e-12)


def test_an_image_sits_behind_its_caption():
    assert image_positions(2, 3, shift=5).tolist() == [[5, 0, 0], [5, 0, 1], [5, 0, 2], [5, 1, 0], [5, 1, 1], [5, 1, 2]]


def test_times_become_cosines_then_sines():
    out = sinusoid(torch.tensor([0.5], dtype=torch.float64), 1000.0)[0]
    angle = 500 * 10000 ** (-3 / 128)
    torch.testing.assert_close(out[3].item(), math.cos(angle), rtol=0, atol=1e-9)
    torch.testing.assert_close(out[131].item(), math.sin(angle), rtol=0, atol=1e-9)


@pytest.mark.parametrize("patch", [1, 2, 4])
def test_patches_come_back_to_their_place(patch):
    x = randn(2, 3, 8, 12)
    tokens = patchify(x, patch)
    assert torch.equal(unpatchify(tokens, patch, 8 // patch, 12 // patch), x)
    second = x[0, :, :patch, patch : 2 * patch].permute(1, 2, 0).flatten()
    assert torch.equal(tokens[0, 1], second)


def captions(engine, num_text: int, seed: int) -> Tensor:
    return engine.prepare(engine.job("x", num_text=num_text, seed=seed)).caption_CD


def velocity(engine, rows: list[Tensor], x: Tensor, t_B: Tensor) -> Tensor:
    model = engine._transformer
    with torch.inference_mode():
        return model(x, t_B, model.pack(rows, x.shape[2] // 2, x.shape[3] // 2))


def test_rows_of_one_batch_have_their_own_times_and_captions(strict):
    rows = [captions(strict, 5, 1), captions(strict, 2, 2), captions(strict, 5, 1)[:0]]
    x, t_B = randn(3, 16, 4, 6), torch.tensor([0.0, 0.4, 0.9], dtype=torch.float64)
    together = velocity(strict, rows, x, t_B)
    for row, caption in enumerate(rows):
        alone = velocity(strict, [caption], x[row, None], t_B[row, None])
        torch.testing.assert_close(together[row, None], alone, rtol=0, atol=1e-10)


def test_a_forgotten_mask_would_be_noticed(strict, monkeypatch):
    rows = [captions(strict, 5, 1), captions(strict, 2, 2)]
    x, t_B = randn(2, 16, 4, 6), torch.zeros(2, dtype=torch.float64)
    alone = velocity(strict, rows[1:], x[1:], t_B[1:])
    monkeypatch.setattr("mammoth_dit.model.blocks.attend", lambda q, k, v, keep: attend(q, k, v, None))
    assert (velocity(strict, rows, x, t_B)[1:] - alone).abs().max() > 1e-3


def test_text_and_queries_are_compacted_before_they_are_padded(strict):  # F2
    rows = [captions(strict, num_text, seed=num_text) for num_text in (2, 4)]
    num_queries = strict.config.num_queries
    assert [len(row) for row in rows] == [2 + num_queries, 4 + num_queries]
    context = strict._transformer.pack(rows, 2, 3)
    valid = [length + 6 for length in (2 + num_queries, 4 + num_queries)]
    assert context.keep_BS.sum(1).tolist() == valid
    assert all(bool((row.int().diff() <= 0).all()) for row in context.keep_BS)


def test_no_caption_skips_the_caption_path(strict):
    model = strict._transformer
    seen: list[str] = []
    hooks = [block.register_forward_hook(lambda *_: seen.append("ran")) for block in model.context_refiner]
    empty = model.caption(torch.zeros(0, strict.config.llm_width, dtype=torch.float64))
    for hook in hooks:
        hook.remove()
    assert empty.shape == (0, 48)
    assert not seen


def test_a_caption_depends_on_neither_time_nor_latents(strict):
    first = strict.prepare(strict.job("a", size_px=(32, 48), steps=3))
    second = strict.prepare(strict.job("b", size_px=(64, 64), steps=9, guidance=1.0))
    assert torch.equal(first.caption_CD, second.caption_CD)


@pytest.mark.parametrize(
    ("value", "pixel"),
    [(0.0, 128), (-1.0, 0), (1.0, 255), (-7.0, 0), (7.0, 255), (1 / 255, 128), (0.5, 191)],
)
def test_pixels_are_clamped_and_rounded_half_to_even(value, pixel):
    rgb = to_rgb(torch.full((3, 2, 4), value, dtype=torch.float32))
    assert rgb.shape == (2, 4, 3)
    assert rgb.dtype == torch.uint8
    assert rgb.unique().tolist() == [pixel]


def decoder(**changes) -> ImageDecoder:
    torch.manual_seed(0)
    return ImageDecoder(tiny_config("preview")["gen_vae_config"] | changes).requires_grad_(False)


def test_latents_are_cast_to_the_dtype_of_the_decoder():
    image = decoder().half()(randn(1, 16, 2, 2))
    assert image.dtype == torch.float16
    assert image.shape == (1, 3, 16, 16)


def test_latent_scaling_follows_the_config_and_may_be_absent():
    z = randn(1, 16, 2, 2).float()
    plain = decoder(scaling_factor=None, shift_factor=None)
    torch.testing.assert_close(decoder()(z), plain(z / 0.3611 + 0.1159))


def test_a_decoder_with_a_quantisation_layer_uses_it():
    with_quant = decoder(use_post_quant_conv=True)
    assert "post_quant_conv.weight" in with_quant.state_dict()
    assert with_quant(randn(1, 16, 2, 2).float()).shape == (1, 3, 16, 16)


def test_a_decoder_of_two_blocks_makes_a_smaller_picture():
    two = decoder(
        block_out_channels=[16, 16],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
    )
    assert two(randn(1, 16, 4, 6).float()).shape == (1, 3, 8, 12)
