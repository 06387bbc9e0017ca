"""Both stages inside the test's own event loop, behind real loopback gRPC, with the tiny random checkpoint."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: kernels run on the CPU, as Python

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from mammoth_ar import tiny as ar_tiny
from mammoth_ar.settings import ArSettings
from mammoth_ar.stage import ArStage
from mammoth_dit import tiny as dit_tiny
from mammoth_dit.settings import DitSettings
from mammoth_dit.stage import DitStage
from mammoth_serving.lifecycle import Gate


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Toy tensors gain nothing from threads, and on a busy machine threads that wait for each other cost minutes."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Both families of the whole tiny checkpoint."""
    folders = {}
    for family in ("preview", "dev"):
        folder = folders[family] = tmp_path_factory.mktemp(f"tiny-{family}")
        ar_tiny.write_files(folder, family)
        ar_tiny.write(folder)
        dit_tiny.write(folder)
    return folders


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_checkpoints) -> Path:
    return tiny_checkpoints["preview"]


class Running:
    """A started stage, its gate, and channels to its public and Control ports."""

    def __init__(self, stage: Any, gate: Gate, port: int, control_port: int) -> None:
        self.stage, self.gate = stage, gate
        self.address = f"127.0.0.1:{port}"
        self.channel = grpc.aio.insecure_channel(self.address)
        self.control = grpc.aio.insecure_channel(f"127.0.0.1:{control_port}")


@asynccontextmanager
async def running(stage: Any, gate: Gate) -> AsyncIterator[Running]:
    """Serve `stage` without signals, health and probes, which tests/serving covers."""
    public, control = grpc.aio.server(), grpc.aio.server()
    stage.register(public, control)
    port, control_port = (server.add_insecure_port("127.0.0.1:0") for server in (public, control))
    await stage.start()
    await asyncio.gather(public.start(), control.start())
    work = asyncio.create_task(stage.run())
    gate.open()
    served = Running(stage, gate, port, control_port)
    try:
        yield served
    finally:
        await asyncio.gather(served.channel.close(), served.control.close())
        await asyncio.gather(public.stop(None), control.stop(None))
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await stage.close()


@pytest.fixture
def serve_dit(tiny_checkpoint):
    """Return an async context manager that serves a DiT stage with the given settings."""

    def serve(**settings: Any):
        gate = Gate()
        return running(
            DitStage(DitSettings(**{"model": str(tiny_checkpoint), "warm_sizes": "32x32", **settings}), gate), gate
        )

    return serve


@pytest.fixture
def serve_ar(tiny_checkpoint):
    """Return an async context manager that serves an AR stage in front of `dit` (addresses, comma-separated)."""

    def serve(dit: str, **settings: Any):
        gate = Gate()
        values = {"model": str(tiny_checkpoint), "dit_target": dit, "max_context": 256, "capacity": 4, **settings}
        return running(ArStage(ArSettings(**values), gate), gate)

    return serve


@pytest.fixture
async def dit(serve_dit):
    async with serve_dit() as served:
        yield served


@pytest.fixture
async def ar(serve_ar, dit):
    async with serve_ar(dit.address) as served:
        yield served
