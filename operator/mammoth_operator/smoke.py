"""Do: what `helm test` runs: one deployment on the CPU, one picture, and away with it. Exits with 0 when a PNG came out."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import uuid

import grpc.aio

from mammoth_operator.cluster import Cluster, connect
from mammoth_operator.names import API_VERSION, GRPC_PORT, KIND
from mammoth_wire.v1 import image_generation_pb2, image_generation_pb2_grpc

PNG = b"\x89PNG\r\n\x1a\n"
POLL_S = 2.0
LONGEST_DRAIN_S = 180.0  # the default drainSeconds of AR, its grace and some slack


def deployment(given: argparse.Namespace) -> dict[str, object]:
    """Return the object that is tried."""
    one_thread = {"env": [{"name": "OMP_NUM_THREADS", "value": "1"}]}
    cpu = {
        "replicas": 1, "accelerator": {"count": 0}, "resources": {"shmSize": "64Mi"}, "capacity": {"maxNumSeqs": 2},
        "podOverrides": one_thread,
    }  # fmt: skip
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": given.name, "namespace": given.namespace},
        "spec": {
            "model": {"source": {"path": given.checkpoint}},
            "ar": {"image": given.ar_image, **cpu},
            "dit": {"image": given.dit_image, **cpu},
        },
    }


async def smoke(given: argparse.Namespace) -> int:
    """Try it; return the exit code. The deployment is deleted in any case."""
    cluster = Cluster(connect(), fence=lambda: None)
    made = await cluster.create(deployment(given))
    try:
        async with asyncio.timeout(given.timeout_seconds):
            await _ready(cluster, given)
            png = await _picture(f"{given.name}.{given.namespace}:{GRPC_PORT}")
    finally:
        await cluster.delete(KIND, given.namespace, given.name, uid=made["metadata"]["uid"])
        await _gone(cluster, given)
        cluster.close()
    print(f"{len(png)} bytes of PNG")
    return 0 if png.startswith(PNG) else 1


async def _ready(cluster: Cluster, given: argparse.Namespace) -> None:
    said, begin = "", time.monotonic()
    while True:
        found = await cluster.get(KIND, given.namespace, given.name)
        conditions = (found or {}).get("status", {}).get("conditions", ())
        ready = next((item for item in conditions if item["type"] == "Ready"), {"status": "", "reason": "", "message": "not seen yet"})  # fmt: skip
        if ready["status"] == "True":
            return
        if said != ready["message"]:
            said = ready["message"]
            print(f"{time.monotonic() - begin:.0f} s {ready['reason']}: {said}", flush=True)
        await asyncio.sleep(POLL_S)


async def _gone(cluster: Cluster, given: argparse.Namespace) -> None:
    """Wait while it drains: whoever uninstalls the operator next would leave it stuck. Raises TimeoutError."""
    async with asyncio.timeout(LONGEST_DRAIN_S):
        while True:
            if await cluster.get(KIND, given.namespace, given.name) is None:
                return
            await asyncio.sleep(POLL_S)


async def _picture(address: str) -> bytes:
    """Return the bytes of one picture of the smallest size, with few steps."""
    request = image_generation_pb2.GenerateRequest(request_id=str(uuid.uuid4()), prompt="a red apple", width=32, height=32, steps=2, seed=7)  # fmt: skip
    png = b""
    async with grpc.aio.insecure_channel(address) as channel:
        async for event in image_generation_pb2_grpc.ImageGenerationStub(channel).Generate(request, timeout=120, wait_for_ready=True):  # fmt: skip
            if event.HasField("image"):
                png += event.image.data
    return png


def main() -> int:
    """Read the flags and try it."""
    parser = argparse.ArgumentParser(prog="python -m mammoth_operator.smoke")
    for name in ("namespace", "name", "ar-image", "dit-image", "checkpoint"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--timeout-seconds", type=float, default=300.0)
    return asyncio.run(smoke(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
