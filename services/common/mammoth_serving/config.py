"""Translate: flags and environment to a frozen dataclass; every bad value is reported at once.

A field `x_y` is the flag `--x-y` and the variable `MAMMOTH_X_Y`; a flag wins. Its type says how the text is read, its
metadata what it may be.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

__all__ = ["ConfigError", "ServingSettings", "load", "setting"]

T = TypeVar("T")
PREFIX = "MAMMOTH_"
BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class ConfigError(ValueError):
    """One line a bad flag or variable, naming it, its value and what it may be."""


def setting(help: str, *, default: Any = MISSING, low: float | None = None, high: float | None = None) -> Any:
    """Declare a setting: its help, its default (none: required), and inclusive bounds of a number."""
    return field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """What both stages take. Ports: 0 lets the system choose."""

    model: str = setting("checkpoint folder, or hub repository OWNER/NAME[@REVISION]")
    device: str = setting("cpu, cuda or cuda:N", default="cpu")
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto: float32 on the CPU, bfloat16 elsewhere", default="auto"
    )
    host: str = setting("address that the ports are bound on", default="127.0.0.1")
    port: int = setting("gRPC", default=50051, low=0, high=65535)
    control_port: int = setting("Control service", default=50052, low=0, high=65535)
    health_port: int = setting("plaintext grpc.health.v1", default=50053, low=0, high=65535)
    metrics_port: int = setting("Prometheus metrics over HTTP", default=9090, low=0, high=65535)
    ports_file: str = setting("file to write the bound ports to, as JSON", default="")
    capacity: int = setting("rows (AR) or jobs (DiT) allocated for at start", default=8, low=1, high=1024)
    max_num_seqs: int = setting("live cap within the capacity; 0: the capacity", default=0, low=0, high=1024)
    max_queue: int = setting("requests that may wait; more are refused", default=256, low=1, high=100_000)
    drain_seconds: float = setting("longest wait for accepted work on SIGTERM", default=90.0, low=0, high=3600)
    stall_seconds: float = setting(
        "work without progress for this long means a dead engine", default=120.0, low=1, high=3600
    )
    exactness: Literal["strict", "tolerant"] = setting("strict: bits never depend on company", default="strict")
    stop_with_stdin: bool = setting("drain and stop when standard input closes: a parent holds it open", default=False)
    reflection: bool = setting("gRPC server reflection", default=False)
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "least severe level that is logged", default="info"
    )

    @property
    def dtype_name(self) -> str:
        """The element type to compute in, with `auto` decided."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if self.device == "cpu" else "bfloat16"


def load(kind: type[T], argv: Sequence[str], environ: Mapping[str, str], *, prog: str) -> T:
    """Return `kind` filled from `argv`, then `environ`, then defaults. `--help` prints every setting and exits.

    Raises ConfigError with a line for each unknown flag, missing, unreadable or out-of-range value.
    """
    hints = get_type_hints(kind)
    parser = _parser(kind, hints, prog)
    namespace, unknown = parser.parse_known_args(list(argv))
    problems = [f"{flag}: unknown flag (see --help)" for flag in unknown]
    values: dict[str, Any] = {}
    for item in fields(kind):  # type: ignore[arg-type]
        given = getattr(namespace, item.name)
        name, text = (
            (_flag(item.name), given)
            if given is not None
            else (_variable(item.name), environ.get(_variable(item.name)))
        )
        if text is None:
            if item.default is MISSING:
                problems.append(f"{_flag(item.name)} (or {_variable(item.name)}): required: {item.metadata['help']}")
            continue
        try:
            values[item.name] = _parse(hints[item.name], text, item.metadata["low"], item.metadata["high"])
        except ValueError as err:
            problems.append(f"{name}: {text!r} is not {err}")
    if problems:
        raise ConfigError("\n".join(problems))
    return kind(**values)


def _parse(hint: Any, text: str, low: float | None, high: float | None) -> Any:
    """Read `text` as `hint`; the ValueError says what is allowed."""
    if get_origin(hint) is Literal:
        if text not in get_args(hint):
            raise ValueError("one of " + ", ".join(get_args(hint)))
        return text
    if hint is bool:
        if text.lower() not in BOOLEANS:
            raise ValueError("one of " + ", ".join(BOOLEANS))
        return BOOLEANS[text.lower()]
    if hint is str:
        return text
    what = f"{'a whole number' if hint is int else 'a number'} from {low} to {high}"
    try:
        number = hint(text)
    except ValueError:
        raise ValueError(what) from None
    if not math.isfinite(number) or (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(what)
    return number


def _parser(kind: type[Any], hints: Mapping[str, Any], prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=(kind.__doc__ or "").strip(), allow_abbrev=False)
    for item in fields(kind):
        parser.add_argument(
            _flag(item.name), dest=item.name, default=None, metavar=_metavar(hints[item.name]), help=_help(item)
        )
    return parser


def _metavar(hint: Any) -> str:
    return "|".join(get_args(hint)) if get_origin(hint) is Literal else hint.__name__.upper()


def _help(item: Field[Any]) -> str:
    default = "required" if item.default is MISSING else f"default {item.default!r}"
    return f"{item.metadata['help']} ({_variable(item.name)}; {default})".replace("%", "%%")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return PREFIX + name.upper()
