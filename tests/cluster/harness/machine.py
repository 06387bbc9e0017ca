"""Do: what a machine must have for each tier, and Debian's packages for what is missing, when this is root on a Debian."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from harness.errors import Unavailable

__all__ = ["NODE_PROGRAMS", "PLANE_PROGRAMS", "require"]

# program: the Debian package that has it
PLANE_PROGRAMS = {"openssl": "openssl", "setpriv": "util-linux"}
NODE_PROGRAMS = {
    **PLANE_PROGRAMS,
    "unshare": "util-linux",
    "mount": "mount",
    "ip": "iproute2",
    "iptables": "iptables",
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "debootstrap": "debootstrap",
}
LONGEST_INSTALL_S = 600


def require(programs: Mapping[str, str], *, root: bool) -> None:
    """Return when every program is there, installing packages if it may. Raises Unavailable, naming what is missing."""
    if root and os.geteuid() != 0:
        raise Unavailable("a node needs root, for namespaces and mounts of its own")
    if not (missing := _missing(programs)):
        return
    packages = sorted({programs[name] for name in missing})
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unavailable(f"missing: {', '.join(missing)} (Debian: apt-get install {' '.join(packages)})")
    print(f"installing with apt-get: {' '.join(packages)}", flush=True)
    _apt("update")
    _apt("install", "--yes", "--no-install-recommends", *packages)
    if missing := _missing(programs):
        raise Unavailable(f"still missing after apt-get install: {', '.join(missing)}")


def _missing(programs: Mapping[str, str]) -> list[str]:
    return [name for name in programs if shutil.which(name) is None]


def _apt(*arguments: str) -> None:
    done = subprocess.run(
        ["apt-get", "--quiet", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        capture_output=True,
        text=True,
        timeout=LONGEST_INSTALL_S,
        check=False,
    )
    if done.returncode:
        raise Unavailable(f"apt-get {arguments[0]} failed: {done.stderr[-500:].strip()}")
