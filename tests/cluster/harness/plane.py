"""Do: a control plane: etcd, API server, controller manager, scheduler.

The API server writes an audit log (who asked for what, never contents), so that a test can count a program's requests and
check each of them against its role.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path

from harness.certificates import Authority
from harness.processes import Command, Processes

__all__ = ["SERVICES", "Endpoints", "start_plane"]

SERVICES = "10.96.0.0/16"
FIRST_SERVICE = "10.96.0.1"
READY_WITHIN_S = 60
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the control plane listens: ports of 127.0.0.1, and the address that the cluster's nodes know it by."""

    etcd: int
    etcd_peers: int
    api: int
    address: str

    @classmethod
    def free(cls, address: str) -> Endpoints:
        """Return ports that nothing listens on at this moment."""
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [held.getsockname()[1] for held in sockets]
        for held in sockets:
            held.close()
        return cls(ports[0], ports[1], ports[2], address)

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.api}"


def start_plane(
    processes: Processes, authority: Authority, *, tools: Path, work: Path, at: Endpoints, real_nodes: bool
) -> Path:
    """Start the control plane and return an administrator's kubeconfig; it answers when this returns.

    Without `real_nodes` nobody misses the heartbeat of a node: a test makes Node objects and plays kubelet.
    """
    admin = _identities(authority, work, at)
    processes.start("etcd", _etcd(tools, work, at))
    bind = "0.0.0.0" if real_nodes else "127.0.0.1"
    processes.start("kube-apiserver", _api_server(authority, tools, work, at, bind))
    kubectl: Command = [tools / "kubectl", "--kubeconfig", admin, "--request-timeout=5s"]
    processes.until([*kubectl, "get", "--raw", "/readyz"], within_s=READY_WITHIN_S)
    controllers = "*" if real_nodes else "*,-node-lifecycle-controller,-taint-eviction-controller"
    quick = ["--kube-api-qps=200", "--kube-api-burst=400", "--leader-elect=false", "--secure-port=0"]
    processes.start("kube-controller-manager", [
        tools / "kube-controller-manager", f"--kubeconfig={admin}", *quick, f"--controllers={controllers}",
        f"--service-account-private-key-file={authority.key('sa')}", f"--root-ca-file={authority.certificate('ca')}",
        f"--cluster-signing-cert-file={authority.certificate('ca')}", f"--cluster-signing-key-file={authority.key('ca')}",
        "--use-service-account-credentials=true",
    ])  # fmt: skip
    processes.start("kube-scheduler", [tools / "kube-scheduler", f"--kubeconfig={admin}", *quick])
    processes.until([*kubectl, "get", "serviceaccount", "default", "-n", "default"], within_s=READY_WITHIN_S)
    return admin


def _identities(authority: Authority, work: Path, at: Endpoints) -> Path:
    names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    addresses = [*(f"DNS:{name}" for name in names), *(f"IP:{ip}" for ip in ("127.0.0.1", at.address, FIRST_SERVICE))]
    authority.signing_pair("sa")
    authority.issue("apiserver", user="kube-apiserver", group="test", addresses=addresses)
    authority.issue("admin", user="admin", group="system:masters")
    (work / "audit-policy.json").write_text(json.dumps(AUDIT_POLICY))
    return authority.kubeconfig(work / "admin.kubeconfig", user="admin", server=at.server)


def _etcd(tools: Path, work: Path, at: Endpoints) -> Command:
    clients, peers = (f"http://127.0.0.1:{port}" for port in (at.etcd, at.etcd_peers))
    return [
        tools / "etcd", "--data-dir", work / "etcd", "--unsafe-no-fsync", "--log-level=warn",
        "--listen-client-urls", clients, "--advertise-client-urls", clients, "--listen-peer-urls", peers,
        "--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}",
    ]  # fmt: skip


def _api_server(authority: Authority, tools: Path, work: Path, at: Endpoints, bind: str) -> Command:
    return [
        tools / "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{at.etcd}",
        f"--secure-port={at.api}", f"--bind-address={bind}", f"--advertise-address={at.address}",
        f"--tls-cert-file={authority.certificate('apiserver')}", f"--tls-private-key-file={authority.key('apiserver')}",
        f"--client-ca-file={authority.certificate('ca')}",
        f"--kubelet-client-certificate={authority.certificate('admin')}", f"--kubelet-client-key={authority.key('admin')}",
        f"--kubelet-certificate-authority={authority.certificate('ca')}",
        "--kubelet-preferred-address-types=InternalIP", f"--service-cluster-ip-range={SERVICES}",
        "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={authority.folder / 'sa.pub'}",
        f"--service-account-signing-key-file={authority.key('sa')}",
        f"--audit-log-path={work / 'audit.log'}", f"--audit-policy-file={work / 'audit-policy.json'}",
    ]  # fmt: skip
