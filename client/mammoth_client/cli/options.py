"""Translate: command-line words to the values that the client takes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from mammoth_client._core import MAX_TIMEOUT_S
from mammoth_client.client import Client
from mammoth_client.settings import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S

__all__ = ["MIN_TIMEOUT_S", "connect", "connection", "pair", "seconds", "settings"]

MIN_TIMEOUT_S = 0.001
Command = TypeVar("Command", bound=Callable[..., Any])


def seconds(low_s: float, high_s: float) -> Callable[[click.Context, click.Parameter, str], float]:
    """Return what reads seconds within bounds, for an option's `callback`."""

    def read(ctx: click.Context, param: click.Parameter, text: str) -> float:
        try:
            value_s = float(text)
        except ValueError:
            value_s = math.nan
        if not low_s <= value_s <= high_s:
            what = f"{text!r} is not a number of seconds from {low_s:g} to {high_s:g}"
            raise click.BadParameter(what, ctx, param, _variable(ctx, param))
        return value_s

    return read


def _variable(ctx: click.Context, param: click.Parameter) -> str | None:
    """Return the variable that the value of `param` was read from, if it was."""
    if param.name is None or not isinstance(param.envvar, str):
        return None
    return param.envvar if ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT else None


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
        click.option("--timeout", "timeout_s", type=str, callback=seconds(MIN_TIMEOUT_S, MAX_TIMEOUT_S),
                     default=DEFAULT_TIMEOUT_S, envvar="MAMMOTH_TIMEOUT_S", show_default=True, metavar="SECONDS",
                     help="Give up after this long, at most 3600."),
        click.option("--token-file", type=click.Path(path_type=Path), envvar="MAMMOTH_TOKEN_FILE",
                     help="File that holds a bearer token."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def connect(address: str, timeout_s: float, token_file: Path | None) -> Client:
    """Return a client of the server that the options of `connection` name."""
    return Client(address, timeout_s=timeout_s, token_file=token_file)
