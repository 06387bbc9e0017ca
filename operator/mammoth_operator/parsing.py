"""Decide: a mapping to a declared dataclass. Every fault is found at once; each names its field and the limit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from mammoth_operator.fields import OPAQUE_MAX_BYTES, Declaration, camel, declaration, default_of, frozen
from mammoth_operator.quantities import canonical

__all__ = ["SpecError", "read"]

T = TypeVar("T")


class SpecError(ValueError):
    """One line a fault, naming the field and what it may be. `faults` are (field, text) pairs."""

    def __init__(self, faults: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{field}: {text}" for field, text in faults))
        self.faults = tuple(faults)


def read(kind: type[T], value: Any, where: str) -> T:
    """Return `kind` filled from `value`. Raises SpecError."""
    faults: list[tuple[str, str]] = []
    made = _object(kind, value, where, faults)
    if faults:
        raise SpecError(faults)
    return made  # type: ignore[no-any-return]


def _object(kind: Any, value: Any, where: str, faults: list[tuple[str, str]]) -> Any:
    if not isinstance(value, Mapping):
        faults.append((where, "must be an object"))
        return None
    items = {camel(item.name): item for item in fields(kind)}
    before = len(faults)
    faults.extend((f"{where}.{key}", f"unknown field; one of {', '.join(items)}") for key in value if key not in items)
    held: dict[str, Any] = {}
    for key, item in items.items():
        if value.get(key) is not None:
            held[item.name] = _value(declaration(item), value[key], f"{where}.{key}", faults)
        elif default_of(item) is MISSING:
            faults.append((f"{where}.{key}", f"required: {declaration(item).help}"))
    if len(faults) > before:
        return None
    made = kind(**held)
    for rule in getattr(kind, "RULES", ()):
        if not rule.holds(made):
            faults.append((f"{where}.{rule.field}" if rule.field else where, rule.message))
    return made


def _value(item: Declaration, value: Any, where: str, faults: list[tuple[str, str]]) -> Any:
    match item.kind:
        case "part":
            return _object(item.of, value, where, faults)
        case "list":
            return _list(item, value, where, faults)
        case "map":
            return _map(item, value, where, faults)
        case _:
            fault = _fault(item, value)
            if fault:
                faults.append((where, fault))
                return None
            return _plain(item, value)


def _plain(item: Declaration, value: Any) -> Any:
    match item.kind:
        case "number":
            return float(value)
        case "quantity":
            return canonical(str(value))
        case "opaque":
            return frozen(value)
        case _:
            return value


def _fault(item: Declaration, value: Any) -> str:
    """Return what is wrong with a scalar, or an empty string."""
    match item.kind:
        case "flag":
            return "" if isinstance(value, bool) else "must be true or false"
        case "integer" | "number":
            return _number_fault(item, value)
        case "opaque":
            if not isinstance(value, Mapping):
                return "must be an object"
            return "" if len(json.dumps(value)) <= OPAQUE_MAX_BYTES else f"must be at most {OPAQUE_MAX_BYTES} bytes"
        case "quantity" if isinstance(value, int) and not isinstance(value, bool):
            return "" if value >= 0 else "must not be negative"
        case _:
            return _text_fault(item, value)


def _number_fault(item: Declaration, value: Any) -> str:
    allowed = int if item.kind == "integer" else (int, float)
    what = "a whole number" if item.kind == "integer" else "a number"
    assert item.low is not None
    assert item.high is not None
    if isinstance(value, bool) or not isinstance(value, allowed) or not item.low <= value <= item.high:
        return f"must be {what} from {item.low:g} to {item.high:g}"
    return ""


def _text_fault(item: Declaration, value: Any) -> str:
    if not isinstance(value, str):
        return "must be a string"
    if item.choices and value not in item.choices:
        return f"must be one of {', '.join(repr(choice) for choice in item.choices)}"
    if not item.min_length <= len(value) <= item.max_length:
        return f"must have {item.min_length} to {item.max_length} characters"
    if item.pattern and not re.search(item.pattern, value):
        return f"must match {item.pattern}"
    return ""


def _list(item: Declaration, value: Any, where: str, faults: list[tuple[str, str]]) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        faults.append((where, "must be a list"))
        return ()
    if len(value) > item.max_items:
        faults.append((where, f"must have at most {item.max_items} items"))
    identities = [tuple(entry.get(key) for key in item.keys) for entry in value if isinstance(entry, Mapping)]
    if item.keys and len(set(identities)) < len(identities):
        faults.append((where, f"{', '.join(item.keys)} must be unique"))
    return tuple(_value(item.of, entry, f"{where}[{index}]", faults) for index, entry in enumerate(value))


def _map(item: Declaration, value: Any, where: str, faults: list[tuple[str, str]]) -> Any:
    if not isinstance(value, Mapping):
        faults.append((where, "must be an object"))
        return None
    if len(value) > item.max_items:
        faults.append((where, f"must have at most {item.max_items} entries"))
    for key, entry in value.items():
        fault = _text_fault(item.of, entry)
        if fault:
            faults.append((f"{where}.{key}", fault))
    return frozen(value)
