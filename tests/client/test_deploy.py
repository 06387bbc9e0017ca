"""`mammoth deploy` and `--deployment` over HTTP to an API server that knows one deployment; tests/cluster/node has a real one."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from click.testing import CliRunner
from kubernetes.config import kube_config

from mammoth_client.__main__ import app
from mammoth_client.cli.deploy import choose, reached
from mammoth_client.kube import Deployments, _copy, parse_name
from mammoth_wire.errors import InvalidRequest, Unavailable

MMD = "/apis/mammoth.dev/v1alpha1/namespaces/space/mammothdeployments"

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
    """What an API server says of one deployment, over HTTP: reads it, merges patches, lists Services and Pods."""

    def __init__(self) -> None:
        self.object = {"metadata": {"name": "demo", "namespace": "space", "annotations": {}}, "status": STATUS}
        service = {"metadata": {"name": "demo"}, "spec": {"selector": {"mammoth.dev/pool": "ar"}}}
        self.found = {f"{MMD}/demo": self.object, "/api/v1/namespaces/space/services/demo": service}
        self.pods = []
        self.queries = []

    @property
    def annotations(self):
        return self.object["metadata"]["annotations"]

    def answer(self, method, path, body):
        """Return an HTTP status and an object."""
        at = urlsplit(path)
        if at.path == "/api/v1/namespaces/space/pods":
            self.queries.append(parse_qs(at.query))
            return 200, {"kind": "PodList", "apiVersion": "v1", "items": self.pods}
        if at.path not in self.found:
            return 404, {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
        if method == "PATCH":
            merge(self.found[at.path], body)
        return 200, self.found[at.path]


def merge(target, patch):
    """Apply a JSON merge patch (RFC 7386)."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """Serve a Cluster on a loopback port that the default kubeconfig names."""
    made = Cluster()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers.get("Content-Length", 0))
            status, answer = made.answer(self.command, self.path, json.loads(self.rfile.read(length) or b"{}"))
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PATCH = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        contexts = [{"name": "here", "context": {"cluster": "c", "user": "u"}}]
        clusters = [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}]
        config = {"current-context": "here", "contexts": contexts, "clusters": clusters, "users": [{"name": "u", "user": {}}]}  # fmt: skip
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(config))
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
        yield made
        server.shutdown()


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
    cluster.object["status"] = {}
    assert run("deploy", "status", "demo", "-n", "space").exit_code == 3


def test_an_unknown_deployment_is_said_in_a_line(cluster):
    done = run("deploy", "status", "other", "-n", "space")
    assert done.exit_code == 5
    assert "space/other: Not Found" in done.output


def test_rollback_pins_the_last_ready_revision(cluster):
    assert "returns to aaa" in run("deploy", "rollback", "demo", "-n", "space").output
    assert cluster.annotations == {"mammoth.dev/revision": "aaa"}
    assert "what its spec says" in run("deploy", "rollback", "demo", "-n", "space", "--undo").output
    assert cluster.annotations == {}


def test_drain_and_its_undoing(cluster):
    assert "finishes its work" in run("deploy", "drain", "demo", "-n", "space").output
    assert cluster.annotations == {"mammoth.dev/drain": "true"}
    assert "serves again" in run("deploy", "drain", "demo", "-n", "space", "--undo").output
    assert cluster.annotations == {}


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


def test_without_a_deployment_the_address_is_the_one_given():
    with reached("here:1", None) as address:
        assert address == "here:1"


def test_a_deployment_without_a_ready_front_pod_is_worth_another_try(cluster):
    leaving = {"name": "b", "deletionTimestamp": "2026-12-01T11:00:00Z"}
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    cluster.pods = [{"metadata": {"name": "a"}, "status": {}}, {"metadata": leaving, "status": ready}]
    with (
        pytest.raises(Unavailable, match="space/demo has no ready pod: mammoth deploy status demo -n space"),
        reached("here:1", "space/demo"),
    ):
        pass
    assert cluster.queries == [{"labelSelector": ["mammoth.dev/pool=ar"]}]


def test_a_deployment_with_a_ready_front_pod_has_a_door_here_until_the_end(cluster):
    cluster.pods = [{"metadata": {"name": "a"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}]
    with reached("here:1", "space/demo") as address:
        host, port = address.split(":")
        assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)


@pytest.mark.parametrize(("text", "name"), [("demo", ("default", "demo")), ("a/b", ("a", "b"))])
def test_a_deployment_is_named_with_or_without_namespace(text, name):
    assert parse_name(text) == name


@pytest.mark.parametrize("text", ["a/b/c", "/b", "a/", ""])
def test_other_names_are_refused(text):
    with pytest.raises(InvalidRequest, match="NAMESPACE/NAME"):
        parse_name(text)


def test_without_a_kubeconfig_it_is_said(monkeypatch, tmp_path):
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
