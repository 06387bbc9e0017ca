"""Decide: the CustomResourceDefinition. `python -m mammoth_operator.crd` prints what the chart's template holds."""

from __future__ import annotations

import sys
from typing import Any

import yaml

from mammoth_operator.names import GROUP, KIND, PLURAL, VERSION
from mammoth_operator.schema import object_schema
from mammoth_operator.spec import PipelineSpec
from mammoth_operator.status_schema import status_schema

__all__ = ["crd"]

NAME_MAX_LENGTH = 40  # so that every child's name fits in 63

# name, type, JSON path, shown by `-o wide` alone
COLUMNS = (
    ("Ready", "string", ".status.conditions[?(@.type=='Ready')].status", False),
    ("Reason", "string", ".status.conditions[?(@.type=='Ready')].reason", False),
    ("AR", "string", ".status.ar.summary", False),
    ("DiT", "string", ".status.dit.summary", False),
    ("Batch", "integer", ".status.tuning.applied.ditMaxNumSeqs", False),
    ("Wait", "number", ".status.tuning.applied.requestBatchMaxWaitMs", False),
    ("Age", "date", ".metadata.creationTimestamp", False),
    ("Revision", "string", ".status.currentRevision", True),
    ("P95", "number", ".status.capacity.p95Seconds[0].seconds", True),
    ("Img/h", "number", ".status.capacity.imagesPerHour", True),
    ("Tuning", "string", ".status.tuning.mode", True),
    ("Decision", "string", ".status.tuning.lastDecision.reason", True),
    ("Endpoint", "string", ".status.endpoint", True),
)


def crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition: one version, served and stored, without webhooks."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["mmd"],
                "categories": ["mammoth"],
            },
            "versions": [_version()],
        },
    }


def _version() -> dict[str, Any]:
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _document()},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.dit.replicas",
                "statusReplicasPath": ".status.dit.replicas",
                "labelSelectorPath": ".status.dit.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, **({"priority": 1} if wide else {})}
            for name, kind, path, wide in COLUMNS
        ],
    }


def _document() -> dict[str, Any]:
    return {
        "type": "object",
        "description": "Two GPU pools, AR and DiT, that together turn prompts into pictures.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": object_schema(PipelineSpec, "What is wanted."),
            "status": status_schema(),
        },
        "x-kubernetes-validations": [
            {
                "rule": f"size(self.metadata.name) <= {NAME_MAX_LENGTH}",
                "message": f"metadata.name must have at most {NAME_MAX_LENGTH} characters",
            }
        ],
    }


class _Plain(yaml.SafeDumper):
    """Writes repeated values out, and quotes what YAML 1.1 would read as a boolean."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def text() -> str:
    """Return the definition as YAML."""
    return yaml.dump(crd(), Dumper=_Plain, sort_keys=False, width=4096)


if __name__ == "__main__":
    sys.stdout.write(text())
