"""Decide: what everything is called: the API group, labels, annotations, ports and the objects a deployment owns.

Names of owned objects derive from the parent's name and a revision alone, so that a restart finds what it made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Key", "Pool", "child_name", "profile_name", "revision_name", "selector"]

GROUP, VERSION, KIND, PLURAL = "mammoth.dev", "v1alpha1", "MammothDeployment", "mammothdeployments"
API_VERSION = f"{GROUP}/{VERSION}"
MANAGER = "mammoth-operator"

DEPLOYMENT_LABEL = f"{GROUP}/deployment"
POOL_LABEL = f"{GROUP}/pool"
REVISION_LABEL = f"{GROUP}/revision"
CONTRACT_LABEL = f"{GROUP}/contract"
OUTCOME_LABEL = f"{GROUP}/outcome"  # on a revision record: ready or failed
PROVEN_LABEL = f"{GROUP}/transport"  # on a revision record: proven

APPLIED_ANNOTATION = f"{GROUP}/applied"  # digest of the manifest that was applied last
REVISION_ANNOTATION = f"{GROUP}/revision"  # on the parent: pins the revision to run
DRAIN_ANNOTATION = f"{GROUP}/drain"  # on the parent: drain the pods of a pool
DRAINING_ANNOTATION = f"{GROUP}/draining-since"  # on a pod
DELETION_COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
FINALIZER = f"{GROUP}/drain"

GRPC_PORT, CONTROL_PORT, HEALTH_PORT, METRICS_PORT = 50051, 50052, 50053, 9090
LIVENESS_SERVICE = "liveness"  # of a pod's health port: alive even while it drains; the empty name is readiness

Pool = Literal["ar", "dit"]
POOLS: tuple[Pool, Pool] = ("ar", "dit")


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Which object."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def child_name(name: str, pool: Pool, revision: str = "") -> str:
    """Return `name-pool`, or `name-pool-hash8` of an object that belongs to one revision."""
    return f"{name}-{pool}-{revision}" if revision else f"{name}-{pool}"


def revision_name(name: str, revision: str) -> str:
    """Return the name of a revision's record."""
    return f"{name}-{revision}"


def profile_name(name: str) -> str:
    """Return the name of the ConfigMap with a deployment's measured profiles."""
    return f"{name}-profile"


def selector(name: str, pool: Pool | None = None, revision: str = "") -> dict[str, str]:
    """Return the labels that select a deployment's pods, of one pool and one revision where given."""
    labels = {DEPLOYMENT_LABEL: name}
    if pool:
        labels[POOL_LABEL] = pool
    if revision:
        labels[REVISION_LABEL] = revision
    return labels
