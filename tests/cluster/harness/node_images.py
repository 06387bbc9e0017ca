"""Do: images into containerd: streamed, so that no second copy is written on the way."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from harness.errors import ClusterError
from harness.oci import Image, write_archive

__all__ = ["import_images"]


def import_images(socket: Path, images: Sequence[Image], *, known: Collection[str] = ()) -> None:
    """Import and unpack `images` for the pods of the node behind a containerd socket; it has the layers `known` already.

    Raises ClusterError when it refuses.
    """
    command = ["ctr", "-a", str(socket), "-n", "k8s.io", "images", "import", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as importer:
        assert importer.stdin is not None
        assert importer.stderr is not None
        try:
            write_archive(images, importer.stdin, known=known)
            importer.stdin.close()
        except BrokenPipeError:
            pass
        said = importer.stderr.read().decode()
    if importer.returncode:
        raise ClusterError(f"ctr images import: {said[-1000:]}")
