"""Decide: who may talk to whom: clients to AR, AR to DiT, DiT to DiT, the operator to Control, everybody to DNS."""

from __future__ import annotations

from typing import Any

from mammoth_operator.names import CONTROL_PORT, GRPC_PORT, MANAGER, METRICS_PORT, POOLS, Pool, selector
from mammoth_operator.spec import PipelineSpec

__all__ = ["network_policies"]

Policy = dict[str, Any]
DNS = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
HUB = {"ports": [{"port": 443, "protocol": "TCP"}]}


def network_policies(name: str, spec: PipelineSpec, operator_namespace: str) -> dict[Pool, Policy]:
    """Return the NetworkPolicy spec of each pool. Kubelet's probes pass in any case.

    A pod has one policy for all of its containers, so with a hub source the whole pod may reach port 443.
    """
    return {pool: _policy(name, spec, pool, operator_namespace) for pool in POOLS}


def _policy(name: str, spec: PipelineSpec, pool: Pool, operator_namespace: str) -> Policy:
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": operator_namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": MANAGER}},
    }
    callers = [{"podSelector": {"matchLabels": selector(name)}}]
    ingress = [
        {"ports": [_port(GRPC_PORT)], **({} if pool == "ar" else {"from": callers})},
        {"ports": [_port(CONTROL_PORT)], "from": [operator]},
        {"ports": [_port(METRICS_PORT)]},
    ]
    peers = {"ports": [_port(GRPC_PORT)], "to": [{"podSelector": {"matchLabels": selector(name, "dit")}}]}
    return {
        "podSelector": {"matchLabels": selector(name, pool)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": [peers, DNS, *([HUB] if spec.model.source.hub else [])],
    }


def _port(number: int) -> Policy:
    return {"port": number, "protocol": "TCP"}
