"""Do: one MammothDeployment as a test sees it: create, edit, wait, and what its children are."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from playing.api import PATIENCE_S, Api, eventually

Raw = dict[str, Any]
CHILD_KINDS = (
    "ConfigMap",
    "ControllerRevision",
    "Deployment",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "Service",
    "ServiceAccount",
)
SPEC: Raw = {
    "model": {"source": {"path": "/opt/mammoth/checkpoints/emoji"}},
    "ar": {"image": "mammoth-ar:1", "replicas": 1, "resources": {"shmSize": "64Mi"}},
    "dit": {"image": "mammoth-dit:1", "replicas": 1, "resources": {"shmSize": "64Mi"}},
}  # fmt: skip


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Raw:
    """Return `base` with `changes` merged in, as a merge patch would."""
    out = copy.deepcopy(dict(base))
    for key, value in changes.items():
        if isinstance(value, Mapping):
            out[key] = merged(out.get(key) or {}, value)
        elif value is None:
            out.pop(key, None)
        else:
            out[key] = value
    return out


@dataclass(slots=True)
class Pipeline:
    """A MammothDeployment in a namespace."""

    api: Api
    namespace: str
    name: str = "demo"

    def create(self, **changes: Any) -> Pipeline:
        self.api.create(
            "MammothDeployment", self.namespace, {"metadata": {"name": self.name}, "spec": merged(SPEC, changes)}
        )
        return self

    def edit(self, **changes: Any) -> None:
        self.api.merge("MammothDeployment", self.namespace, self.name, {"spec": changes})

    def annotate(self, **annotations: str | None) -> None:
        named = {f"mammoth.dev/{key}": value for key, value in annotations.items()}
        self.api.merge("MammothDeployment", self.namespace, self.name, {"metadata": {"annotations": named}})

    def delete(self) -> None:
        self.api.delete("MammothDeployment", self.namespace, self.name)

    @property
    def object(self) -> Raw | None:
        return self.api.get("MammothDeployment", self.namespace, self.name)

    @property
    def status(self) -> Raw:
        return (self.object or {}).get("status", {})

    def condition(self, kind: str) -> Raw:
        return next(
            (item for item in self.status.get("conditions", ()) if item["type"] == kind),
            {"status": "", "reason": "", "message": ""},
        )

    def has(self, kind: str, status: str, reason: str = "") -> bool:
        item = self.condition(kind)
        return item["status"] == status and reason in ("", item["reason"])

    def until(self, kind: str, status: str, reason: str = "", *, within_s: float = PATIENCE_S) -> Raw:
        eventually(
            lambda: self.has(kind, status, reason), within_s=within_s, what=f"{kind} {status} {reason}; {self.status}"
        )
        return self.condition(kind)

    def ready(self, *, within_s: float = PATIENCE_S) -> Pipeline:
        """Wait until the present generation is ready."""

        def look() -> bool:
            found = self.object or {}
            status = found.get("status", {})
            current = status.get("observedGeneration") == found.get("metadata", {}).get("generation")
            settled = status.get("currentRevision") == status.get("targetRevision")
            return current and settled and self.has("Ready", "True") and self.has("Progressing", "False")

        try:
            eventually(look, within_s=within_s)
        except AssertionError:
            raise AssertionError(f"not ready within {within_s} s: {self.status}") from None
        return self

    def children(self, kind: str) -> dict[str, Raw]:
        found = self.api.list(kind, self.namespace, selector=f"mammoth.dev/deployment={self.name}")
        return {item["metadata"]["name"]: item for item in found}

    def versions(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Return uid and resource version of everything that a reconcile might write, status aside."""
        return {
            (kind, name): (
                item["metadata"]["uid"],
                str(item["metadata"].get("generation", item["metadata"]["resourceVersion"])),
            )
            for kind in CHILD_KINDS
            for name, item in self.children(kind).items()
        }

    def pods(self, pool: str = "", *, revision: str = "") -> list[Raw]:
        wanted = (
            {"mammoth.dev/deployment": self.name}
            | ({"mammoth.dev/pool": pool} if pool else {})
            | ({"mammoth.dev/revision": revision} if revision else {})
        )
        return self.api.list(
            "Pod", self.namespace, selector=",".join(f"{key}={value}" for key, value in wanted.items())
        )

    def available(self, pool: str) -> int:
        return sum(is_ready(pod) for pod in self.pods(pool))

    def events(self) -> list[str]:
        """Return the reasons of the Events on the object, oldest first."""
        found = [
            item
            for item in self.api.list("Event", self.namespace)
            if item["involvedObject"].get("kind") == "MammothDeployment" and item["involvedObject"]["name"] == self.name
        ]
        return [item["reason"] for item in sorted(found, key=lambda item: int(item["metadata"]["resourceVersion"]))]


def is_ready(pod: Raw) -> bool:
    """Return whether a pod is ready and stays."""
    conditions = pod.get("status", {}).get("conditions", ())
    return "deletionTimestamp" not in pod["metadata"] and any(
        item["type"] == "Ready" and item["status"] == "True" for item in conditions
    )
