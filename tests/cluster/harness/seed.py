"""Do: containerd's folder with the layers of the light images unpacked, made once a machine and linked into every node.

Gigabytes are hashed and unpacked once, not in every session, and a node that goes frees no data. Layers are never written to:
containers have their own upper folders, and containerd only adds and unlinks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

from harness.cache import cache_folder, digest_of, making
from harness.light import DOCKERFILES, package_layers
from harness.node_images import import_images
from harness.oci import Image
from harness.processes import Processes, run

__all__ = ["known_layers", "plant", "seed"]

STARTS_WITHIN_S = 30
BLOBS = "containerd/io.containerd.content.v1.content/blobs/sha256"
CONFIG = """version = 2
root = "{folder}/containerd"
state = "{folder}/scratch/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{folder}/scratch/containerd.sock"
"""
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def seed() -> Path:
    """Return the cached folder. Raises Unavailable where light images cannot be."""
    project = distribution("mammoth-serve")
    stacks = {name: package_layers(name, project) for name in DOCKERFILES}
    layers = sorted({layer.sha256 for stack in stacks.values() for layer in stack})
    name = f"node-{digest_of([run(['containerd', '--version']).stdout, *layers])}"
    with making(name) as folder:
        if folder is not None:
            start = time.monotonic()
            _unpack(
                [Image([f"mammoth.test/{stage}-packages:seed"], stack, {}) for stage, stack in stacks.items()], folder
            )
            for layer in (layer for stack in stacks.values() for layer in stack):
                layer.path.unlink()
                layer.path.hardlink_to(folder / BLOBS / layer.sha256)  # one copy of the same bytes
            print(f"packages of the light images unpacked in {time.monotonic() - start:.0f} s", flush=True)
            (folder / "layers").write_text("\n".join(layers))
    return cache_folder() / name


def known_layers(folder: Path) -> set[str]:
    """Return the digests of the layers that a node with this seed has."""
    return set((folder / "layers").read_text().split())


def plant(folder: Path, target: Path) -> None:
    """Make `target` containerd's folder with everything of the seed: files are linked, databases copied."""
    if run(["cp", "-a", "--link", folder / "containerd", target], check=False).returncode:
        run(["rm", "-rf", target])
        run(["cp", "-a", folder / "containerd", target])  # another file system
    for database in target.rglob("*.db"):
        own = database.with_suffix(".own")
        own.write_bytes(database.read_bytes())
        own.replace(database)


def _unpack(images: Sequence[Image], folder: Path) -> None:
    scratch = folder / "scratch"
    scratch.mkdir()
    (scratch / "containerd.toml").write_text(CONFIG.format(folder=folder))
    processes, socket = Processes(scratch / "logs"), scratch / "containerd.sock"
    try:
        processes.start("containerd", [*NAMESPACES, "containerd", "--config", scratch / "containerd.toml"])
        processes.until(["ctr", "-a", socket, "version"], within_s=STARTS_WITHIN_S)
        import_images(socket, images)
    finally:
        processes.stop_all()
    run(["rm", "-rf", scratch])
