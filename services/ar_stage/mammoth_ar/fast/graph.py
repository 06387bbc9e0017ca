"""Do: record a computation as a CUDA graph, once, and replay it from then on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

__all__ = ["recorded"]

R = TypeVar("R")


class _Recording(Generic[R]):
    """Replays `run`. A graph keeps no tensor alive that it reads: `run` does, by what it closes over."""

    def __init__(self, run: Callable[[], R]) -> None:
        self._run = run
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            run()  # compiles, and does what a capture may not do for the first time
            with torch.cuda.graph(self._graph):
                self._result = run()

    def __call__(self) -> R:
        self._graph.replay()
        return self._result


def recorded(run: Callable[[], R], device: torch.device) -> Callable[[], R]:
    """Return what does as `run` does: a replay where there are graphs, whose result the next replay overwrites."""
    return _Recording(run) if device.type == "cuda" else run
