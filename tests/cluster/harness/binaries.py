"""Do: etcd, Kubernetes, Helm and CoreDNS as programs, built once from the Go modules that `tools/` pins.

The versions are those of the `go.mod` files and are stated nowhere else. The programs lie in the cache, in a folder named
after the digest of `tools/`, so that only a new machine or a new version builds (about ten minutes on two cores).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.cache import cache_folder, digest_of, making
from harness.errors import ClusterError, Unavailable

__all__ = ["build", "built"]

TOOLS = Path(__file__).parent / "tools"
OLDEST_GO = (1, 26)
LONGEST_BUILD_S = 3000


@dataclass(frozen=True, slots=True)
class Tool:
    """A folder of `tools/`, its programs and their packages, and for each module whose version a program tells, where it is kept."""

    folder: str
    programs: Mapping[str, str]
    stamps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet", "kube-proxy")
STAMPED = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
# Kubernetes, Helm and CoreDNS share a module: what they have in common is compiled once.
ALL = (
    Tool("pause", {"pause": "mammoth.test/pause"}),
    Tool("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}),
    Tool(
        "kubernetes",
        {
            **{name: f"k8s.io/kubernetes/cmd/{name}" for name in KUBERNETES},
            "helm": "helm.sh/helm/v3/cmd/helm",
            "coredns": "mammoth.test/kubernetes/coredns",
        },
        {
            "k8s.io/kubernetes": tuple(
                f"{package}.{variable}"
                for package in STAMPED
                for variable in ("gitVersion={version}", "gitMajor={major}", "gitMinor={minor}")
            ),
            "helm.sh/helm/v3": ("helm.sh/helm/v3/internal/version.version={version}",),
        },
    ),
)


def built() -> Path | None:
    """Return the folder with the programs, or None when they have not been built for these versions."""
    folder = cache_folder() / _name()
    return folder if folder.exists() else None


def build() -> Path:
    """Return the folder with the programs, building what is not there; print what each one took.

    Raises Unavailable without a Go that can, ClusterError when a build fails.
    """
    with making(_name()) as target:
        if target is not None:
            _build_all(_go(), target)
    return cache_folder() / _name()


def _name() -> str:
    sources = sorted(path for path in TOOLS.rglob("*") if path.is_file())
    return f"k8s-{digest_of(sources)}"


def _go() -> str:
    go = shutil.which("go")
    if go is None:
        raise Unavailable("no Go to build Kubernetes with, and MAMMOTH_TEST_KUBECONFIG names no cluster")
    text = subprocess.run([go, "version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"go(\d+)\.(\d+)", text)
    if found is None or tuple(map(int, found.groups())) < OLDEST_GO:
        raise Unavailable(f"Kubernetes needs Go {'.'.join(map(str, OLDEST_GO))} or newer, this is: {text.strip()}")
    return go


def _build_all(go: str, target: Path) -> None:
    for tool in ALL:
        start = time.monotonic()
        _build_one(go, tool, target)
        print(f"built {', '.join(tool.programs)} in {time.monotonic() - start:.0f} s", flush=True)


def _build_one(go: str, tool: Tool, target: Path) -> None:
    folder = TOOLS / tool.folder
    stamps = (
        f"-X {stamp.format(**_version(folder, module))}" for module, stamps in tool.stamps.items() for stamp in stamps
    )
    # Several at once keep every core busy while one is linked; alone a program gets the name that it has here.
    output = f"{target}/" if len(tool.programs) > 1 else target / next(iter(tool.programs))
    run = subprocess.run(
        [go, "build", "-trimpath", "-buildvcs=false", "-ldflags", " ".join(["-s -w", *stamps]), "-o", str(output),
         *tool.programs.values()],
        cwd=folder,
        env={**os.environ, "CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=LONGEST_BUILD_S,
        check=False,
    )  # fmt: skip
    if run.returncode:
        raise ClusterError(f"go build in {folder}: {run.stderr[-2000:]}")


def _version(folder: Path, module: str) -> dict[str, str]:
    """Return `version`, `major` and `minor` of a module that go.mod requires."""
    found = re.search(
        rf"^require {re.escape(module)} (v(\d+)\.(\d+)\.\S+)$", (folder / "go.mod").read_text(), re.MULTILINE
    )
    assert found is not None, f"{folder}/go.mod requires {module} on a line of its own"
    return dict(zip(("version", "major", "minor"), found.groups(), strict=True))
