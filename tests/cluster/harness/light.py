"""Do: the light images: the project's own wheel and entry points on packages copied from the environment that runs the tests.

They run the code that the real images run, in the way that their Dockerfiles say, without an hour of downloads. What they lack
is what only a GPU uses. An extra that forgets a dependency shows, since nothing is copied that the extras do not ask for.
"""

from __future__ import annotations

import fnmatch
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import Distribution, EntryPoint, PathDistribution, distribution
from pathlib import Path

from harness.base import PYTHON, base_layer
from harness.cache import cache_folder, digest_of, making
from harness.dockerfile import run_config
from harness.errors import ClusterError, Unavailable
from harness.oci import Image, Layer, LayerWriter, writing
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["DOCKERFILES", "closure", "light_images", "package_layers"]

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILES = {
    "ar": ROOT / "services/ar_stage/Dockerfile",
    "dit": ROOT / "services/dit_stage/Dockerfile",
    "operator": ROOT / "operator/Dockerfile",
}
SITE = f"usr/local/lib/python{PYTHON}/dist-packages"
GPU_ONLY = (
    "triton/*", "torch/include/*", "*.a", "*.h", "*.hpp", "*.cuh", "*.bc", "*.ltoir", "nvidia/*/include/*",
    "nvidia/cudnn/lib/libcudnn_*", "nvidia/*/libcusolverMg*", "nvidia/*/libnvrtc.alt*", "nvidia/*/libnvperf*",
    "nvidia/*/bin/*", "nvidia/nvshmem/lib/*transport*", "nvidia/nvshmem/lib/*bootstrap*",
)  # fmt: skip
HEAVY = "torch"


def light_images(names: Mapping[str, Sequence[str]], scratch: Path) -> list[Image]:
    """Return an image for each of `names` (stage or operator: its image names). The project's own layers go to `scratch`."""
    wheel = _wheel(scratch)
    project = PathDistribution(zipfile.Path(wheel, f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/"))
    commands = list(project.entry_points.select(group="console_scripts"))
    return [
        Image(
            references,
            [*package_layers(name, project), _project_layer(name, wheel, commands, scratch)],
            run_config(DOCKERFILES[name].read_text()),
        )
        for name, references in names.items()
    ]


def package_layers(name: str, project: Distribution) -> list[Layer]:
    """Return the layers below the project's own: the base, torch and what it needs, what else the extra `name` asks for.

    Raises Unavailable when this Python's compiled packages cannot run on the image's.
    """
    if f"{sys.version_info.major}.{sys.version_info.minor}" != PYTHON:
        raise Unavailable(f"light images are copied from a Python {PYTHON}, this is {sys.version.split()[0]}")
    packages = closure(project, {name})
    heavy = closure(distribution(HEAVY), set()) | {HEAVY} if HEAVY in packages else set()
    return [Layer.of(base_layer()), *(_packages_layer(group) for group in (heavy, packages - heavy) if group)]


def closure(start: Distribution, extras: set[str]) -> set[str]:
    """Return the names of all installed distributions that `start` with `extras` asks for, itself left out.

    Raises ClusterError, through importlib.metadata's PackageNotFoundError, never silently: what is asked for must be there.
    """
    todo, found = [(start, extra) for extra in ("", *extras)], set[tuple[str, str]]()
    names: set[str] = set()
    while todo:
        asking, extra = todo.pop()
        for text in asking.requires or ():
            wanted = Requirement(text)
            name = canonicalize_name(wanted.name)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
                continue
            target = start if name == canonicalize_name(start.name) else distribution(name)
            names |= {name} - {canonicalize_name(start.name)}
            fresh = {(name, more) for more in ("", *wanted.extras)} - found
            found |= fresh
            todo += [(target, more) for _, more in fresh]
    return names


def _packages_layer(names: set[str]) -> Layer:
    """Return the cached layer with these distributions as they are installed here."""
    group = [distribution(name) for name in sorted(names)]
    stem = "light-torch" if HEAVY in names else f"light-{digest_of(sorted(names))}"
    key = f"{stem}-{digest_of([*(f'{one.name}=={one.version}' for one in group), *GPU_ONLY])}"
    with making(key) as folder:
        if folder is not None:
            with writing(folder / "layer.tar") as layer:
                for one in group:
                    _copy(one, layer)
    return Layer.of(cache_folder() / key / "layer.tar")


def _copy(package: Distribution, layer: LayerWriter) -> None:
    for file in package.files or ():
        name = str(file)
        if name.startswith("..") or any(fnmatch.fnmatch(name, pattern) for pattern in GPU_ONLY):
            continue
        if (source := Path(str(package.locate_file(file)))).exists():
            layer.file(source, f"{SITE}/{name}")


def _project_layer(name: str, wheel: Path, scripts: Iterable[EntryPoint], scratch: Path) -> Layer:
    """Return the layer with the wheel, its commands, and, for a stage, the checkpoints that ship."""
    path = scratch / f"{name}.tar"
    with writing(path) as layer, zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            layer.text(archive.read(member), f"{SITE}/{member.filename}")
        for script in scripts:
            module, _, function = script.value.partition(":")
            text = f"#!/usr/bin/python3\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
            layer.text(text.encode(), f"usr/local/bin/{script.name}", mode=0o755)
        if "COPY checkpoints " in DOCKERFILES[name].read_text():
            layer.tree(ROOT / "checkpoints", "opt/mammoth/checkpoints")
    return Layer.of(path)


def _wheel(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(scratch), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"pip wheel: {done.stderr[-1000:]}")
    return next(scratch.glob("*.whl"))
