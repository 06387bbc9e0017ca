"""Do: what a node's supervisor does to its own namespaces before it starts anything.

It runs in network, mount and process namespaces that end with it, so nothing it does here reaches the machine: addresses,
mounts, `/run`, `/var` and every process are gone when it is. Only its control groups have names outside.
"""

from __future__ import annotations

from pathlib import Path

from harness.errors import Unavailable
from harness.processes import run

__all__ = ["NAMESPACES", "NODE_ADDRESS", "enter", "make_groups", "remove_groups", "require_namespaces"]

NODE_ADDRESS = "10.200.0.1"
NAMESPACES = [
    "unshare",
    "--net",
    "--pid",
    "--mount",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--propagation",
    "private",
]
GROUPS = Path("/sys/fs/cgroup")


def require_namespaces() -> None:
    """Return when this process may have namespaces of its own. Raises Unavailable, with what the kernel said."""
    tried = run([*NAMESPACES, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0p"], check=False)
    if tried.returncode:
        raise Unavailable(f"a node needs namespaces and network devices of its own: {tried.stderr.strip()[-300:]}")


def enter(work: Path) -> None:
    """Give this network namespace an address, and private `/run` and `/var` to this mount namespace."""
    # A veth pair whose other end stays here: not every kernel has dummy devices.
    for arguments in (
        "link set lo up", "link add eth0 type veth peer name eth0p", "link set eth0p up", "link set eth0 up",
        f"addr add {NODE_ADDRESS}/24 dev eth0", f"route add default dev eth0 src {NODE_ADDRESS}",
    ):  # fmt: skip
        run(["ip", *arguments.split()])
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    run(["mount", "-t", "tmpfs", "tmpfs", "/run"])
    upper, scratch = work / "var", work / "var-scratch"
    upper.mkdir()
    scratch.mkdir()
    run(["mount", "-t", "overlay", "overlay", "-o", f"lowerdir=/var,upperdir={upper},workdir={scratch}", "/var"])


def make_groups(name: str) -> None:
    """Make the control group `name` in every hierarchy; kubelet puts the pods under it. Raises Unavailable."""
    try:
        for hierarchy in _hierarchies():
            (hierarchy / name).mkdir(exist_ok=True)
    except OSError as err:
        raise Unavailable(f"a node needs control groups of its own: {err}") from err


def remove_groups(name: str) -> None:
    """Remove the control group `name` and all below it. Their processes have ended."""
    for hierarchy in _hierarchies():
        for folder in sorted((hierarchy / name).rglob("*/"), reverse=True):
            folder.rmdir()
        if (hierarchy / name).exists():
            (hierarchy / name).rmdir()


def _hierarchies() -> list[Path]:
    """Return the one hierarchy of cgroup v2, or each of v1."""
    unified = (GROUPS / "cgroup.controllers").exists()
    return [GROUPS] if unified else [path for path in GROUPS.iterdir() if not path.is_symlink()]
