"""Do: bring the project's three images into a cluster: light ones, the real ones of the Dockerfiles, or ones that are named.

`MAMMOTH_TEST_IMAGES` says which: `light` (the default), `real` (buildah and packages from PyPI, minutes), or for a named
cluster a reference with a place for the name, `registry.example/mammoth-{name}:tag`.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.cluster import Cluster
from harness.errors import ClusterError, Unavailable
from harness.light import DOCKERFILES, ROOT, light_images
from harness.node_images import import_images
from harness.real import build_real, import_real

__all__ = ["Images", "load_images"]

NAMED = "MAMMOTH_TEST_IMAGES"
CHART, REGISTRY = ROOT / "charts/mammoth-operator/Chart.yaml", "ghcr.io/mammoth-serve"
Kind = Literal["light", "real", "named"]


@dataclass(frozen=True, slots=True)
class Images:
    """References that a pod can name (imagePullPolicy IfNotPresent), and which kind they are.

    `published`: the node has them under the names that the chart and its samples use, too. `next` returns a second
    reference to the same image, to roll to; a named cluster has none.
    """

    kind: Kind
    ar: str
    dit: str
    operator: str
    seconds_to_load: float
    published: bool = False

    def next(self, reference: str) -> str:
        if self.kind == "named":
            raise Unavailable("a named cluster has one reference an image")
        return reference.removesuffix(":test") + ":next"


def load_images(cluster: Cluster) -> Images:
    """Put the images on the cluster's node and return their references. Raises Unavailable where that cannot be."""
    chosen, start = os.environ.get(NAMED, "light"), time.monotonic()
    if not cluster.own:
        if "{name}" not in chosen:
            raise Unavailable(
                f"on a named cluster {NAMED} names the images, like registry.example/mammoth-{{name}}:tag"
            )
        return Images("named", **{name: chosen.format(name=name) for name in DOCKERFILES}, seconds_to_load=0.0)
    version = re.search(r"^appVersion: (\S+)$", CHART.read_text(), re.MULTILINE)
    assert version is not None, f"{CHART} names the version of the images"
    names = {
        name: [
            *(f"docker.io/library/mammoth-{name}:{tag}" for tag in ("test", "next")),
            f"{REGISTRY}/mammoth-{name}:{version[1]}",
        ]
        for name in DOCKERFILES
    }
    with tempfile.TemporaryDirectory(prefix="mammoth-images-") as folder:
        if chosen == "real":
            build_real()
            import_real(cluster.containerd, names, Path(folder))
        elif chosen == "light":
            import_images(cluster.containerd, light_images(names, Path(folder)), known=cluster.layers)
        else:
            raise ClusterError(f"{NAMED}: {chosen!r} is neither light nor real")
    seconds = time.monotonic() - start
    print(f"{chosen} images loaded in {seconds:.1f} s", flush=True)
    first = {name: refs[0] for name, refs in names.items()}
    return Images("real" if chosen == "real" else "light", **first, seconds_to_load=seconds, published=True)
