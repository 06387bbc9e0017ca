"""Do: one node of a cluster: containerd, kubelet, kube-proxy, CoreDNS, and four GPUs that are only counted."""

from __future__ import annotations

import json
from pathlib import Path

from harness.certificates import Authority
from harness.isolation import NODE_ADDRESS
from harness.node_images import import_images
from harness.oci import Image, Layer, writing
from harness.plane import Endpoints
from harness.processes import Command, Processes, run

__all__ = ["GPUS", "NODE", "PAUSE_IMAGE", "SOCKET", "start_node"]

NODE, GPUS = "gpu-0", 4
PODS = "10.201.0.0/24"
PAUSE_IMAGE = "registry.k8s.io/pause:3.10"
SOCKET = "containerd.sock"
READY_WITHIN_S = 60
NETWORK = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": PODS}]], "routes": [{"dst": "0.0.0.0/0"}]},
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}
# runc cannot lower an OOM score where CAP_SYS_RESOURCE is missing
CONTAINERD = """version = 2
root = "{work}/containerd"
state = "/run/containerd"
[grpc]
  address = "{work}/{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{work}/cni"
"""
COREDNS = """.:53 {{
  bind {address}
  errors
  cache 5
  kubernetes cluster.local {{
    endpoint {server}
    tls {folder}/admin.crt {folder}/admin.key {folder}/ca.crt
  }}
}}
"""


def start_node(
    processes: Processes, authority: Authority, *, tools: Path, work: Path, at: Endpoints, admin: Path, group: str
) -> None:
    """Start the node in the namespaces of `isolation`; it is Ready when this returns. Its pods are under cgroup `group`."""
    _start_containerd(processes, tools, work)
    authority.issue("kubelet", user=f"system:node:{NODE}", group="system:nodes",
                    addresses=[f"DNS:{NODE}", f"IP:{NODE_ADDRESS}"])  # fmt: skip
    identity = authority.kubeconfig(work / "kubelet.kubeconfig", user="kubelet", server=at.server)
    (work / "kubelet.json").write_text(json.dumps(_kubelet(authority, work, group)))
    names = [f"--hostname-override={NODE}"]
    processes.start("kubelet", [tools / "kubelet", f"--config={work / 'kubelet.json'}", f"--kubeconfig={identity}",
                                *names, f"--node-ip={NODE_ADDRESS}", f"--root-dir={work / 'kubelet'}"])  # fmt: skip
    processes.start("kube-proxy", [tools / "kube-proxy", f"--kubeconfig={admin}", *names, "--proxy-mode=iptables",
                                   f"--cluster-cidr={PODS}", "--conntrack-max-per-core=0",
                                   "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0"])  # fmt: skip
    (work / "Corefile").write_text(COREDNS.format(address=NODE_ADDRESS, server=at.server, folder=authority.folder))
    processes.start("coredns", [tools / "coredns", "-conf", work / "Corefile"])
    kubectl: Command = [tools / "kubectl", "--kubeconfig", admin]
    ready: Command = [*kubectl, "wait", "--for=condition=Ready", f"node/{NODE}", "--timeout=1s"]
    processes.until(ready, within_s=READY_WITHIN_S)
    gpus = [{"op": "add", "path": "/status/capacity/nvidia.com~1gpu", "value": str(GPUS)}]
    run([*kubectl, "patch", "node", NODE, "--subresource=status", "--type=json", "-p", json.dumps(gpus)])


def _start_containerd(processes: Processes, tools: Path, work: Path) -> None:
    (work / "cni").mkdir()
    (work / "cni" / "10-bridge.conflist").write_text(json.dumps(NETWORK))
    (work / "containerd.toml").write_text(CONTAINERD.format(work=work, socket=SOCKET, pause=PAUSE_IMAGE))
    processes.start("containerd", ["containerd", "--config", work / "containerd.toml"])
    processes.until(["ctr", "-a", work / SOCKET, "version"], within_s=READY_WITHIN_S)
    with writing(work / "pause.tar") as layer:
        layer.file(tools / "pause", "pause")
    pause = Image([PAUSE_IMAGE], [Layer.of(work / "pause.tar")], {"Entrypoint": ["/pause"], "User": "65535:65535"})
    import_images(work / SOCKET, [pause])


def _kubelet(authority: Authority, work: Path, group: str) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "failSwapOn": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{group}",
        "containerRuntimeEndpoint": f"unix://{work / SOCKET}",
        "address": NODE_ADDRESS,
        "tlsCertFile": str(authority.certificate("kubelet")),
        "tlsPrivateKeyFile": str(authority.key("kubelet")),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority.certificate("ca"))},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDNS": [NODE_ADDRESS],
        "clusterDomain": "cluster.local",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "localStorageCapacityIsolation": False,
        "volumePluginDir": str(work / "volume-plugins"),
    }
