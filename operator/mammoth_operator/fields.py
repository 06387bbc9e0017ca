"""Decide: how a field of the spec is declared. One declaration is read by the parser and by the CRD generator.

A dataclass field `max_num_seqs` is the key `maxNumSeqs`. What a declaration bounds, both readers bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any

__all__ = ["Declaration", "Rule", "camel", "declaration", "flag", "listing", "mapping", "number", "opaque", "part", "quantity", "text"]  # fmt: skip

NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"
OPAQUE_MAX_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a field holds (`kind`), what it may be, and what it is for."""

    kind: str
    help: str
    low: float | None = None
    high: float | None = None
    max_length: int = 253
    min_length: int = 0
    pattern: str = ""
    choices: tuple[str, ...] = ()
    of: Any = None  # dataclass of a part, Declaration of a list's or a map's elements
    max_items: int = 0
    keys: tuple[str, ...] = ()  # of a list of objects that is a map


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule between fields: the same in CEL, for the API server, and in Python, for the parser."""

    cel: str
    message: str
    holds: Callable[[Any], bool]
    field: str = ""


def _declare(item: Declaration, default: Any) -> Any:
    metadata = {"declaration": item}
    if isinstance(default, type) or default in (tuple, dict):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def text(
    help: str, *, default: Any = MISSING, max_length: int = 253, pattern: str = "", choices: tuple[str, ...] = ()
) -> Any:
    """Declare a string; required when it has no default, optional when that is None."""
    return _declare(
        Declaration("text", help, max_length=max_length, min_length=1 if default in (MISSING, None) else 0,
                    pattern=pattern, choices=choices), default)  # fmt: skip


def quantity(help: str, *, default: Any = None) -> Any:
    """Declare a Kubernetes quantity, written as a string or a whole number."""
    return _declare(Declaration("quantity", help, max_length=32, pattern=QUANTITY), default)


def number(help: str, *, default: Any = MISSING, low: float, high: float, whole: bool = True) -> Any:
    """Declare a number within inclusive bounds."""
    return _declare(Declaration("integer" if whole else "number", help, low=low, high=high), default)


def flag(help: str, *, default: bool) -> Any:
    """Declare a boolean."""
    return _declare(Declaration("flag", help), default)


def part(help: str, of: type, *, default: Any = MISSING) -> Any:
    """Declare an object of its own dataclass: required, optional (None), or filled from its defaults (`of` itself)."""
    return _declare(Declaration("part", help, of=of), default)


def listing(help: str, of: Any, *, max_items: int, keys: tuple[str, ...] = ()) -> Any:
    """Declare a bounded list of strings or of a dataclass; `keys` make it a map."""
    element = of if isinstance(of, Declaration) else Declaration("part", "", of=of)
    return _declare(Declaration("list", help, of=element, max_items=max_items, keys=keys), tuple)


def mapping(help: str, *, max_items: int = 32, max_length: int = 253) -> Any:
    """Declare a map of strings."""
    return _declare(Declaration("map", help, of=Declaration("text", "", max_length=max_length), max_items=max_items), dict)  # fmt: skip


def opaque(help: str) -> Any:
    """Declare a small object that is kept as it is and checked by hand."""
    return _declare(Declaration("opaque", help, max_items=32), dict)


def declaration(item: Field[Any]) -> Declaration:
    """Return what `item` was declared as."""
    return item.metadata["declaration"]  # type: ignore[no-any-return]


def camel(name: str) -> str:
    """Return the key of a dataclass field: `max_num_seqs` is `maxNumSeqs`."""
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def default_of(item: Field[Any]) -> Any:
    """Return the default value of `item`, or MISSING when the field is required."""
    return item.default_factory() if item.default_factory is not MISSING else item.default


def frozen(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a read-only view, so that a frozen spec stays frozen."""
    return MappingProxyType(dict(value))


def sparse(value: Any) -> dict[str, Any]:
    """Return the mapping that parses to `value`, without what equals a default: new defaults do not change it."""
    out: dict[str, Any] = {}
    for item in fields(value):
        held = getattr(value, item.name)
        if held is None or held == default_of(item):
            continue
        out[camel(item.name)] = _plain(held, declaration(item))
    return out


def _plain(value: Any, item: Declaration) -> Any:
    match item.kind:
        case "part":
            return sparse(value)
        case "list":
            return [_plain(element, item.of) for element in value]
        case "map" | "opaque":
            return dict(value)
        case _:
            return value
