"""Do: play the nodes: pods that the scheduler has placed start, get ready, serve a real Control service, drain and go.

Every pod gets a loopback address of its own. What becomes of a pod is the test's choice: see `Fate`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import grpc.aio
import urllib3
from playing.api import Api, Refused

from mammoth_serving.control import ControlService, LiveLimits
from mammoth_serving.lifecycle import Gate
from mammoth_serving.served import ServedLog
from mammoth_serving.telemetry import Metrics
from mammoth_wire.errors import ContractMismatch, Unavailable
from mammoth_wire.v1 import control_pb2, control_pb2_grpc, types_pb2

Raw = dict[str, Any]
CONTROL_PORT = 50052
POLL_S = 0.15


@dataclass(frozen=True, slots=True)
class Fate:
    """`end`: ready, loading (never ready), crash, oom, image, gpu. `start_s` until it is ready, `drain_s` until it is gone."""

    end: str = "ready"
    start_s: float = 0.2
    drain_s: float = 0.3


class Stage:
    """What a pod's Control service talks to: a stage that does no work, but says that it does `in_flight` of it."""

    def __init__(self, pod: Raw, others: Callable[[str], Stage | None]) -> None:
        labels = pod["metadata"]["labels"]
        flags = dict(flag.removeprefix("--").split("=", 1) for flag in pod["spec"]["containers"][0]["args"])
        self.stage, self.contract = labels["mammoth.dev/pool"], labels["mammoth.dev/contract"]
        self.revision = labels["mammoth.dev/revision"]
        self.capacity = int(flags["capacity"])
        self.limits = LiveLimits(self.capacity, 20.0 if self.stage == "dit" else None)
        self.in_flight, self.heard, self.mute = 0, [], False
        self.served = ServedLog()
        self.hardware, self.default_size = "", ""  # what it says to be measured by
        self.step_ms: Callable[[tuple[int, int], int], float] = lambda shape, batch_size: 1.0
        self._others = others

    def state(self) -> control_pb2.State:
        if self.mute:
            raise Unavailable("not answering")
        return control_pb2.State(
            stage=self.stage,
            model_digest="feed" * 16,
            contract=self.contract,
            in_flight=self.in_flight,
            environment=types_pb2.Environment(device=self.hardware, row_bucket=8),
            settings={"default_size": self.default_size} if self.default_size else {},
        )

    def apply_limits(self, limits: LiveLimits) -> None:
        self.limits = limits
        self.heard.append(limits)

    async def profile(self, shape: tuple[int, int], batch_size: int, steps: int) -> list[float]:
        return [self.step_ms(shape, batch_size)] * steps

    async def profile_rest(self, shape: tuple[int, int]) -> float:
        return 1.0

    async def check_transport(self, address: str) -> control_pb2.CheckTransportResponse:
        other = self._others(address.rpartition(":")[0])
        if other is None:
            raise Unavailable(f"nobody at {address}")
        if other.contract != self.contract:
            raise ContractMismatch("another model", ours=self.contract, theirs=other.contract)
        return control_pb2.CheckTransportResponse(equal=True, sha256="ab" * 32, total_bytes=1)


@dataclass(slots=True)
class Running:
    """A pod that has started."""

    ip: str
    stage: Stage
    gate: Gate
    server: grpc.aio.Server
    shown: str = ""
    leave_at: float = 0.0


@dataclass(slots=True)
class Kubelet:
    """Plays every node. `fates` decide by namespace what becomes of a pod; they are asked when it starts."""

    api: Api
    fates: dict[str, Callable[[Raw], Fate]] = field(default_factory=dict)
    poll_s: float = POLL_S
    serve_control: bool = True
    frozen: bool = False
    block: int = 0  # of loopback addresses: kubelets that play at the same time on one machine need one each
    running: dict[str, Running] = field(default_factory=dict)
    kills: dict[str, Raw] = field(default_factory=dict)
    _started: dict[str, tuple[float, Fate, str]] = field(default_factory=dict)
    _thread: threading.Thread | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _next: int = 0

    def __enter__(self) -> Kubelet:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(20)

    async def _run(self) -> None:
        while not self._stop.is_set():
            if not self.frozen:
                await self._round()
            await asyncio.sleep(self.poll_s)
        await asyncio.gather(*(run.server.stop(None) for run in self.running.values()))

    def of(self, pod: Raw) -> Stage:
        """Return what runs in a pod."""
        return self.running[pod["metadata"]["uid"]].stage

    def kill(self, pod: Raw) -> None:
        """Let the pod's container have been killed for its memory and be running again."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.kills[pod["metadata"]["uid"]] = {
            "exitCode": 137,
            "reason": "OOMKilled",
            "startedAt": now,
            "finishedAt": now,
        }

    async def _round(self) -> None:
        try:
            pods = await asyncio.to_thread(self.api.list, "Pod", selector="mammoth.dev/deployment")
            living = {pod["metadata"]["uid"] for pod in pods}
            for uid in [uid for uid in self.running if uid not in living]:
                await self.running.pop(uid).server.stop(None)
            for pod in pods:
                await self._tend(pod)
        except (Refused, urllib3.exceptions.HTTPError, OSError):
            return  # gone, changed meanwhile, or the API server is away: the next round sees

    async def _tend(self, pod: Raw) -> None:
        meta = pod["metadata"]
        uid = meta["uid"]
        if not pod["spec"].get("nodeName"):
            if meta.get("deletionTimestamp"):
                await asyncio.to_thread(self.api.delete, "Pod", meta["namespace"], meta["name"], grace_s=0)
            return
        if uid not in self._started:
            self._next += 1
            number = self._next
            ip = f"127.{7 + 16 * self.block + number // 65025}.{number // 255 % 255}.{number % 255 + 1}"
            self._started[uid] = (time.monotonic(), self.fates.get(meta["namespace"], lambda _: Fate())(pod), ip)
        since, fate, ip = self._started[uid]
        if meta.get("deletionTimestamp"):
            await self._leave(pod, fate)
        elif fate.end != "ready":
            await self._show(pod, fate.end, ip)
        elif time.monotonic() - since >= fate.start_s:
            await self._serve(pod, ip)
        else:
            await self._show(pod, "loading", ip)

    async def _serve(self, pod: Raw, ip: str) -> None:
        uid = pod["metadata"]["uid"]
        if uid not in self.running:
            gate = Gate()
            stage = Stage(pod, self._at)
            server = grpc.aio.server()
            if self.serve_control:
                control_pb2_grpc.add_ControlServicer_to_server(
                    ControlService(stage, gate, Metrics(stage.stage)), server
                )
                server.add_insecure_port(f"{ip}:{CONTROL_PORT}")
            await server.start()
            gate.open()
            self.running[uid] = Running(ip, stage, gate, server)
        await self._show(pod, "ready" if self.running[uid].gate.is_open else "draining", ip)

    async def _leave(self, pod: Raw, fate: Fate) -> None:
        meta = pod["metadata"]
        run = self.running.get(meta["uid"])
        if run is not None:
            run.gate.drain()
            run.leave_at = run.leave_at or time.monotonic() + fate.drain_s
            await self._show(pod, "draining", run.ip)
            if time.monotonic() < run.leave_at:
                return
        await asyncio.to_thread(self.api.delete, "Pod", meta["namespace"], meta["name"], grace_s=0)

    def _at(self, ip: str) -> Stage | None:
        return next((run.stage for run in self.running.values() if run.ip == ip), None)

    async def _show(self, pod: Raw, what: str, ip: str) -> None:
        status = status_of(pod, what, ip)
        if (kill := self.kills.get(pod["metadata"]["uid"])) is not None:
            status["containerStatuses"][0] |= {"restartCount": 1, "lastState": {"terminated": kill}}
        known = pod.get("status", {})
        ready = next((item["status"] for item in known.get("conditions", ()) if item["type"] == "Ready"), "")
        if (ready, known.get("phase"), known.get("containerStatuses")) != (
            status["conditions"][0]["status"], status["phase"], status["containerStatuses"],
        ):  # fmt: skip
            meta = pod["metadata"]
            await asyncio.to_thread(self.api.merge, "Pod", meta["namespace"], meta["name"], {"status": status}, sub="/status")  # fmt: skip


def status_of(pod: Raw, what: str, ip: str) -> Raw:
    """Return the status that kubelet would report."""
    container = pod["spec"]["containers"][0]
    ready = what == "ready"
    running = {"running": {"startedAt": pod["metadata"]["creationTimestamp"]}}
    waiting = {"crash": "CrashLoopBackOff", "oom": "CrashLoopBackOff", "image": "ImagePullBackOff"}.get(what)
    entry: Raw = {
        "name": container["name"], "image": container["image"], "imageID": "", "ready": ready, "restartCount": 0,
        "started": ready or what == "draining", "state": {"waiting": {"reason": waiting, "message": f"back-off, {what}"}} if waiting else running,
    }  # fmt: skip
    if what in ("crash", "oom"):
        ended = {
            "exitCode": 137 if what == "oom" else 2,
            "reason": "OOMKilled" if what == "oom" else "Error",
            "finishedAt": pod["metadata"]["creationTimestamp"],
        }
        entry |= {"restartCount": 3, "lastState": {"terminated": ended | {"startedAt": ended["finishedAt"]}}}
    failed = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no healthy nvidia.com/gpu"}
    return {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "startTime": pod["metadata"]["creationTimestamp"],
        "conditions": [
            {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")},
            {"type": "PodScheduled", "status": "True"},
        ],
        "containerStatuses": [entry],
    } | (failed | {"containerStatuses": []} if what == "gpu" else {})  # fmt: skip


def add_node(api: Api, name: str = "gpu-0", *, gpus: int = 64, taint: bool = False) -> None:
    """Add a node that is always ready."""
    body: Raw = {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}}
    if taint:
        body["spec"] = {"taints": [{"key": "team", "value": "others", "effect": "NoSchedule"}]}
    amounts = {"cpu": "512", "memory": "4Ti", "pods": "2000", "ephemeral-storage": "10Ti", "nvidia.com/gpu": str(gpus)}
    if api.get("Node", "", name) is None:
        api.create("Node", "", body)
    conditions = [{"type": "Ready", "status": "True", "reason": "Played", "lastHeartbeatTime": None}]
    api.merge("Node", "", name, {"status": {"capacity": amounts, "allocatable": amounts, "conditions": conditions}}, sub="/status")  # fmt: skip
    node = api.get("Node", "", name)
    assert node is not None
    keep = [item for item in node["spec"].get("taints", []) if not item["key"].startswith("node.kubernetes.io/")]
    api.merge("Node", "", name, {"spec": {"taints": keep or None}})
