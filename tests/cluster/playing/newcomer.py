"""Do: type what README tells a newcomer, word by word, into a shell that has the programs of the cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness.cluster import Cluster

__all__ = ["Failed", "Shell", "first_picture", "readme_commands"]

ROOT = Path(__file__).resolve().parents[3]
HEADING = "### On Kubernetes"
LONGEST_S = 900


class Failed(Exception):
    """A command ended with another status than 0: the text is the command and all that it said."""


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs command lines in `folder`, where `charts` is the checkout's, with kubectl, helm and mammoth on the path."""

    cluster: Cluster
    folder: Path

    def __post_init__(self) -> None:
        if not (self.folder / "charts").exists():
            (self.folder / "charts").symlink_to(ROOT / "charts")

    def __call__(self, line: str, *, given: str | None = None, within_s: float = LONGEST_S) -> str:
        """Return what `line` printed, errors included. Raises Failed."""
        programs = [self.cluster.kubectl.parent, self.cluster.helm.parent, Path(sys.executable).parent]
        path = os.pathsep.join([*map(str, programs), os.environ["PATH"]])
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], cwd=self.folder, input=given, text=True, timeout=within_s, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": path, "KUBECONFIG": str(self.cluster.kubeconfig)},
        )  # fmt: skip
        if done.returncode:
            raise Failed(f"$ {line}\n{done.stdout}")
        return done.stdout


def readme_commands() -> list[str]:
    """Return the commands under README's heading, in order."""
    block = (ROOT / "README.md").read_text().split(HEADING, 1)[1].split("```", 2)[1]
    return [line.split("  #")[0].strip() for line in block.splitlines() if line.strip()]


def first_picture(shell: Shell) -> tuple[Path, dict[str, float]]:
    """Type the commands; return the picture and what each one took, in seconds.

    The one that installs the command line tool is left out: it is the checkout's own, installed already.
    """
    took = {}
    for line in readme_commands():
        if line.startswith("pip install"):
            continue
        start = time.monotonic()
        shell(line)
        took[line] = time.monotonic() - start
    [picture] = shell.folder.glob("*.png")
    return picture, took
