"""Decide: what is kept of an object that was seen: its name, its revision, and the few facts that decisions need.

An object of ours also leaves a digest of the fields that our manager owns in it: it differs from the digest of what was
applied as soon as somebody else wrote one of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mammoth_operator.names import APPLIED_ANNOTATION, DEPLOYMENT_LABEL, MANAGER, Key
from mammoth_operator.podfacts import PodFacts, pod_facts
from mammoth_operator.revision import digest

__all__ = ["Child", "Parent", "ReplicaWriter", "child_of", "owned_digest", "parent_of", "sent_digest"]

KEPT_LABELS = "mammoth.dev/"
Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Child:
    """An object that carries our labels. `owner_uid` is its controller's, empty when it has none."""

    kind: str
    namespace: str
    name: str
    uid: str
    version: int
    labels: Mapping[str, str]
    owner_uid: str = ""
    owner_name: str = ""
    applied: str = ""
    owned: str = ""
    leaving: bool = False
    created: str = ""
    replicas: int = 0  # Deployment
    refused: str = ""  # Deployment: why its pods could not be made
    selector: Mapping[str, str] = field(default_factory=dict)  # Service
    data: Mapping[str, Any] = field(default_factory=dict)  # ConfigMap, ControllerRevision
    ordinal: int = 0  # ControllerRevision
    pod: PodFacts | None = None

    @property
    def parent(self) -> Key:
        return Key(self.namespace, self.labels[DEPLOYMENT_LABEL])


@dataclass(frozen=True, slots=True)
class ReplicaWriter:
    """Who owns `spec.POOL.replicas` of a parent, and whether it was written through the scale subresource."""

    pool: str
    manager: str
    through_scale: bool


@dataclass(frozen=True, slots=True)
class Parent:
    """A MammothDeployment."""

    key: Key
    uid: str
    version: int
    generation: int
    created: str
    spec: Raw
    status: Raw
    annotations: Mapping[str, str]
    finalizers: tuple[str, ...]
    leaving_since: str
    writers: tuple[ReplicaWriter, ...]

    def same_intent(self, other: Parent) -> bool:
        """Return whether nothing changed but the status."""
        mine, theirs = ((p.uid, p.generation, p.annotations, p.finalizers, p.leaving_since) for p in (self, other))
        return mine == theirs


def child_of(raw: Raw) -> Child:
    """Return what is kept of a child; `raw` carries the deployment label."""
    meta, spec = raw["metadata"], raw.get("spec") or {}
    kind = raw["kind"]
    owner: Raw = next((ref for ref in meta.get("ownerReferences", ()) if ref.get("controller")), {})
    is_pod = kind == "Pod"
    return Child(
        kind=kind,
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        version=int(meta.get("resourceVersion") or 0),
        labels={key: value for key, value in meta.get("labels", {}).items() if key.startswith(KEPT_LABELS)},
        owner_uid=owner.get("uid", ""),
        owner_name=owner.get("name", ""),
        applied=meta.get("annotations", {}).get(APPLIED_ANNOTATION, ""),
        owned="" if is_pod else owned_digest(raw),
        leaving="deletionTimestamp" in meta,
        created=meta.get("creationTimestamp") or "",
        replicas=spec.get("replicas", 1) if kind == "Deployment" else 0,
        refused=_refused(raw) if kind == "Deployment" else "",
        selector=spec.get("selector") or {} if kind == "Service" else {},
        data=raw.get("data") or {} if kind in ("ConfigMap", "ControllerRevision") else {},
        ordinal=raw.get("revision", 0) if kind == "ControllerRevision" else 0,
        pod=pod_facts(raw) if is_pod else None,
    )


def parent_of(raw: Raw) -> Parent:
    """Return what is kept of a MammothDeployment."""
    meta = raw["metadata"]
    return Parent(
        key=Key(meta["namespace"], meta["name"]),
        uid=meta["uid"],
        version=int(meta.get("resourceVersion") or 0),
        generation=meta.get("generation", 0),
        created=meta.get("creationTimestamp", ""),
        spec=raw.get("spec") or {},
        status=raw.get("status") or {},
        annotations={key: value for key, value in meta.get("annotations", {}).items() if key.startswith(KEPT_LABELS)},
        finalizers=tuple(meta.get("finalizers", ())),
        leaving_since=meta.get("deletionTimestamp") or "",
        writers=_writers(meta.get("managedFields", ())),
    )


def _refused(raw: Raw) -> str:
    conditions = (raw.get("status") or {}).get("conditions", ())
    failures = [item for item in conditions if item["type"] == "ReplicaFailure" and item["status"] == "True"]
    return failures[0].get("message", "") if failures else ""


def _writers(managed: Any) -> tuple[ReplicaWriter, ...]:
    found = []
    for entry in managed:
        spec = entry.get("fieldsV1", {}).get("f:spec", {})
        for pool in ("ar", "dit"):
            if "f:replicas" in spec.get(f"f:{pool}", {}):
                found.append(ReplicaWriter(pool, entry.get("manager", ""), entry.get("subresource") == "scale"))
    return tuple(found)


def owned_digest(raw: Raw) -> str:
    """Return the digest of the fields that our manager has applied to `raw`, as they are now; empty when it owns none."""
    for entry in raw["metadata"].get("managedFields", ()):
        if entry.get("manager") == MANAGER and entry.get("operation") == "Apply" and not entry.get("subresource"):
            return digest(_project(entry["fieldsV1"], raw))[:16]
    return ""


def sent_digest(manifest: Raw) -> str:
    """Return what `owned_digest` of the object gives when it holds exactly what `manifest` says."""
    meta = {key: value for key, value in manifest["metadata"].items() if key not in ("name", "namespace", "uid")}
    body = {key: value for key, value in manifest.items() if key not in ("apiVersion", "kind", "metadata")}
    return digest({**body, "metadata": meta})[:16]


def _project(tree: Raw, live: Any) -> Any:
    """Return the part of `live` that a fieldsV1 `tree` covers, lists in their present order. An empty tree covers it all."""
    if not tree:
        return live
    if isinstance(live, list):
        return [_project(tree[name], element) for element in live if (name := _named(tree, element))]
    if not isinstance(live, Mapping):
        return live
    names = [name for name in tree if name.startswith("f:") and name[2:] in live]
    return {name[2:]: _project(tree[name], live[name[2:]]) for name in names}


def _named(tree: Raw, element: Any) -> str | None:
    """Return the name under which `tree` holds a list's element: by its key fields, or by its value."""
    for name in tree:
        kind, _, text = name.partition(":")
        if kind == "k" and isinstance(element, Mapping) and json.loads(text).items() <= element.items():
            return name
        if kind == "v" and json.loads(text) == element:
            return name
    return None
