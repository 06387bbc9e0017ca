"""Do: build real engines at toy width for tests: the production loader over a tiny random checkpoint.

`VirtualDevice` stands in for the device worker on a loop whose clock is faked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from mammoth_ar import tiny
from mammoth_ar.conditioning import Grid, Sampling, Scope
from mammoth_ar.engine import Engine, Exactness
from mammoth_ar.model.config import LLMConfig
from mammoth_ar.model.decoder import Decoder
from mammoth_ar.prompt import PromptTemplate
from mammoth_ar.sequence import Sequence
from mammoth_ar.tokenizer import Tokenizer
from mammoth_serving.checkpoint import Checkpoint
from mammoth_serving.tiny import Family

if TYPE_CHECKING:
    from mammoth_ar.fast.engine import FastEngine

__all__ = ["VirtualDevice", "fast_engine", "make_checkpoint", "make_sequence", "open_tokenizer", "tiny_engine"]

P = ParamSpec("P")
R = TypeVar("R")


class VirtualDevice:
    """Runs every call at once and lets `call_s` pass on the loop's clock; counts the calls by function name."""

    def __init__(self, call_s: float) -> None:
        self.call_s = call_s
        self.calls: list[str] = []

    async def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.calls.append(fn.__name__)
        result = fn(*args, **kwargs)
        await asyncio.sleep(self.call_s)
        return result


def make_checkpoint(path: Path, family: Family = "preview") -> Checkpoint:
    """Write the tiny checkpoint's files and AR shard into `path` and open it; what is there already is kept."""
    if not (path / tiny.SHARD).exists():
        tiny.write_files(path, family)
        tiny.write(path)
    return Checkpoint.open(path)


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    config = LLMConfig.parse(checkpoint.config)
    start = config.gen_vocab_start_index
    return Tokenizer.open(checkpoint.path, gen_vocab_start_index=start, family=config.family)


def tiny_engine(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_slots: int = 4,
    max_context_tokens: int = 192,
    prefill_chunk_tokens: int = 32,
    exactness: Exactness = "strict",
) -> Engine:
    """Load the production engine; float64 makes a difference between paths visible above rounding."""
    return Engine.load(
        checkpoint,
        Scope.parse(checkpoint.generation),
        num_slots=num_slots,
        max_context_tokens=max_context_tokens,
        dtype=dtype,
        device=device,
        prefill_chunk_tokens=prefill_chunk_tokens,
        exactness=exactness,
    )


def fast_engine(decoder: Decoder, scope: Scope, *, num_slices: int = 1, **options: Any) -> FastEngine:
    """Return a fast engine whose programs are few and large, which Triton's interpreter likes.

    With `num_slices` 2 every kind of cut is there all the same: slices, pieces, tiles, groups of rows.
    """
    from mammoth_ar.fast.cuts import Cut, Tiles
    from mammoth_ar.fast.engine import FastEngine  # imports a compiler that a machine without a GPU may lack

    wide = Tiles(64 if num_slices > 1 else 128, 64 if num_slices > 1 else 128, num_slices, 4, 1)
    cut = Cut(
        rows=4,
        heads=wide,
        out=wide,
        gated=replace(wide, split=1),
        down=wide,
        logits=Tiles(128, 64, 1, 4, 1),
        piece=32 // num_slices,
        programs=num_slices,
        block_s=32 // num_slices,
    )
    return FastEngine(decoder, scope, cut=cut, **options)


def make_sequence(
    checkpoint: Checkpoint, text: str, grid: Grid, sampling: Sampling, *, negative: str | None = None
) -> Sequence:
    """Render `text` as the service would; a negative prompt of None has no rows."""
    template = PromptTemplate.open(checkpoint.path, open_tokenizer(checkpoint))
    prompt = template.render(text, grid)
    negative_ids = () if negative is None else template.render_negative(negative)
    return Sequence(prompt.ids, grid, sampling, tail_ids=prompt.tail_ids, negative_ids=negative_ids)
