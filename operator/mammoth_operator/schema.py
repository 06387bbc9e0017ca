"""Decide: the OpenAPI schema of a declared dataclass, with its defaults, bounds and CEL rules."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from mammoth_operator.fields import Declaration, camel, declaration, default_of

__all__ = ["object_schema"]

Schema = dict[str, Any]


def object_schema(kind: Any, help: str = "") -> Schema:
    """Return the schema of `kind`; `required` holds its fields that have no default."""
    schema: Schema = {"type": "object"}
    if help:
        schema["description"] = help
    schema["properties"] = {camel(item.name): _field(kind, item) for item in fields(kind)}
    required = [camel(item.name) for item in fields(kind) if default_of(item) is MISSING]
    if required:
        schema["required"] = required
    rules = [_rule(rule.cel, rule.message, rule.field) for rule in getattr(kind, "RULES", ())]
    if rules:
        schema["x-kubernetes-validations"] = rules
    return schema


def _field(kind: Any, item: Any) -> Schema:
    schema = value_schema(declaration(item))
    default = _default(item)
    if default is not None:
        schema["default"] = default
    if item.name in getattr(kind, "IMMUTABLE", ()):
        schema["x-kubernetes-validations"] = [_rule("self == oldSelf", "cannot be changed", "")]
    return schema


def _default(item: Any) -> Any:
    """Return the default to write into the schema, whole, since rules are tried on it; None where absence is the default."""
    default = default_of(item)
    if default is MISSING or default is None or default in ((), {}, ""):
        return None
    if declaration(item).kind != "part":
        return default
    inner = {camel(field.name): _default(field) for field in fields(default)}
    return {key: value for key, value in inner.items() if value is not None}


def _rule(cel: str, message: str, field: str) -> Schema:
    rule: Schema = {"rule": cel, "message": message}
    if field and "." not in field:
        rule["fieldPath"] = f".{field}"
    return rule


def value_schema(item: Declaration) -> Schema:
    """Return the schema of one value."""
    described: Schema = {"description": item.help} if item.help else {}
    match item.kind:
        case "text":
            return {"type": "string", **described, **_text_limits(item)}
        case "quantity":
            limits = {"maxLength": item.max_length, "pattern": item.pattern}
            return {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}], **described, **limits}  # fmt: skip
        case "integer" | "number":
            return {"type": item.kind, **described, "minimum": _tidy(item.low), "maximum": _tidy(item.high)}
        case "flag":
            return {"type": "boolean", **described}
        case "part":
            return object_schema(item.of, item.help)
        case "list":
            return {"type": "array", **described, "maxItems": item.max_items, "items": value_schema(item.of), **_list_type(item)}  # fmt: skip
        case "map":
            return {"type": "object", **described, "maxProperties": item.max_items, "additionalProperties": value_schema(item.of)}  # fmt: skip
        case "opaque":
            return {"type": "object", **described, "maxProperties": item.max_items, "x-kubernetes-preserve-unknown-fields": True}  # fmt: skip
        case other:
            raise AssertionError(f"no schema for {other}")


def _text_limits(item: Declaration) -> Schema:
    if item.choices:
        return {"enum": list(item.choices)}
    limits: Schema = {"maxLength": item.max_length}
    if item.min_length:
        limits["minLength"] = item.min_length
    if item.pattern:
        limits["pattern"] = item.pattern
    return limits


def _list_type(item: Declaration) -> Schema:
    if item.keys:
        return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(item.keys)}
    return {"x-kubernetes-list-type": "set" if item.of.kind == "text" else "atomic"}


def _tidy(value: float | None) -> float | int | None:
    return int(value) if value is not None and value == int(value) else value
