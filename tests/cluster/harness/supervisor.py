"""Do: hold one cluster: start it, say so, forward its API to the machine, obey a few words on stdin, and take it down at EOF.

It says `ready`, or `failed: …` and ends. Then `restart NAME`, `stop NAME` and `start NAME` act on a program and are answered
`ok`. When the other end of stdin closes, or a program ends unasked, everything ends. For a node it is the first process
of its namespaces, so that nothing can outlive it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from pathlib import Path

from harness.certificates import Authority
from harness.errors import ClusterError
from harness.isolation import NODE_ADDRESS, enter
from harness.node import start_node
from harness.plane import Endpoints, start_plane
from harness.processes import Processes

__all__ = ["KUBECONFIG", "supervise"]

CHUNK_BYTES = 1 << 16
KUBECONFIG = "kubeconfig"


def supervise(tier: str, *, tools: Path, work: Path, listener_fd: int | None, group: str) -> int:
    """Run a `plane` or `node` cluster in `work` until told to stop; return the exit status.

    A node's API is reached through `listener_fd`, a socket that listens on the machine and was made there.
    """
    processes = Processes(work / "logs")
    try:
        _start(processes, tier, tools=tools, work=work, listener_fd=listener_fd, group=group)
    except ClusterError as err:
        _say(f"failed: {err}")
        return 1
    finally:
        processes.stop_all()
    return 0


def _start(processes: Processes, tier: str, *, tools: Path, work: Path, listener_fd: int | None, group: str) -> None:
    if tier == "node":
        enter(work)
    authority = Authority(work / "certs")
    at = Endpoints.free(NODE_ADDRESS)
    admin = start_plane(processes, authority, tools=tools, work=work, at=at, real_nodes=tier == "node")
    if tier == "node":
        start_node(processes, authority, tools=tools, work=work, at=at, admin=admin, group=group)
    listener = None if listener_fd is None else socket.socket(fileno=listener_fd)
    port = at.api if listener is None else listener.getsockname()[1]
    authority.kubeconfig(work / KUBECONFIG, user="admin", server=f"https://127.0.0.1:{port}")
    asyncio.run(_serve(processes, listener, at.api))


async def _serve(processes: Processes, listener: socket.socket | None, api_port: int) -> None:
    """Forward and obey until stdin closes. Raises ClusterError when a program ends."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    loop.add_signal_handler(signal.SIGCHLD, _reap, processes, over)
    loop.add_signal_handler(signal.SIGTERM, _settle, over)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _relay(reader, writer, api_port)

    server = None if listener is None else await asyncio.start_server(relay, sock=listener)
    words = asyncio.create_task(_obey(processes, over))
    _say("ready")
    try:
        await over
    finally:
        words.cancel()
        if server is not None:
            server.close()


def _settle(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)


def _reap(processes: Processes, over: asyncio.Future[None]) -> None:
    try:
        processes.reap()
    except ClusterError as err:
        if not over.done():
            over.set_exception(err)


async def _obey(processes: Processes, over: asyncio.Future[None]) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode().split():
        match line:
            case ["restart", name]:
                processes.restart(name)
            case ["stop", name]:
                processes.stop(name)
            case ["start", name]:
                processes.resume(name)
        _say("ok")
    _settle(over)


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Join a connection from the machine to the API server; either side's end ends both."""
    try:
        there, back = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        writer.close()
        return
    async with asyncio.TaskGroup() as both:
        both.create_task(_pump(reader, back))
        both.create_task(_pump(there, writer))


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(CHUNK_BYTES):
            target.write(data)
            await target.drain()
    except ConnectionError:
        pass
    finally:
        target.close()


def _say(text: str) -> None:
    print(text, flush=True)
