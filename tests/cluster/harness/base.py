"""Do: the Debian with Python that images stand on, where no image registry can be reached: debootstrap, once, cached as a tar."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from harness.cache import cache_folder, digest_of, making
from harness.processes import run

__all__ = ["PYTHON", "base_layer"]

SUITE, MIRROR, PYTHON = "bookworm", "http://deb.debian.org/debian", "3.11"
PACKAGES = "ca-certificates,python3,python3-pip"
LEFT_OUT = tuple(
    f"./{path}/*" for path in ("dev", "var/cache/apt", "var/lib/apt/lists", "var/log", "usr/share/doc", "usr/share/man")
)


def base_layer() -> Path:
    """Return a tar of a Debian root with `python` and `pip`, of the same Debian and Python as python:3.11-slim-bookworm."""
    name = f"base-{digest_of([SUITE, PACKAGES, *LEFT_OUT])}"
    with making(name) as folder:
        if folder is not None:
            start = time.monotonic()
            _bootstrap(folder / "rootfs.tar")
            print(f"base system in {time.monotonic() - start:.0f} s", flush=True)
    return cache_folder() / name / "rootfs.tar"


def _bootstrap(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="mammoth-base-") as folder:
        root = Path(folder) / "root"
        run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, root, MIRROR])
        (root / "usr/bin/python").symlink_to("python3")
        (root / f"usr/lib/python{PYTHON}/EXTERNALLY-MANAGED").unlink(missing_ok=True)
        run(["tar", *(f"--exclude={pattern}" for pattern in LEFT_OUT), "-C", root, "-cf", target, "."])
        os.sync()
