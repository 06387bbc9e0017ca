"""Do: find a MammothDeployment through the user's kubeconfig, annotate it, and open a local door to its front pods.

Needs the `k8s` extra; the Kubernetes client is imported when it is first needed. Every failure is a MammothError.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mammoth_wire.errors import InvalidRequest, MammothError, NotFound, Unavailable

__all__ = ["Deployments", "parse_name"]

GROUP, VERSION, PLURAL = "mammoth.dev", "v1alpha1", "mammothdeployments"
GRPC_PORT = 50051
CHUNK_BYTES = 64 * 1024


def parse_name(text: str, default_namespace: str = "default") -> tuple[str, str]:
    """Return (namespace, name) of `NAMESPACE/NAME` or `NAME`. Raises InvalidRequest."""
    parts = text.split("/")
    if len(parts) > 2 or not all(parts):
        raise InvalidRequest([("deployment", f"{text!r} is not NAMESPACE/NAME")])
    return (parts[0], parts[1]) if len(parts) == 2 else (default_namespace, parts[0])


class Deployments:
    """MammothDeployments of the cluster that the kubeconfig's context names."""

    def __init__(self, context: str | None = None) -> None:
        """Raises InvalidRequest when the extra is not installed or no kubeconfig can be read."""
        try:
            import kubernetes.client
            import kubernetes.config
        except ImportError as err:
            raise InvalidRequest([("deployment", "needs the k8s extra: pip install 'mammoth-serve[k8s]'")]) from err
        try:
            kubernetes.config.load_kube_config(context=context)  # type: ignore[no-untyped-call]
        except (kubernetes.config.ConfigException, OSError) as err:
            raise InvalidRequest([("context", f"no usable kubeconfig: {err}")]) from err
        self._client = kubernetes.client
        self._objects = kubernetes.client.CustomObjectsApi()
        self._core = kubernetes.client.CoreV1Api()

    def get(self, namespace: str, name: str) -> Mapping[str, Any]:
        """Return a deployment. Raises NotFound."""
        with self._errors(f"{namespace}/{name}"):
            found: Any = self._objects.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)
        return dict(found)

    def annotate(self, namespace: str, name: str, annotations: Mapping[str, str | None]) -> None:
        """Set annotations; None takes one away."""
        with self._errors(f"{namespace}/{name}"):
            body = {"metadata": {"annotations": dict(annotations)}}
            self._objects.patch_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name, body)

    def config(self, namespace: str, name: str) -> Mapping[str, str]:
        """Return the data of a ConfigMap. Raises NotFound."""
        with self._errors(f"{namespace}/{name}"):
            found: Any = self._core.read_namespaced_config_map(name, namespace)
        return dict(found.data or {})

    @contextmanager
    def forwarded(self, namespace: str, name: str) -> Iterator[str]:
        """Forward a local port to a front pod of the serving revision, and yield `127.0.0.1:PORT`."""
        pod = self._front_pod(namespace, name)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=self._accept, args=(listener, namespace, pod), daemon=True).start()
            try:
                yield f"127.0.0.1:{listener.getsockname()[1]}"
            finally:
                listener.shutdown(socket.SHUT_RDWR)  # a close alone leaves the thread waiting, and the port open

    def _front_pod(self, namespace: str, name: str) -> str:
        self.get(namespace, name)
        with self._errors(f"{namespace}/{name}"):
            service: Any = self._core.read_namespaced_service(name, namespace)
            labels = ",".join(f"{key}={value}" for key, value in (service.spec.selector or {}).items())
            pods: Any = self._core.list_namespaced_pod(namespace, label_selector=labels)
        ready = [pod.metadata.name for pod in pods.items if _is_ready(pod)]
        if not ready:
            raise Unavailable(
                f"{namespace}/{name} has no ready pod: mammoth deploy status {name} -n {namespace}", retry_after_s=5.0
            )
        return str(ready[0])

    def _accept(self, listener: socket.socket, namespace: str, pod: str) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # the door was closed
            threading.Thread(target=self._bridge, args=(connection, namespace, pod), daemon=True).start()

    def _bridge(self, connection: socket.socket, namespace: str, pod: str) -> None:
        from kubernetes.stream import portforward

        api = self._client.CoreV1Api(
            self._client.ApiClient()
        )  # the stream changes its client, so it gets one of its own
        with connection:
            try:
                forward = portforward(api.connect_get_namespaced_pod_portforward, pod, namespace, ports=str(GRPC_PORT))
            except (self._client.ApiException, OSError):
                return  # the caller sees a closed connection
            remote = forward.socket(GRPC_PORT)
            remote.setblocking(True)
            back = threading.Thread(target=_copy, args=(remote, connection), daemon=True)
            back.start()
            _copy(connection, remote)
            back.join()
            forward.close()

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._client.ApiException as err:
            raise _typed(err.status, f"{what}: {err.reason}") from err
        except OSError as err:
            raise Unavailable(f"the API server cannot be reached: {err}", retry_after_s=5.0) from err


def _typed(status: int | None, text: str) -> MammothError:
    if status == 404:
        return NotFound(text)
    if status in (400, 401, 403, 422):
        return InvalidRequest([("deployment", text)])
    return Unavailable(text, retry_after_s=5.0)


def _is_ready(pod: Any) -> bool:
    conditions = pod.status.conditions or ()
    return pod.metadata.deletion_timestamp is None and any(c.type == "Ready" and c.status == "True" for c in conditions)


def _copy(source: Any, sink: Any) -> None:
    """Copy bytes until `source` ends, then tell `sink` so."""
    try:
        while data := source.recv(CHUNK_BYTES):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        return  # either side has gone
