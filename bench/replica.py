"""Do: serve a DiT replica without a model, for rows of any width: the real service, intake, limits and server, no weights.

It answers probes (rows and digest are checked, nothing is drawn). Started as a child: `python -m bench.replica --width 3584
--contract TEXT --port 0 ... --ports-file FILE`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import grpc.aio

from mammoth_dit.admission import Limits
from mammoth_dit.batching import Batcher
from mammoth_dit.model.config import ModelConfig
from mammoth_dit.service import DiffusionService, Loaded
from mammoth_dit.testing import SimulatedDevice
from mammoth_serving.command import run_stage
from mammoth_serving.config import ServingSettings, setting
from mammoth_serving.lifecycle import Gate
from mammoth_serving.telemetry import Metrics
from mammoth_serving.tiny import tiny_config
from mammoth_wire.v1 import diffusion_pb2_grpc, types_pb2


@dataclass(frozen=True, slots=True)
class ReplicaSettings(ServingSettings):
    """bench.replica: a DiT replica that draws nothing."""

    model: str = setting("nothing is loaded", default="")
    width: int = setting("elements of a row", default=3584, low=1, high=65_536)
    contract: str = setting("what the rows follow", default="")
    max_rows: int = setting("most conditioning rows of a picture", default=16_384, low=1, high=262_144)


class Replica:
    """A stage as `serve` sees it."""

    max_request_bytes = 4 * 2**20

    def __init__(self, settings: ReplicaSettings, gate: Gate) -> None:
        self.metrics = Metrics("dit")
        self._settings = settings
        self._service = DiffusionService(gate, self.metrics, max_queue=settings.max_queue)

    async def start(self) -> None:
        device = SimulatedDevice(step_s=0.0)
        self._batcher = Batcher(device, device.run)
        self._service.loaded = Loaded(
            batcher=self._batcher,
            limits=_limits(self._settings.width, self._settings.max_rows),
            contract=self._settings.contract,
            model_digest="",
            environment=types_pb2.Environment(stage="dit"),
        )

    async def run(self) -> None:
        await self._batcher.run()

    def register(self, public: grpc.aio.Server, control: grpc.aio.Server) -> list[str]:
        diffusion_pb2_grpc.add_DiffusionServicer_to_server(self._service, public)
        return ["mammoth.v1.Diffusion"]

    def stalled_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        """Nothing was taken."""


def _limits(width: int, max_rows: int) -> Limits:
    """Return the limits of the tiny model, but for rows of `width`."""
    config = tiny_config("preview")
    config["llm_config"]["hidden_size"] = width
    return Limits.of(ModelConfig.parse(config), max_rows=max_rows)


if __name__ == "__main__":
    sys.exit(run_stage("bench-replica", ReplicaSettings, sys.argv[1:], Replica))
