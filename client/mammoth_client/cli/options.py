"""Translate: command-line words to the values that the client takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from mammoth_client.client import Client
from mammoth_client.settings import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S

__all__ = ["connect", "connection", "pair", "settings"]

Command = TypeVar("Command", bound=Callable[..., Any])


def pair(_: click.Context, __: click.Parameter, text: str | None) -> tuple[int, int] | None:
    """Read WIDTHxHEIGHT, for an option's `callback`."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9})[xX](\d{1,9})", text)
    if found is None:
        raise click.BadParameter(f"{text!r} is not WIDTHxHEIGHT, such as 1024x768")
    return int(found[1]), int(found[2])


def settings(_: click.Context, __: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    """Read NAME=VALUE of a repeated option, for its `callback`; dashes of a name become underscores."""
    pairs = [text.partition("=") for text in texts]
    bad = [name for name, equals, _ in pairs if not (name and equals)]
    if bad:
        raise click.BadParameter(f"{bad[0]!r} is not NAME=VALUE")
    return {name.replace("-", "_"): value for name, _, value in pairs}


def connection(command: Command) -> Command:
    """Add the options that say where the server is; `connect` takes them."""
    options = (
        click.option("--address", default=DEFAULT_ADDRESS, envvar="MAMMOTH_ADDRESS", show_default=True, help="Server, host:port."),
        click.option("--timeout", "timeout_s", type=float, default=DEFAULT_TIMEOUT_S, envvar="MAMMOTH_TIMEOUT_S",
                     show_default=True, metavar="SECONDS", help="Give up after this long, at most 3600."),
        click.option("--token-file", type=click.Path(path_type=Path), envvar="MAMMOTH_TOKEN_FILE",
                     help="File that holds a bearer token."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def connect(address: str, timeout_s: float, token_file: Path | None) -> Client:
    """Return a client of the server that the options of `connection` name."""
    return Client(address, timeout_s=timeout_s, token_file=token_file)
