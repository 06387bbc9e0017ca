"""A real Kubernetes for the tests: `plane` is a control plane alone, `node` has a node with real pods. Both are kubeconfigs.

Tests that ask for either are marked `cluster` (and `node`), and left out unless `-m` names a mark: `pytest -m cluster`. They
use the cluster that MAMMOTH_TEST_KUBECONFIG names, or one of their own, which one session starts once. Where neither can be,
they are skipped with the reason, or fail when MAMMOTH_TEST_CLUSTER=required.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from harness.cluster import Cluster, Tier
from harness.errors import Unavailable
from harness.images import Images, load_images
from harness.kubectl import Kubectl

MARKS = {"cluster": "needs a real Kubernetes API server", "node": "needs a real node, with pods"}
TIMEOUT_S = 1200


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning} (tests/cluster)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = any(name in config.option.markexpr for name in MARKS)
    for item in [item for item in items if Path(__file__).parent in item.path.parents]:
        fixtures = getattr(item, "fixturenames", ())
        if "node_cluster" in fixtures:
            item.add_marker(pytest.mark.node)
        if item.get_closest_marker("node"):
            item.add_marker(pytest.mark.xdist_group("node"))  # one node a machine, however many workers there are
        if "plane_cluster" in fixtures or item.get_closest_marker("node"):
            item.add_marker(pytest.mark.cluster)
        if item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            if not asked:
                items.remove(item)
                config.hook.pytest_deselected(items=[item])


@contextmanager
def or_skip() -> Iterator[None]:
    """Turn what this machine cannot do into a skip, or into a failure where a cluster is required."""
    try:
        yield
    except Unavailable as err:
        if os.environ.get("MAMMOTH_TEST_CLUSTER") == "required":
            raise
        pytest.skip(str(err))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with or_skip():
        yield


def obtained(tier: Tier) -> Iterator[Cluster]:
    with or_skip():
        cluster = Cluster.obtain(tier)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="session")
def plane_cluster() -> Iterator[Cluster]:
    """An API server with its controllers and scheduler; the test plays the nodes."""
    yield from obtained("plane")


@pytest.fixture(scope="session")
def node_cluster() -> Iterator[Cluster]:
    """A cluster with one node that runs pods and counts four GPUs."""
    yield from obtained("node")


@pytest.fixture(scope="session")
def plane(plane_cluster: Cluster) -> Path:
    return plane_cluster.kubeconfig


@pytest.fixture(scope="session")
def node(node_cluster: Cluster) -> Path:
    return node_cluster.kubeconfig


@pytest.fixture(scope="session")
def images(node_cluster: Cluster) -> Images:
    """References of the project's images, which the node has."""
    with or_skip():
        return load_images(node_cluster)


@pytest.fixture(scope="session")
def plane_kubectl(plane_cluster: Cluster) -> Kubectl:
    return Kubectl(plane_cluster.kubectl, plane_cluster.kubeconfig)


@pytest.fixture(scope="session")
def node_kubectl(node_cluster: Cluster) -> Kubectl:
    return Kubectl(node_cluster.kubectl, node_cluster.kubeconfig)
