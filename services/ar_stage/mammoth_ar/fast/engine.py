"""Do: decode all rows together, one graph launch a step, with a host that runs ahead of the device.

The same engine as the plain one to its batcher: `prefill` runs the plain decoder over the same weights and KV rows; `decode`
launches the next step of everything that runs and returns the rows that have arrived by now, which may be none. Nothing
waits for a token: tokens, positions and ends live on the device (`RowState`), rows come over in chunks (`Delivery`).

Exact by construction: every step runs the same number of rows, whoever is there; no kernel's arithmetic for a row depends on another
row, its place or its company. `verify` shows it on the device at hand before anybody is served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch

from mammoth_ar.cache import RowWindow
from mammoth_ar.conditioning import Scope
from mammoth_ar.engine import DeviceLost, Engine
from mammoth_ar.fast.cuts import Cut, best
from mammoth_ar.fast.delivery import CHUNK, NUM_KEPT, Copies, Delivery
from mammoth_ar.fast.graph import recorded
from mammoth_ar.fast.prefill import LENGTHS, PaddedPrefill
from mammoth_ar.fast.state import RowState
from mammoth_ar.fast.step import Step
from mammoth_ar.fast.weights import Storage, merge
from mammoth_ar.model.decoder import Decoder, Hidden
from mammoth_ar.sequence import Rows, Running, Sequence
from mammoth_wire.errors import EngineFailed

__all__ = ["FastEngine"]

RUN_AHEAD = 2  # steps that may be queued on the device beyond the one that runs


@dataclass(slots=True, eq=False)
class _FastRunning(Running):
    """`num_fed` steps have been launched for it."""

    num_fed: int = 0
    copies: Copies = field(default_factory=Copies)


class FastEngine(Engine):
    """`weights` says how the layers' matrices are stored, `cut` how kernels are cut (None: the best known); bits depend on both."""

    def __init__(
        self,
        decoder: Decoder,
        scope: Scope,
        *,
        num_slots: int,
        max_context_tokens: int,
        prefill_chunk_tokens: int = 256,
        cut: Cut | None = None,
        weights: Storage = "bf16",
    ) -> None:
        """Allocate, lay out the weights, and capture a step of every number of groups. Raises CheckpointError as Engine."""
        super().__init__(
            decoder,
            scope,
            num_slots=num_slots,
            max_context_tokens=max_context_tokens,
            prefill_chunk_tokens=prefill_chunk_tokens,
        )
        num_ids = self.scope.visual_end - self.scope.visual_start
        cut = cut or best(decoder.config.family, weights)
        num_groups = -(-num_slots // cut.rows)
        self.state = RowState(
            num_groups * cut.rows, num_ids, self.hidden_size, NUM_KEPT, dtype=self.dtype, device=self.device
        )
        self.weights = merge(decoder, self.scope.visual_start, self.scope.visual_end, weights)
        self._storage = weights
        self._step = Step(decoder.config, self.weights, self.scope, self.cache, self.state, cut)
        self._prefill_padded = PaddedPrefill(decoder, self.cache)
        self._delivery = Delivery(self.state)
        self._running: list[_FastRunning] = []
        self._leaving: deque[tuple[Running, tuple[int, ...]]] = deque()
        self._in_flight: deque[torch.cuda.Event] = deque()
        self._launches = [self._launcher(count) for count in range(1, num_groups + 1)]

    @property
    def kernels(self) -> str:
        suffix = "/fp8" * (self._storage == "fp8")
        return f"fast{suffix}, prefill in {', '.join(map(str, LENGTHS))} or {self.prefill_chunk_tokens}"

    @property
    def row_bucket(self) -> int:
        return self._step.num_rows

    @property
    def packages(self) -> tuple[str, ...]:
        return ("torch", "triton")

    @torch.no_grad()
    def admit(self, sequence: Sequence) -> Running:
        self._let_leave()
        plain = super().admit(sequence)
        return _FastRunning(plain.sequence, plain.slots, plain.knobs, plain.texts, plain.seen_1V)

    def release(self, running: Running) -> None:
        """Give the slots back; any thread may. The rows rest before anything else is launched."""
        self._leaving.append((running, running.slots))
        super().release(running)

    def synchronize(self) -> None:
        if self.state.ring.is_cuda:
            torch.cuda.synchronize()

    @torch.no_grad()
    def decode(self, runnings: Many[Running]) -> list[Rows | EngineFailed]:
        """Launch one step of all that runs, `runnings` or not; return what has arrived of each of `runnings`.

        Waits only when RUN_AHEAD steps are queued, or when nothing is left to launch and rows are still to come.
        """
        self._let_leave()
        feeding = [running for running in self._running if running.num_fed < running.sequence.grid.num_tokens]
        try:
            if feeding:
                self._launch(feeding)
            return [self._arrived(running, wait=not feeding) for running in runnings]
        except torch.AcceleratorError as err:
            raise DeviceLost(str(err)) from err

    def _launch(self, feeding: Many[_FastRunning]) -> None:
        while len(self._in_flight) > RUN_AHEAD:
            self._in_flight.popleft().synchronize()
        for running in feeding:
            self._delivery.before_step(running.copies, running.num_fed)
        num_groups = max(slot for running in feeding for slot in running.slots) // self._step.num_rows + 1
        self._launches[num_groups - 1]()
        for running in feeding:
            running.num_fed += 1
            if running.num_fed % CHUNK == 0 or running.num_fed == running.sequence.grid.num_tokens:
                self._delivery.send(running.copies, running.slots[0], running.num_fed)
        if self.state.ring.is_cuda:
            self._in_flight.append(torch.cuda.current_stream().record_event())

    def _arrived(self, running: Running, *, wait: bool) -> Rows | EngineFailed:
        assert isinstance(running, _FastRunning)
        rows = self._delivery.collect(running.copies, wait=wait)
        if running.copies.is_bad:
            return EngineFailed("the engine failed on this request: the model produced a non-finite hidden state")
        running.num_decoded += len(rows.ids)
        running.grid_ids.extend(rows.ids.tolist())
        return rows

    def _choose(self, running: Running) -> None:
        """Hand a prefilled sequence to the steps: its rows join and choose their first token, all on the device."""
        assert isinstance(running, _FastRunning)
        sequence, state = running.sequence, self.state
        for slot in running.slots:
            state.normed[slot] = running.last_1H[slot][0]
        state.seen[running.slots[0]] = running.seen_1V[0]
        lengths = (len(sequence.prompt_ids), len(sequence.tail_ids))[: len(running.slots)]
        state.join(running.slots, lengths, sequence.grid, sequence.sampling)
        for group in sorted({slot // self._step.num_rows for slot in running.slots}):
            self._step.logits(group)
        self._step.choose(state.starting)
        state.starting.zero_()
        self._running.append(running)

    def _forward_row(self, ids: Many[int], window: RowWindow, *, all_generation: bool) -> Hidden:
        hidden = self._prefill_padded.run(ids, window.slot) if window.start == 0 else None
        return hidden or super()._forward_row(ids, window, all_generation=all_generation)

    def _let_leave(self) -> None:
        while self._leaving:
            gone, slots = self._leaving.popleft()
            self.state.leave(slots)
            self._running = [running for running in self._running if running is not gone]

    def _launcher(self, num_groups: int) -> Callable[[], None]:
        """Return what launches a step of the first `num_groups` groups of rows: a graph where there are graphs."""

        def step() -> None:
            for group in range(num_groups):
                self._step.forward(group)
            self._step.choose(self.state.active)

        return recorded(step, self.device)  # nothing is active yet: recording changes nothing
