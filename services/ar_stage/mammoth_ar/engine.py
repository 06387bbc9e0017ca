"""Do: own the weights, the device and the KV rows; advance sequences by one prefill chunk or one token.

Exact by construction: under `exactness="strict"` every row runs by itself over exactly its own context, so that a
request's tokens and hidden rows have the same bits alone, in any company, in any slot, whenever it joins. `tolerant`
runs one padded batch, equal up to rounding. Which sequence runs when is the batcher's business.

A request fails as a value (EngineFailed) and leaves its neighbours alone; DeviceLost is raised when nothing can run.
One thread calls at a time.

B rows of a batch, L new tokens, P prompt tokens, T rows delivered, H width, V ids in scope.
"""

from __future__ import annotations

import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from mammoth_ar.cache import KVCache, PaddedWindow, RowWindow
from mammoth_ar.conditioning import Knobs, Scope, guided, sample, shaped
from mammoth_ar.model.config import HeadAlignment, LLMConfig
from mammoth_ar.model.decoder import Decoder, Hidden
from mammoth_ar.model.weights import load
from mammoth_ar.sequence import Rows, Running, Sequence, Text
from mammoth_serving.checkpoint import Checkpoint, CheckpointError
from mammoth_wire.errors import EngineFailed, InvalidRequest

__all__ = ["DeviceLost", "Engine", "Exactness", "checked", "started"]

Exactness = Literal["strict", "tolerant"]
T = TypeVar("T")
logger = logging.getLogger(__name__)
MAX_TAILS = 64  # of different grids; the least recently used is forgotten
ROW_FAILURES = (ArithmeticError, LookupError, RuntimeError, ValueError)


class DeviceLost(Exception):
    """The device answers nothing any more; only a new process helps."""


class Engine:
    """`num_slots` KV rows of `max_context_tokens` each; `prefill_chunk_tokens` bounds how long one call takes."""

    def __init__(
        self,
        decoder: Decoder,
        scope: Scope,
        *,
        num_slots: int,
        max_context_tokens: int,
        prefill_chunk_tokens: int = 256,
        exactness: Exactness = "strict",
    ) -> None:
        """Allocate the KV rows. Raises CheckpointError when `scope` lies outside the generation vocabulary."""
        weight = decoder.norm.weight
        self.decoder = decoder
        self.scope = _scored_scope(scope, decoder.config)
        self.max_context_tokens = max_context_tokens
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.exactness = exactness
        self.device = weight.device
        self._tails: OrderedDict[tuple[int, ...], tuple[list[Tensor], Tensor]] = OrderedDict()
        self.cache = KVCache(
            decoder.config,
            num_slots=num_slots,
            num_positions=max_context_tokens,
            dtype=weight.dtype,
            device=weight.device,
        )

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        scope: Scope,
        *,
        num_slots: int,
        max_context_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        head_alignment: HeadAlignment = "concat",
        prefill_chunk_tokens: int = 256,
        exactness: Exactness = "strict",
    ) -> Engine:
        """Load the LLM of `checkpoint` and allocate; CheckpointError when the two do not fit."""
        config = LLMConfig.parse(checkpoint.config, head_alignment=head_alignment)
        decoder = load(checkpoint, config, dtype=dtype, device=device)
        return cls(
            decoder,
            scope,
            num_slots=num_slots,
            max_context_tokens=max_context_tokens,
            prefill_chunk_tokens=prefill_chunk_tokens,
            exactness=exactness,
        )

    @property
    def hidden_size(self) -> int:
        return self.decoder.config.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.norm.weight.dtype

    @property
    def num_slots(self) -> int:
        return self.cache.num_slots

    @property
    def num_free_slots(self) -> int:
        return self.cache.num_free

    @property
    def kernels(self) -> str:
        """What a receipt says of how tokens are computed."""
        return f"plain, prefill in {self.prefill_chunk_tokens}"

    @property
    def row_bucket(self) -> int:
        """Rows of a matrix product of decoding."""
        return 1 if self.exactness == "strict" else self.num_slots

    @property
    def packages(self) -> tuple[str, ...]:
        """Packages whose numerics the kernels use."""
        return ("torch",)

    def refusal(self, sequence: Sequence) -> InvalidRequest | None:
        """Return why this engine can never run `sequence`, or None."""
        violations, limit = [], f"tokens of context, this deployment serves at most {self.max_context_tokens}"
        if sequence.num_positions > self.max_context_tokens:
            violations.append(("prompt", f"prompt and grid need {sequence.num_positions} {limit}"))
        if len(sequence.negative_ids) > self.max_context_tokens:
            violations.append(("negative_prompt", f"it needs {len(sequence.negative_ids)} {limit}"))
        if sequence.num_slots > self.num_slots:
            violations.append(("ar_guidance", f"guidance needs 2 rows, this deployment has {self.num_slots}"))
        return InvalidRequest(violations) if violations else None

    def admit(self, sequence: Sequence) -> Running:
        """Take slots for `sequence`. Raises InvalidRequest for what can never run; the caller sees to free slots."""
        if refusal := self.refusal(sequence):
            raise refusal
        assert sequence.prompt_ids
        assert sequence.tail_ids or not sequence.is_guided
        slots = self.cache.take(sequence.num_slots)
        texts = [Text("negative", sequence.negative_ids, slots[0])] if sequence.negative_ids else []
        texts += [Text("tail", sequence.tail_ids, slots[1])] if sequence.is_guided else []
        texts.append(Text("prompt", sequence.prompt_ids, slots[0]))
        ids_P = torch.tensor(sequence.prompt_ids, device=self.device)
        visual_V = torch.arange(self.scope.visual_start, self.scope.visual_end, device=self.device)
        seen_1V = torch.isin(visual_V, ids_P).unsqueeze(0)
        return Running(sequence, slots, Knobs.of([sequence.sampling], self.device), texts, seen_1V)

    def release(self, running: Running) -> None:
        """Give the slots back, finished or not."""
        self.cache.give_back(running.slots)
        running.slots = ()

    def synchronize(self) -> None:
        """Wait for the device; this engine's calls have waited already."""

    @torch.no_grad()
    def prefill(self, running: Running) -> Rows | EngineFailed | None:
        """Run the next chunk of the negative prompt, the tail or the prompt, in this order.

        Returns the chunk's rows, None for the tail, which is delivered to nobody, or the failure of this request.
        The last chunk also chooses the first grid token.
        """
        return _guarded(self._prefill, running)

    @torch.no_grad()
    def decode(self, runnings: Many[Running]) -> list[Rows | EngineFailed]:
        """Feed every running sequence its next token: one condition row for each, or the failure of that request."""
        if self.exactness == "strict" or len(runnings) == 1:
            return [self._decode_alone(running) for running in runnings]
        batch = _guarded(self._decode_batch, runnings)
        if isinstance(batch, EngineFailed):
            return [self._decode_alone(running) for running in runnings]
        return [_guarded(self._advance, running, hidden) for running, hidden in zip(runnings, batch, strict=True)]

    def _prefill(self, running: Running) -> Rows | None:
        text = running.texts[0]
        if text.kind == "tail" and text.ids in self._tails:
            self._take_tail(running)
            return None
        ids = text.ids[text.start : text.start + self.prefill_chunk_tokens]
        hidden = self._forward_row(ids, RowWindow(self.cache, text.slot, text.start, len(ids)), all_generation=False)
        _check_finite(hidden)
        text.start += len(ids)
        if text.start == len(text.ids):
            running.texts.pop(0)
            running.last_1H[text.slot] = hidden.normed_BLH[0, -1:]
            if text.kind == "tail":
                self._keep_tail(running, text)
        if running.is_prefilled:
            self._choose(running)
        if text.kind == "tail":
            return None
        return _rows("negative" if text.kind == "negative" else "condition", ids, hidden.condition_BLH[0])

    def _keep_tail(self, running: Running, text: Text) -> None:
        """Remember what a tail leaves behind: it depends on the grid alone, so every guided request of it has the same."""
        self._tails[text.ids] = (self.cache.copy_out(text.slot, len(text.ids)), running.last_1H[text.slot])
        if len(self._tails) > MAX_TAILS:
            self._tails.popitem(last=False)

    def _take_tail(self, running: Running) -> None:
        text = running.texts.pop(0)
        self._tails.move_to_end(text.ids)
        kept, running.last_1H[text.slot] = self._tails[text.ids]
        self.cache.copy_in(text.slot, kept)

    def _decode_alone(self, running: Running) -> Rows | EngineFailed:
        return _guarded(lambda: self._advance(running, self._decode_rows(running)))

    def _decode_rows(self, running: Running) -> list[Hidden]:
        """Run the rows of one request one by one: [conditional] or [conditional, unconditional]."""
        token = running.grid_ids[running.num_decoded]
        return [
            self._forward_row((token,), RowWindow(self.cache, slot, start, 1), all_generation=True)
            for slot, start in running.rows()
        ]

    def _decode_batch(self, runnings: Many[Running]) -> list[list[Hidden]]:
        """Run the rows of all requests as one padded batch; the result is grouped like `_decode_rows`."""
        rows = [(running.grid_ids[running.num_decoded], *row) for running in runnings for row in running.rows()]
        tokens, slots, starts = zip(*rows, strict=True)
        window = PaddedWindow(self.cache, slots, starts)
        ids_B1 = torch.tensor(tokens, device=self.device).unsqueeze(-1)
        both = self.decoder(ids_B1, window.positions(), window.mask(), window, all_generation=True)
        each = iter(zip(both.normed_BLH.split(1), both.condition_BLH.split(1), strict=True))
        return [[Hidden(*next(each)) for _ in running.rows()] for running in runnings]

    def _advance(self, running: Running, hidden: list[Hidden]) -> Rows:
        for slot, row in zip(running.slots, hidden, strict=False):
            _check_finite(row)
            running.last_1H[slot] = row.normed_BLH[0]
        token = running.grid_ids[running.num_decoded]
        if len(running.grid_ids) < running.sequence.grid.num_tokens:
            self._choose(running)
        running.num_decoded += 1
        return _rows("condition", (token,), hidden[0].condition_BLH[0])

    def _choose(self, running: Running) -> None:
        """Append the next grid token: end of line where the grid says so, else sampled from the scope."""
        index = len(running.grid_ids)
        if running.sequence.grid.is_row_end(index):
            running.grid_ids.append(self.scope.eol_id)
            return
        start, end = self.scope.visual_start, self.scope.visual_end
        logits = [self.decoder.visual_logits(running.last_1H[slot], start, end) for slot in running.slots]
        scores_1V = shaped(guided(logits[0], logits[-1], running.knobs), running.seen_1V, running.knobs)
        column = sample(scores_1V, running.knobs, torch.tensor(index, device=self.device), start)
        running.seen_1V[0, column] = True
        running.grid_ids.append(start + int(column))

    def _forward_row(self, ids: Many[int], window: RowWindow, *, all_generation: bool) -> Hidden:
        ids_1L = torch.tensor(ids, device=self.device).unsqueeze(0)
        hidden: Hidden = self.decoder(ids_1L, window.positions(), window.mask(), window, all_generation=all_generation)
        return hidden


def checked(outcome: T | EngineFailed) -> T:
    """Return `outcome`, or raise it when it is a failure."""
    if isinstance(outcome, EngineFailed):
        raise outcome
    return outcome


def started(engine: Engine, sequence: Sequence) -> Running:
    """Return `sequence` admitted and prefilled by `engine`, whose rows of the prompt nobody wants. Raises EngineFailed."""
    running = engine.admit(sequence)
    while not running.is_prefilled:
        checked(engine.prefill(running))
    return running


def _guarded(action: Callable[..., T], *args: object) -> T | EngineFailed:
    """Return `action(*args)`, or the failure of one request as a value; raise DeviceLost for the device's own."""
    try:
        return action(*args)
    except ROW_FAILURES as err:
        if isinstance(err, torch.AcceleratorError) or "CUDA error" in str(err):
            raise DeviceLost(str(err)) from err
        error_id = uuid.uuid4().hex[:12]
        logger.exception("a forward pass failed", extra={"error_id": error_id})
        return EngineFailed(f"the engine failed on this request: {err}", error_id=error_id)


def _check_finite(hidden: Hidden) -> None:
    if not bool(hidden.normed_BLH.isfinite().all() & hidden.condition_BLH.isfinite().all()):
        raise ArithmeticError("the model produced a non-finite hidden state")


def _rows(kind: Literal["negative", "condition"], ids: Many[int], hidden_TH: Tensor) -> Rows:
    return Rows(kind, torch.tensor(ids, dtype=torch.int32), hidden_TH.to("cpu", copy=True))


def _scored_scope(scope: Scope, config: LLMConfig) -> Scope:
    """Return `scope` without the visual ids that no head row scores, as upstream's slice of the logits does."""
    start = config.gen_vocab_start_index
    num_scored = config.gen_head_offset + config.gen_vocab_size if config.extra_gen_vocab else config.vocab_size
    end = start + config.gen_vocab_size if config.extra_gen_vocab else config.vocab_size
    found = replace(scope, visual_end=min(scope.visual_end, num_scored))
    if not start <= scope.eol_id < end:
        raise _outside("eol_token_id", scope.eol_id, start, end)
    if not start <= scope.visual_start < found.visual_end:
        raise _outside("visual_token_start_id", scope.visual_start, start, end)
    if scope.visual_end > end:
        raise _outside("visual_token_end_id", scope.visual_end, start, end + 1)
    return found


def _outside(key: str, token: int, start: int, end: int) -> CheckpointError:
    return CheckpointError(f"t2i_generation_config.json: {key}: {token} is not from {start} to {end - 1}")
