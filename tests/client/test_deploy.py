"""`mammoth deploy` and `--deployment`: what they decide without a cluster, and what they say without the extra."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager

import pytest
from click.testing import CliRunner

from mammoth_client.__main__ import app
from mammoth_client.cli import deploy
from mammoth_client.cli.deploy import choose
from mammoth_client.kube import Deployments, _copy, parse_name
from mammoth_wire.errors import InvalidRequest, NotFound

STATUS = {
    "phase": "Ready",
    "endpoint": "demo.space.svc:50051",
    "targetRevision": "ccc",
    "ar": {"summary": "1/1", "inflight": 0, "queueDepth": 0},
    "dit": {"summary": "1/2", "inflight": 3, "queueDepth": 1, "blockedReason": "Unschedulable: capacity: 0/1 nodes"},
    "conditions": [{"type": "Ready", "status": "True", "reason": "Available", "message": "revision ccc serves"}],
    "revisions": [
        {"hash": "ccc", "outcome": "ready"},
        {"hash": "bbb", "outcome": "failed"},
        {"hash": "aaa", "outcome": "ready", "ditImage": "dit:1"},
    ],
}


class Cluster:
    """What `Deployments` is to the commands: one deployment, and the annotations that were set."""

    def __init__(self, status=STATUS):
        self.status, self.annotations = status, []

    def __call__(self, context=None):
        return self

    def get(self, namespace, name):
        if (namespace, name) != ("space", "demo"):
            raise NotFound(f"{namespace}/{name}: Not Found")
        return {"status": self.status}

    def annotate(self, namespace, name, annotations):
        self.annotations.append(annotations)

    @contextmanager
    def forwarded(self, namespace, name):
        yield f"{namespace}-{name}:1"


@pytest.fixture
def cluster(monkeypatch):
    made = Cluster()
    monkeypatch.setattr(deploy, "Deployments", made)
    return made


def run(*words):
    return CliRunner().invoke(app, words)


def test_status_shows_pools_conditions_and_revisions(cluster):
    done = run("deploy", "status", "demo", "-n", "space")
    assert done.exit_code == 0
    for said in ("Ready", "1/2", "capacity", "ccc *", "dit:1"):
        assert said in done.output


def test_status_as_json_is_the_status(cluster):
    assert json.loads(run("deploy", "status", "demo", "-n", "space", "--json").output) == STATUS


def test_a_deployment_that_is_not_ready_is_an_exit_code(cluster):
    cluster.status = {}
    assert run("deploy", "status", "demo", "-n", "space").exit_code == 3


def test_an_unknown_deployment_is_said_in_a_line(cluster):
    done = run("deploy", "status", "other", "-n", "space")
    assert done.exit_code == 5
    assert "space/other: Not Found" in done.output


def test_rollback_pins_the_last_ready_revision(cluster):
    assert "returns to aaa" in run("deploy", "rollback", "demo", "-n", "space").output
    assert cluster.annotations == [{"mammoth.dev/revision": "aaa"}]


def test_rollback_is_undone(cluster):
    run("deploy", "rollback", "demo", "-n", "space", "--undo")
    assert cluster.annotations == [{"mammoth.dev/revision": None}]


def test_drain_and_its_undoing(cluster):
    run("deploy", "drain", "demo", "-n", "space")
    run("deploy", "drain", "demo", "-n", "space", "--undo")
    assert cluster.annotations == [{"mammoth.dev/drain": "true"}, {"mammoth.dev/drain": None}]


@pytest.mark.parametrize(
    ("status", "asked", "chosen"),
    [(STATUS, None, "aaa"), (STATUS, "bbb", "bbb"), ({**STATUS, "targetRevision": "aaa"}, None, "ccc")],
)
def test_which_revision_is_returned_to(status, asked, chosen):
    assert choose(status, asked) == chosen


@pytest.mark.parametrize(("status", "asked", "said"), [(STATUS, "zzz", "ccc, bbb, aaa"), ({}, None, "no earlier")])
def test_a_revision_that_is_not_there_is_refused(status, asked, said):
    with pytest.raises(InvalidRequest, match=said):
        choose(status, asked)


def test_generate_reaches_a_deployment(cluster):
    with deploy.reached("here:1", "space/demo") as address:
        assert address == "space-demo:1"
    with deploy.reached("here:1", None) as address:
        assert address == "here:1"


@pytest.mark.parametrize(("text", "name"), [("demo", ("default", "demo")), ("a/b", ("a", "b"))])
def test_a_deployment_is_named_with_or_without_namespace(text, name):
    assert parse_name(text) == name


@pytest.mark.parametrize("text", ["a/b/c", "/b", "a/", ""])
def test_other_names_are_refused(text):
    with pytest.raises(InvalidRequest, match="NAMESPACE/NAME"):
        parse_name(text)


def test_without_a_kubeconfig_it_is_said(monkeypatch, tmp_path):
    from kubernetes.config import kube_config

    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(InvalidRequest, match="no usable kubeconfig"):
        Deployments()


def test_bytes_are_copied_until_the_end():
    near, source = socket.socketpair()
    sink, far = socket.socketpair()
    with near, source, sink, far:
        copying = threading.Thread(target=_copy, args=(source, sink))
        copying.start()
        near.sendall(b"rows")
        near.shutdown(socket.SHUT_WR)
        assert far.recv(16) == b"rows"
        assert far.recv(16) == b""
        copying.join()
