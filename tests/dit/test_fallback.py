"""The plain path beside the fast one: the same bits, and no second copy of the blocks' matrices."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch

from mammoth_dit.engine import Engine
from mammoth_dit.fast.engine import FastEngine
from mammoth_dit.testing import TinyEngine


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_its_steps_have_the_bits_of_the_plain_engine(tmp_path, dtype):
    tiny = TinyEngine(tmp_path, dtype=dtype)
    group, kept = (engine.group([engine.prepare(tiny.job("a"))]) for engine in (tiny, FastEngine(tiny._model)))
    assert torch.equal(Engine.denoise(tiny, kept), tiny.denoise(group))


@pytest.mark.parametrize(("precision", "kept"), [("bf16", False), ("fp8", True)])
def test_the_matrices_that_were_loaded_are_let_go(tmp_path, precision, kept):
    tiny = TinyEngine(tmp_path, dtype=torch.bfloat16)
    model = replace(tiny._model, transformer=copy.deepcopy(tiny._model.transformer))
    block = model.transformer.layers[0]
    matrices = [
        weakref.ref(each.weight) for each in (block.attn.to_q, block.attn.to_out[0], block.feed_forward.linear_2)
    ]
    norm = weakref.ref(block.norm2.weight)
    engine = FastEngine(model, precision=precision)
    del model, block
    gc.collect()
    assert [matrix() is not None for matrix in matrices] == [kept] * 3
    assert norm() is not None
    assert engine.prepare(tiny.job("a")).caption_CD.shape[1] == engine.config.transformer.hidden_size
