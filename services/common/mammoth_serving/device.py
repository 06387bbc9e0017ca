"""Do: one worker thread per device, so that the event loop never blocks on it and device calls never overlap.

Whether a device is there is decided here too, from a count, because torch belongs to the stages.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import ParamSpec, TypeVar

from mammoth_serving.config import ConfigError

__all__ = ["DeviceWorker", "check_device"]

P = ParamSpec("P")
R = TypeVar("R")


def check_device(device: str, num_gpus: int) -> None:
    """Raise ConfigError when `device` is none of this machine, which has `num_gpus` CUDA devices that work."""
    match = re.fullmatch(r"cuda(?::(0|[1-9][0-9]{0,3}))?", device)
    if device == "cpu" or (match and int(match[1] or 0) < num_gpus):
        return
    there = f"N from 0 to {num_gpus - 1}" if num_gpus else "it has no CUDA device"
    raise ConfigError(f"--device: {device!r} is not cpu, cuda or cuda:N of this machine ({there})")


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
