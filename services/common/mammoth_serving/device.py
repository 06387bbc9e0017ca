"""Do: one worker thread per device, so that the event loop never blocks on it and device calls never overlap."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import ParamSpec, TypeVar

__all__ = ["DeviceWorker"]

P = ParamSpec("P")
R = TypeVar("R")


class DeviceWorker:
    """Owns the only thread that touches a device. Calls run in the order they were made."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `fn` on the device thread and return what it returns.

        A call that has begun runs to its end even when the awaiting task is cancelled: device state is never left
        half-written. The cancellation is delivered afterwards.
        """
        context = copy_context()
        work = asyncio.get_running_loop().run_in_executor(self._executor, lambda: context.run(fn, *args, **kwargs))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    def close(self) -> None:
        """Let the call in flight finish and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
