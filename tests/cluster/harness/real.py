"""Do: the real images, built by the Dockerfiles through `.ci/images.sh` with buildah, as archives to import.

Where no image registry answers, the Dockerfiles' base is the Debian of `base` under the same name: the same Debian and Python.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.base import base_layer
from harness.errors import ClusterError
from harness.light import ROOT
from harness.machine import require
from harness.processes import Command, run

__all__ = ["build_real", "import_real"]

BASE = "docker.io/library/python:3.11-slim-bookworm"
PROGRAMS = {"buildah": "buildah", "debootstrap": "debootstrap"}
AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
TAG = "real"


def build_real() -> None:
    """Build the images into buildah's storage, where unchanged layers are kept. Raises Unavailable, or ClusterError when one fails."""
    require(PROGRAMS, root=True)
    if run(["buildah", "pull", "--quiet", BASE], check=False).returncode:
        _stand_in()
    start = time.monotonic()
    flags = f"--pull-never --network host --volume {AUTHORITIES}:{AUTHORITIES}:ro"
    environment = {**os.environ, "BUILDER": "buildah", "BUILD_FLAGS": flags, "TAG": TAG, "BUILDAH_ISOLATION": "chroot"}
    done = subprocess.run([ROOT / ".ci/images.sh"], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f".ci/images.sh: {(done.stdout + done.stderr)[-3000:]}")
    print(f"real images built in {time.monotonic() - start:.0f} s", flush=True)


def import_real(socket: Path, names: Mapping[str, Sequence[str]], scratch: Path) -> None:
    """Put the built images behind a containerd socket, each under all of its names."""
    ctr: Command = ["ctr", "-a", socket, "-n", "k8s.io", "images"]
    for name, (first, *others) in names.items():
        archive = scratch / f"{name}.tar"
        run(["buildah", "push", "--quiet", f"mammoth-{name}:{TAG}", f"docker-archive:{archive}:{first}"])
        run([*ctr, "import", archive])
        archive.unlink()
        for other in others:
            run([*ctr, "tag", first, other])


def _stand_in() -> None:
    """Make the base image of the Dockerfiles from the Debian that is cached."""
    container = run(["buildah", "from", "scratch"]).stdout.strip()
    try:
        run(["buildah", "add", "--quiet", container, base_layer(), "/"])
        run(["buildah", "commit", "--quiet", container, BASE])
    finally:
        run(["buildah", "rm", container])
