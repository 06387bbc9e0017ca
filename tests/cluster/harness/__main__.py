"""Translate: `python -m harness VERB`, with PYTHONPATH=tests/cluster: what the tests' cluster needs, ahead of them, or one by hand."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness import binaries
from harness.cluster import Cluster
from harness.errors import ClusterError, Unavailable
from harness.machine import NODE_PROGRAMS, require
from harness.real import build_real
from harness.seed import seed
from harness.supervisor import supervise

EXIT_UNAVAILABLE = 3


def main() -> int:
    """Return 0, 1 when a cluster broke, 3 when this machine cannot carry one."""
    parser = argparse.ArgumentParser(prog="python -m harness", description="The Kubernetes that the tests run on.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("build", help="build its programs into the cache")
    images = verbs.add_parser("images", help="make the slow part of the images ahead of a node")
    images.add_argument("kind", choices=("light", "real"))
    for tier in ("plane", "node"):
        verbs.add_parser(tier, help=f"start a {tier} and hold it until a line is entered")
    inner = verbs.add_parser("supervise", help="what `plane` and `node` start")
    inner.add_argument("tier", choices=("plane", "node"))
    inner.add_argument("tools", type=Path)
    inner.add_argument("work", type=Path)
    inner.add_argument("listener", type=int, nargs="?")
    given = parser.parse_args()
    try:
        if given.verb == "supervise":
            return supervise(
                given.tier, tools=given.tools, work=given.work, listener_fd=given.listener, group=given.work.name
            )
        if given.verb == "build":
            print(binaries.build())
        elif given.verb == "images":
            _prepare(given.kind)
        else:
            _hold(given.verb)
    except Unavailable as err:
        print(f"not here: {err}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    except ClusterError as err:
        print(err, file=sys.stderr)
        return 1
    return 0


def _prepare(kind: str) -> None:
    require(NODE_PROGRAMS, root=True)
    if kind == "real":
        build_real()
    else:
        print(seed())


def _hold(tier: str) -> None:
    cluster = Cluster.obtain("node" if tier == "node" else "plane")
    try:
        print(f"export KUBECONFIG={cluster.kubeconfig} PATH={cluster.kubectl.parent}:$PATH", flush=True)
        sys.stdin.readline()
    except KeyboardInterrupt:
        pass
    finally:
        cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
