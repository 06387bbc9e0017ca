"""Translate: foreseeable failures to one line on stderr and an exit code.

| code | meaning |
|---|---|
| 0 | ok |
| 1 | `replay`: the picture differs |
| 2 | bad input or usage |
| 3 | refused, overloaded or not serving: try later |
| 4 | the server cannot be reached |
| 5 | failed, or ran out of time, on the server |
| 130 | interrupted |
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Never

import click

from mammoth_wire.errors import (
    AlreadyRunning,
    DeadlineUnreachable,
    InvalidRequest,
    MammothError,
    Overloaded,
    ShapeTooLarge,
    Unavailable,
)

__all__ = ["DIFFERS", "FAILED", "INTERRUPTED", "TRY_LATER", "UNREACHABLE", "USAGE", "App", "exit_code"]

DIFFERS, USAGE, TRY_LATER, UNREACHABLE, FAILED, INTERRUPTED = 1, 2, 3, 4, 5, 130
EXIT_CODES: Mapping[type[MammothError], int] = {
    InvalidRequest: USAGE,
    ShapeTooLarge: USAGE,
    Overloaded: TRY_LATER,
    DeadlineUnreachable: TRY_LATER,
    AlreadyRunning: TRY_LATER,
    Unavailable: UNREACHABLE,
}


def exit_code(err: MammothError) -> int:
    """Return the exit code of a failure; see the table above."""
    return EXIT_CODES.get(type(err), FAILED)


def explanation(err: MammothError) -> str:
    """Return what a person is told: the message, when to try again, and the id that finds the server's log line."""
    text = err.message
    if err.retry_after_s is not None:
        text += f" (try again in {err.retry_after_s:.1f} s)"
    error_id = err.metadata.get("error_id", "")
    return text if error_id in text else f"{text} (error id {error_id})"


class App(click.Group):
    """The command group whose failures end as the table above says, without a traceback."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **extra: Any) -> Never:
        """Run a command line and exit with its code."""
        extra["standalone_mode"] = False
        try:
            code = super().main(args, prog_name or "mammoth", **extra)
        except MammothError as err:
            _end(exit_code(err), explanation(err))
        except click.ClickException as err:
            _end(USAGE, err.format_message())
        except OSError as err:
            _end(USAGE, f"{err.filename}: {err.strerror}" if err.filename else str(err))
        except click.Abort:
            _end(INTERRUPTED, "interrupted")
        sys.exit(code or 0)


def _end(code: int, text: str) -> Never:
    click.echo(f"mammoth: {text}", err=True)
    sys.exit(code)
