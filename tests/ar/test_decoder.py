"""The plain decoder against itself: cached equals uncached, batched equals alone, and a broken mask is noticed.

B rows, L tokens, H width.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mammoth_ar.cache import KVCache, PaddedWindow, RowWindow
from mammoth_ar.model.config import LLMConfig
from mammoth_ar.model.decoder import Decoder
from mammoth_ar.model.weights import load
from mammoth_ar.testing import make_checkpoint
from mammoth_serving.checkpoint import Checkpoint
from mammoth_serving.tiny import FAMILIES, tiny_config

ROUNDING = 1e-10  # float64; a key seen or missed shows above 1e-3
LEAK = 1e-3
TEXTS = [[1, 2, 515, 3, 530, 531], [7, 600], [9, 9, 9, 520]]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def decoder(checkpoint: Checkpoint) -> Decoder:
    return load(checkpoint, LLMConfig.parse(checkpoint.config), dtype=torch.float64)


def alone(decoder: Decoder, ids: list[int]) -> Tensor:
    """Return the condition rows [L,H] of one text without a cache."""
    num_tokens = len(ids)
    mask = torch.ones(1, num_tokens, num_tokens, dtype=torch.bool).tril()
    return decoder(torch.tensor([ids]), torch.arange(num_tokens)[None], mask).condition_BLH[0]


def cached(decoder: Decoder, texts: list[list[int]]) -> KVCache:
    """Return a cache that holds all but the last token of every text, a slot each."""
    cache = KVCache(decoder.config, num_slots=len(texts), num_positions=16, dtype=torch.float64, device="cpu")
    for slot, ids in enumerate(texts):
        window = RowWindow(cache, slot, 0, len(ids) - 1)
        decoder(torch.tensor([ids[:-1]]), window.positions(), window.mask(), window)
    return cache


def last_tokens(decoder: Decoder, window: PaddedWindow, mask: Tensor) -> Tensor:
    ids_B1 = torch.tensor([[ids[-1]] for ids in TEXTS])
    return decoder(ids_B1, window.positions(), mask, window, all_generation=False).condition_BLH[:, 0]


def padded_window(cache: KVCache) -> PaddedWindow:
    return PaddedWindow(cache, range(len(TEXTS)), [len(ids) - 1 for ids in TEXTS])


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_chunks_with_a_cache_equal_one_pass_without(decoder: Decoder, cut: int) -> None:
    ids, cache = TEXTS[0], cached(decoder, [[0, 0]])
    rows = []
    for start, end in ((0, cut), (cut, len(ids))):
        window = RowWindow(cache, 0, start, end - start)
        hidden = decoder(torch.tensor([ids[start:end]]), window.positions(), window.mask(), window)
        rows.append(hidden.condition_BLH[0])
    torch.testing.assert_close(torch.cat(rows), alone(decoder, ids), rtol=0, atol=ROUNDING)


def test_a_padded_batch_equals_every_row_alone(decoder: Decoder) -> None:
    window = padded_window(cached(decoder, TEXTS))
    together = last_tokens(decoder, window, window.mask())
    for row, ids in enumerate(TEXTS):
        torch.testing.assert_close(together[row], alone(decoder, ids)[-1], rtol=0, atol=ROUNDING)


def test_a_missing_mask_would_be_noticed(decoder: Decoder) -> None:
    window = padded_window(cached(decoder, TEXTS))
    together = last_tokens(decoder, window, torch.ones_like(window.mask()))
    assert (together[1] - alone(decoder, TEXTS[1])[-1]).abs().max() > LEAK
    torch.testing.assert_close(together[0], alone(decoder, TEXTS[0])[-1], rtol=0, atol=ROUNDING)  # the longest row


def test_what_lies_beyond_a_row_is_never_read(decoder: Decoder) -> None:
    cache = cached(decoder, TEXTS)
    for slot, ids in enumerate(TEXTS):
        for stored in (*cache.keys, *cache.values):
            stored[slot, :, len(ids) - 1 :] = float("nan")
    window = padded_window(cache)
    assert last_tokens(decoder, window, window.mask()).isfinite().all()


def test_generation_tokens_take_the_same_path_when_promised(decoder: Decoder) -> None:
    ids, mask = torch.tensor([[515, 530, 531]]), torch.ones(1, 3, 3, dtype=torch.bool).tril()
    routed = decoder(ids, torch.arange(3)[None], mask)
    promised = decoder(ids, torch.arange(3)[None], mask, all_generation=True)
    assert torch.equal(routed.condition_BLH, promised.condition_BLH)


def test_an_expert_reaches_its_own_tokens_alone(decoder: Decoder) -> None:
    changed = copy.deepcopy(decoder)
    changed.layers[3].gen_mlp.down_proj.weight.data.mul_(2)
    moved = (alone(changed, TEXTS[0]) - alone(decoder, TEXTS[0])).abs().amax(-1) > 0
    is_last_layer_collected = not decoder.config.condition_layers
    assert moved.tolist() == [token >= 512 and is_last_layer_collected for token in TEXTS[0]]


def test_equal_positions_on_all_axes_need_no_axes(decoder: Decoder) -> None:
    ids, mask = torch.tensor([TEXTS[0]]), torch.ones(1, 6, 6, dtype=torch.bool).tril()
    flat, three = torch.arange(6)[None], torch.arange(6).expand(3, 1, 6)
    assert torch.equal(decoder(ids, flat, mask).normed_BLH, decoder(ids, three, mask).normed_BLH)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_float_dtype_runs(checkpoint: Checkpoint, decoder: Decoder, dtype: torch.dtype) -> None:
    other = load(checkpoint, LLMConfig.parse(checkpoint.config), dtype=dtype)
    rows, exact = alone(other, TEXTS[0]), alone(decoder, TEXTS[0])
    assert rows.dtype == dtype
    error = (rows.double() - exact).abs().max() / exact.abs().max()
    assert error < 8 * torch.finfo(dtype).eps ** (1.0 if dtype == torch.bfloat16 else 0.9)


def test_without_an_extra_vocabulary_one_table_and_one_head_serve_all_ids(tmp_path: Path) -> None:
    config: dict[str, Any] = copy.deepcopy(tiny_config("preview"))
    config["llm_config"] |= {"vocab_size": 608, "extra_gen_vocab": False}
    parsed = LLMConfig.parse(config)
    torch.manual_seed(0)
    decoder = Decoder(parsed).double().requires_grad_(False)
    for parameter in decoder.parameters():
        parameter.data = torch.randn_like(parameter) / 8
    x_BLH = torch.randn(1, 2, parsed.hidden_size, dtype=torch.float64)
    assert decoder.logits(x_BLH).shape[-1] == 608
    assert torch.equal(decoder.visual_logits(x_BLH, 520, 584), x_BLH @ decoder.lm_head.weight[520:584].T)
    assert torch.equal(
        decoder._embed(torch.tensor([[3, 600]]), None), decoder.embed_tokens.weight[torch.tensor([[3, 600]])]
    )
