"""Decide what a failure in a group of rows means for each row: one bad row never fails its neighbours. Pure.

A group that fails is drawn again row by row; one that does not fit in memory is halved; a device that is unusable takes
the process down, because nothing after it can be trusted.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from mammoth_wire.errors import EngineFailed, MammothError, ShapeTooLarge

__all__ = ["DeviceLost", "failed", "isolate"]

# What drawing may raise for reasons that lie in one row or one shape. Anything else is a bug that stays loud.
ROW_FAILURES = (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError, AssertionError)
Row = TypeVar("Row")
Drawn = TypeVar("Drawn")

logger = logging.getLogger(__name__)


class DeviceLost(RuntimeError):
    """The accelerator is unusable (a sticky error): report not-serving and exit."""


def isolate(
    rows: Sequence[Row],
    draw: Callable[[Sequence[Row]], list[Drawn | MammothError]],
    *,
    limit: str,
    usable: Callable[[], bool],
    release: Callable[[], None] = lambda: None,
) -> list[Drawn | MammothError]:
    """Return one outcome a row: `draw(rows)`, or what smaller draws give after it failed.

    `limit` says what does not fit when even one row runs out of memory; `usable` probes the device after an error;
    `release` gives cached memory back before a retry. Raises DeviceLost when the probe fails.
    """

    def again(part: Sequence[Row]) -> list[Drawn | MammothError]:
        return isolate(part, draw, limit=limit, usable=usable, release=release)

    try:
        return draw(rows)
    except torch.OutOfMemoryError:
        logger.warning("out of memory", extra={"num_rows": len(rows), "limit": limit})
        halve = True
    except MammothError as err:
        if len(rows) == 1:
            return [err]
        halve = False
    except ROW_FAILURES as err:
        if not usable():
            raise DeviceLost(f"the device answers no more: {err}") from err
        if len(rows) == 1:
            return [failed(err)]
        halve = False
    # Outside the handlers: a live traceback would keep the failed attempt's tensors in memory.
    release()
    if len(rows) == 1:
        return [ShapeTooLarge(f"{limit} does not fit in this device's memory, even alone", limit=limit)]
    if halve:
        middle = len(rows) // 2
        return again(rows[:middle]) + again(rows[middle:])
    return [outcome for row in rows for outcome in again([row])]


def failed(err: BaseException) -> EngineFailed:
    """Log `err` under a fresh id and return what the caller may know: the id, no more."""
    error_id = uuid.uuid4().hex[:12]
    logger.error("a picture failed", exc_info=err, extra={"error_id": error_id})
    return EngineFailed(f"internal error {error_id}", error_id=error_id)
