"""Own the CUDA graphs of the units: captured at their second step, replayed from then on, the least used one dropped.

The first step of a shape runs its operations one by one (kernels compile, libraries choose); while the device computes it,
the host records the graph. Graphs never run at the same time, so all of them share one pool of memory.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mammoth_dit.fast.layout import UnitShape
from mammoth_dit.fast.rows import Row, inputs_of
from mammoth_dit.fast.step import Inputs, Network

__all__ = ["Graphs", "Units", "captured"]

MAX_GRAPHS = 96
T = TypeVar("T")

logger = logging.getLogger(__name__)


class Units:
    """Steps units operation by operation: the fast path's arithmetic without graphs, for the CPU and as what graphs record."""

    def __init__(self, network: Network, device: torch.device) -> None:
        self._network, self._device = network, device
        self._rows: OrderedDict[UnitShape, tuple[Tensor, Tensor]] = OrderedDict()

    def step(self, rows: Sequence[Row], shape: UnitShape) -> Tensor:
        """Return the latents [B, n, F] of `rows` after their next step; the rows stay as they are."""
        return self._compute(inputs_of(list(rows), shape), shape)

    def _compute(self, inputs: Inputs, shape: UnitShape) -> Tensor:
        return self._network.step(inputs, shape, *self._rows_of(shape))

    def _rows_of(self, shape: UnitShape) -> tuple[Tensor, Tensor]:
        found = self._rows.pop(shape, None)
        if found is None:
            found = shape.rows_T(self._device), shape.image_rows_T(self._device)
        self._rows[shape] = found
        if len(self._rows) > MAX_GRAPHS:
            self._rows.popitem(last=False)
        return found


class Graph:
    """One recorded step: fixed places for what it reads, and where it leaves its result.

    A graph keeps no tensor alive that it reads: `inputs` and `constants` are held here.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        inputs: Inputs,
        constants: tuple[Tensor, Tensor],
        out_BnF: Tensor,
        num_bytes: int,
    ) -> None:
        self._graph, self._inputs, self._constants, self._out_BnF = graph, inputs, constants, out_BnF
        self._held: list[int] = []
        self.num_bytes = num_bytes

    def replay(self, rows: Sequence[Row]) -> Tensor:
        """Step `rows`; the result is overwritten by the next replay."""
        inputs = self._inputs
        for place, row in enumerate(rows):
            inputs.x_BnF[place].copy_(row.x_nF)
            inputs.vectors_BVD[place].copy_(row.vectors_NVD[row.step])
            inputs.dt_B11[place].copy_(row.dt_N[row.step])
        if (serials := [row.serial for row in rows]) != self._held:
            self._bring_in(rows)
            self._held = serials
        self._graph.replay()
        return self._out_BnF

    def _bring_in(self, rows: Sequence[Row]) -> None:
        """Bring in what does not change from step to step."""
        inputs = self._inputs
        for place, row in enumerate(rows):
            inputs.scale_B11[place].copy_(row.scale)
            for number in range(len(inputs.captions)):
                stream = row.unconditional if number else row.conditional
                inputs.captions[number][place].copy_(stream.caption_CP)
                inputs.angles[number][place].copy_(stream.angles)
                inputs.masks[number][place].copy_(stream.mask)


class Graphs(Units):
    """Steps units by replaying graphs, recorded as shapes come. A shape that cannot be recorded runs without."""

    def __init__(
        self, network: Network, device: torch.device, *, max_graphs: int = MAX_GRAPHS, max_bytes: int | None = None
    ) -> None:
        """Keep at most `max_graphs`, and start afresh when they have reserved `max_bytes` (a quarter of the device)."""
        super().__init__(network, device)
        self._max_graphs = max_graphs
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        self._max_bytes = total_bytes // 4 if max_bytes is None else max_bytes
        self._graphs: OrderedDict[UnitShape, Graph | None] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    @property
    def num_graphs(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    @property
    def num_bytes(self) -> int:
        """What the recorded graphs reserved."""
        return sum(graph.num_bytes for graph in self._graphs.values() if graph is not None)

    def step(self, rows: Sequence[Row], shape: UnitShape) -> Tensor:
        if shape in self._graphs:
            self._graphs.move_to_end(shape)
            graph = self._graphs[shape]
            return super().step(rows, shape) if graph is None else graph.replay(rows)
        out_BnF = super().step(rows, shape)
        self._graphs[shape] = self._record(inputs_of(list(rows), shape), shape)
        if len(self._graphs) > self._max_graphs:
            self._graphs.popitem(last=False)
        if self.num_bytes > self._max_bytes:
            self.clear()  # one graph alone gives nothing back: they share a pool
        return out_BnF

    def clear(self) -> None:
        """Give all memory back, as before a retry after running out of it."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _record(self, inputs: Inputs, shape: UnitShape) -> Graph | None:
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.memory_reserved(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        rows = self._rows_of(shape)
        try:
            with torch.cuda.stream(self._stream):
                out_BnF = captured(graph, self._pool, lambda: self._network.step(inputs, shape, *rows))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as err:
            logger.warning("a shape runs without a graph", exc_info=err, extra={"shape": str(shape)})
            return None
        num_bytes = torch.cuda.memory_reserved(self._device) - before
        return None if num_bytes > self._max_bytes else Graph(graph, inputs, rows, out_BnF, num_bytes)


def captured(graph: torch.cuda.CUDAGraph, pool: Any, compute: Callable[[], T]) -> T:
    """Record `compute` on the current stream, which is none of the default ones, and return where its results will lie."""
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        return compute()
    finally:
        graph.capture_end()
