"""Decide which checkpoint is meant when nobody names one: the small one that comes with a source checkout."""

from __future__ import annotations

from pathlib import Path

__all__ = ["shipped_checkpoint"]


def shipped_checkpoint() -> Path | None:
    """Return checkpoints/emoji of the source checkout that this module runs from; None when it is not there.

    A wheel ships no checkpoint.
    """
    root = Path(__file__).resolve().parent.parent.parent
    folder = root / "checkpoints" / "emoji"
    return folder if (folder / "config.json").is_file() else None
