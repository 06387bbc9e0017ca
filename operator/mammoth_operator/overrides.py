"""Decide: what a user may change in the pods beyond the spec, and what not: nothing that reaches the node or another identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mammoth_operator.names import GROUP

__all__ = ["override_faults"]

VOLUMES = ("configMap", "secret", "emptyDir", "persistentVolumeClaim", "projected", "downwardAPI", "ephemeral", "csi", "image")  # fmt: skip
SECURITY = ("runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "supplementalGroups")
ALLOWED = {
    "labels", "annotations", "env", "envFrom", "volumes", "volumeMounts", "hostAliases", "dnsPolicy", "dnsConfig", "securityContext",
}  # fmt: skip
OURS = (f"{GROUP}/", "app.kubernetes.io/")


def override_faults(overrides: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    """Return a (field, text) pair for each thing in `podOverrides` that is not allowed or has the wrong shape."""
    faults = [(f"{where}.{key}", f"not allowed; one of {', '.join(sorted(ALLOWED))}") for key in overrides if key not in ALLOWED]  # fmt: skip
    faults += _map_faults(overrides, where)
    for key in ("env", "envFrom", "volumes", "volumeMounts", "hostAliases"):
        faults += _list_faults(overrides.get(key, []), f"{where}.{key}")
    faults += _volume_faults(overrides.get("volumes", []), f"{where}.volumes")
    security = overrides.get("securityContext", {})
    faults += [(f"{where}.securityContext.{key}", f"not allowed; one of {', '.join(SECURITY)}") for key in security if key not in SECURITY]  # fmt: skip
    if isinstance(security, Mapping) and security.get("runAsUser") == 0:
        faults.append((f"{where}.securityContext.runAsUser", "must not be 0"))
    faults += [
        (f"{where}.env[{index}].name", "belongs to the operator: MAMMOTH_ variables come from the spec")
        for index, entry in enumerate(overrides.get("env", []))
        if isinstance(entry, Mapping) and str(entry.get("name", "")).startswith("MAMMOTH_")
    ]
    return faults


def _map_faults(overrides: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    faults = []
    for key in ("labels", "annotations"):
        entries = overrides.get(key, {})
        if not isinstance(entries, Mapping) or not all(isinstance(value, str) for value in entries.values()):
            faults.append((f"{where}.{key}", "must be a map of strings"))
            continue
        faults += [(f"{where}.{key}.{name}", "belongs to the operator") for name in entries if name.startswith(OURS)]
    return faults


def _list_faults(entries: Any, where: str) -> list[tuple[str, str]]:
    if isinstance(entries, list | tuple) and all(isinstance(entry, Mapping) for entry in entries):
        return []
    return [(where, "must be a list of objects")]


def _volume_faults(volumes: Any, where: str) -> list[tuple[str, str]]:
    if not isinstance(volumes, list | tuple):
        return []
    faults = []
    for index, volume in enumerate(volumes):
        if isinstance(volume, Mapping):
            kinds = [key for key in volume if key != "name"]
            faults += [(f"{where}[{index}].{kind}", f"not allowed; one of {', '.join(VOLUMES)}") for kind in kinds if kind not in VOLUMES]  # fmt: skip
    return faults
