"""Translate: Python values to kubectl and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.processes import run

__all__ = ["Kubectl"]


class Kubectl:
    """kubectl of the right version with a kubeconfig. Every method raises ClusterError with what kubectl said when it fails."""

    def __init__(self, program: Path, kubeconfig: Path) -> None:
        self.command: list[str | Path] = [program, "--kubeconfig", kubeconfig]

    def __call__(self, *arguments: str, given: str | None = None) -> str:
        """Run `kubectl ARGUMENTS` with `given` on its stdin, and return what it printed."""
        return run([*self.command, *arguments], given=given).stdout

    def fails(self, *arguments: str, given: str | None = None) -> str:
        """Run what must fail, and return what kubectl said."""
        done = run([*self.command, *arguments], check=False, given=given)
        assert done.returncode, f"kubectl {' '.join(arguments)} succeeded: {done.stdout}"
        return done.stderr

    def get(self, *arguments: str) -> Any:
        return json.loads(self("get", *arguments, "-o", "json"))

    def apply(self, *objects: Mapping[str, Any]) -> str:
        content = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        return self("apply", "-f", "-", given=json.dumps(content))

    @contextmanager
    def namespace(self, name: str) -> Iterator[str]:
        """Make a namespace, and delete it with all in it at the end."""
        self("create", "namespace", name)
        try:
            yield name
        finally:
            self("delete", "namespace", name, "--wait=true", "--timeout=120s")
