"""Decide: which pods a spec asks for, as a hash: equal hashes, equal pods. What can change live is left out.

Defaults are left out too, so that a new field with a default starts nothing anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mammoth_operator.fields import sparse
from mammoth_operator.names import POOLS
from mammoth_operator.spec import PipelineSpec, parse

__all__ = ["Reference", "Revision", "contract", "digest", "references", "revision_of", "spec_of"]

LAYOUT = 1  # of the rows between the stages
LIVE_POOL_FIELDS = ("replicas", "scaling", "maxNumSeqs", "requestBatchMaxWaitMs")
HASHED_FIELDS = ("model", "ar", "dit", "transport", "restartToken")


@dataclass(frozen=True, slots=True)
class Reference:
    """A Secret or ConfigMap that the pods read when they start; a change of its content is a new revision."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Revision:
    """What the pods of one revision are made from. `body` is what its record stores."""

    hash: str
    body: Mapping[str, Any]


def digest(value: Any) -> str:
    """Return the SHA-256 of `value` as canonical JSON, in hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def revision_of(spec: PipelineSpec, contents: Mapping[str, str]) -> Revision:
    """Return the revision that `spec` asks for. `contents` are digests of what `references` names, by kind/name."""
    whole = sparse(spec)
    body: dict[str, Any] = {name: whole[name] for name in HASHED_FIELDS if name in whole}
    for pool in POOLS:
        body[pool] = {name: value for name, value in body[pool].items() if name not in LIVE_POOL_FIELDS}
    if contents:
        body["references"] = dict(contents)
    return Revision(digest(body)[:8], body)


def spec_of(revision: Mapping[str, Any], current: PipelineSpec) -> PipelineSpec:
    """Return `current` with everything that makes pods taken from a revision's record, and everything live kept.

    Raises SpecError when the record holds what this version cannot read.
    """
    live = sparse(current)
    merged = {name: value for name, value in live.items() if name not in HASHED_FIELDS}
    merged |= {name: revision[name] for name in HASHED_FIELDS if name in revision}
    for pool in POOLS:
        kept = {name: live[pool][name] for name in LIVE_POOL_FIELDS if name in live[pool]}
        merged[pool] = {**merged[pool], **kept}
        capacity = revision[pool].get("capacity", {}).get("maxNumSeqs")
        if capacity is not None and kept.get("maxNumSeqs", 0) > capacity:
            merged[pool]["maxNumSeqs"] = capacity
    merged.pop("tuning", None)  # its bounds belong to the current capacity
    return replace(parse(merged), tuning=current.tuning)


def contract(spec: PipelineSpec) -> str:
    """Return the label of pods that may exchange rows: same layout, same model, same arithmetic."""
    model = sparse(spec.model)
    return digest([LAYOUT, model["source"], spec.model.variant, spec.ar.weights, spec.ar.head_alignment])[:8]


def references(spec: PipelineSpec) -> frozenset[Reference]:
    """Return the Secrets and ConfigMaps whose content the processes read when they start."""
    found = set()
    if spec.transport.tls.secret_ref:
        found.add(Reference("Secret", spec.transport.tls.secret_ref.name))
    for pool in POOLS:
        found |= _mentioned(spec.pool(pool).pod_overrides)
    return frozenset(found)


def _mentioned(value: Any) -> set[Reference]:
    """Return what `value`, somewhere inside a pod override, reads by name."""
    if isinstance(value, Mapping):
        found = set().union(*(_mentioned(inner) for inner in value.values())) if value else set()
        for key, kind, named in (
            ("configMapRef", "ConfigMap", "name"), ("configMapKeyRef", "ConfigMap", "name"), ("configMap", "ConfigMap", "name"),
            ("secretRef", "Secret", "name"), ("secretKeyRef", "Secret", "name"), ("secret", "Secret", "secretName"),
        ):  # fmt: skip
            inner = value.get(key)
            if isinstance(inner, Mapping) and isinstance(inner.get(named), str):
                found.add(Reference(kind, inner[named]))
        return found
    if isinstance(value, list | tuple):
        return set().union(*(_mentioned(inner) for inner in value)) if value else set()
    return set()
