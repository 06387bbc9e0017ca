"""Translate: folders and configurations to an OCI archive that `ctr images import` reads. Layers are plain tar files."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

__all__ = ["Image", "Layer", "write_archive", "writing"]

COPY_BYTES = 1 << 20
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass(frozen=True, slots=True)
class Layer:
    """A tar file and the SHA-256 of its bytes."""

    path: Path
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Layer:
        """Return the layer in `path`; its digest is kept beside it."""
        beside = path.with_suffix(".sha256")
        if not beside.exists():
            with path.open("rb") as file:
                beside.write_text(hashlib.file_digest(file, "sha256").hexdigest())
        return cls(path, beside.read_text())


@dataclass(frozen=True, slots=True)
class Image:
    """What one image is: every name it gets, its layers from the bottom, and its run configuration (`Entrypoint`, `Env`, …)."""

    names: Sequence[str]
    layers: Sequence[Layer]
    config: Mapping[str, Any]


class LayerWriter:
    """Adds files of root, or bytes, to a layer."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar

    def file(self, source: Path, name: str) -> None:
        """Add the file or link `source` as `name`, with its mode and time."""
        self._tar.add(source, name, recursive=False, filter=_of_root)

    def tree(self, source: Path, name: str) -> None:
        self._tar.add(source, name, filter=_of_root)

    def text(self, content: bytes, name: str, *, mode: int = 0o644) -> None:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(content), mode
        self._tar.addfile(entry, io.BytesIO(content))


@contextmanager
def writing(path: Path) -> Iterator[LayerWriter]:
    """Yield what fills the layer at `path`."""
    with tarfile.open(path, "w") as tar:
        yield LayerWriter(tar)


def write_archive(images: Sequence[Image], target: IO[bytes], *, known: Collection[str] = ()) -> None:
    """Write an OCI archive of `images` to a stream. A layer that several share is written once, one in `known` not at all."""
    layers = {layer.sha256: layer for image in images for layer in image.layers if layer.sha256 not in known}
    documents = [_documents(image) for image in images]
    with tarfile.open(fileobj=target, mode="w|", bufsize=COPY_BYTES) as tar:
        writer = LayerWriter(tar)
        writer.text(json.dumps({"imageLayoutVersion": "1.0.0"}).encode(), "oci-layout")
        for layer in layers.values():
            writer.file(layer.path, f"blobs/sha256/{layer.sha256}")
        for content in {config for config, _ in documents} | {manifest for _, manifest in documents}:
            writer.text(content, f"blobs/sha256/{_sha256(content)}")
        entries = [
            {**_descriptor(MANIFEST, manifest), "annotations": {"io.containerd.image.name": name}}
            for image, (_, manifest) in zip(images, documents, strict=True)
            for name in image.names
        ]
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
        writer.text(json.dumps(index).encode(), "index.json")


def _documents(image: Image) -> tuple[bytes, bytes]:
    """Return the configuration and the manifest of an image."""
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": dict(image.config),
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.sha256}" for layer in image.layers]},
        }
    ).encode()
    layers = [
        {"mediaType": LAYER, "digest": f"sha256:{layer.sha256}", "size": layer.path.stat().st_size}
        for layer in image.layers
    ]
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": _descriptor(CONFIG, config), "layers": layers}
    return config, json.dumps(manifest).encode()


def _descriptor(kind: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": f"sha256:{_sha256(content)}", "size": len(content)}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
