"""Do: put the DiT stage together: checkpoint, engine on its device worker, batcher, services, live limits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import grpc.aio
import torch

from mammoth_dit.admission import Limits
from mammoth_dit.batching import Batcher
from mammoth_dit.engine import Engine
from mammoth_dit.engines import open_engine
from mammoth_dit.model.weights import load
from mammoth_dit.service import DiffusionService, Loaded
from mammoth_dit.settings import DitSettings, parse_sizes
from mammoth_dit.step_batching import StepBatcher
from mammoth_dit.stepper import Stepper
from mammoth_policy.waves import Policy
from mammoth_serving.checkpoint import Checkpoint
from mammoth_serving.control import ControlService, LiveLimits, rest_ms
from mammoth_serving.device import DeviceWorker, check_device
from mammoth_serving.environment import describe
from mammoth_serving.lifecycle import Gate
from mammoth_serving.served import ServedLog
from mammoth_serving.telemetry import Metrics
from mammoth_wire.errors import InvalidRequest
from mammoth_wire.params import resolve_generation
from mammoth_wire.tensors import contract
from mammoth_wire.v1 import control_pb2, control_pb2_grpc, diffusion_pb2_grpc

__all__ = ["DitStage"]

WIDEST_ITEM_BYTES = 4

logger = logging.getLogger(__name__)


class DitStage:
    """The DiT stage as `serve` and the Control service see it. `engine` and `batcher` exist once it has started."""

    max_request_bytes = 4 * 2**20  # a chunk of rows is at most 2 MiB
    engine: Engine
    batcher: Batcher

    def __init__(self, settings: DitSettings, gate: Gate) -> None:
        """Raises ConfigError when a setting does not fit this machine."""
        check_device(settings.device, torch.cuda.device_count() if torch.cuda.is_available() else 0)
        self.metrics = Metrics("dit")
        self.capacity = settings.capacity
        self.served = ServedLog()  # stays empty: the AR stage knows all of a picture's times
        self._default_size = (0, 0)
        cap = min(settings.max_num_seqs or settings.capacity, settings.capacity)
        self.limits = LiveLimits(cap, settings.request_batch_max_wait_ms)
        self._settings, self._gate = settings, gate
        self._worker = DeviceWorker("device")
        self._service = DiffusionService(gate, self.metrics, max_queue=settings.max_queue)

    async def start(self) -> None:
        """Load the checkpoint and draw a picture of every warm size."""
        checkpoint = await asyncio.to_thread(Checkpoint.open, self._settings.model)
        default = resolve_generation({"prompt": "x"}, defaults=checkpoint.defaults())
        self._default_size = (default.diffusion.height, default.diffusion.width)
        sizes = parse_sizes(self._settings.warm_sizes) or [self._default_size]
        self.engine = engine = await self._worker.run(self._load, checkpoint)
        await self._worker.run(engine.warm_up, sizes)
        logger.info("warm", extra={"sizes": sizes, "device": str(engine.device), "dtype": str(engine.dtype)})
        policy = Policy(self.limits.max_num_seqs, _seconds(self.limits))
        self.batcher = self._batcher(engine, policy)
        self._service.loaded = Loaded(
            batcher=self.batcher,
            limits=_limits(engine, self._settings.max_rows),
            contract=contract(engine.config.llm_width, checkpoint.digest),
            model_digest=checkpoint.digest,
            environment=describe(
                "dit",
                device=_device_name(engine.device),
                dtype=str(engine.dtype).removeprefix("torch."),
                kernels=engine.kernels,
                row_bucket=1 if engine.exactness == "strict" else self.capacity,
                packages=("torch", "diffusers", *engine.packages),
            ),
        )

    async def run(self) -> None:
        """Serve the queue; whatever the engine raises ends the process."""
        await self.batcher.run()

    def register(self, public: grpc.aio.Server, control: grpc.aio.Server) -> list[str]:
        diffusion_pb2_grpc.add_DiffusionServicer_to_server(self._service, public)
        control_pb2_grpc.add_ControlServicer_to_server(ControlService(self, self._gate, self.metrics), control)
        return ["mammoth.v1.Diffusion"]

    def stalled_s(self) -> float:
        """Time since the last step while a job with complete rows waits or runs."""
        snapshot = self.batcher.snapshot()
        self.metrics.queue_depth.set(snapshot.queue_depth)
        known = list(self.engine.exact_units.values())
        self.metrics.units("true").set(known.count(True))
        self.metrics.units("false").set(known.count(False))
        return snapshot.idle_s if snapshot.queue_depth + snapshot.in_flight else 0.0

    async def close(self) -> None:
        await asyncio.to_thread(self._worker.close)

    def state(self) -> control_pb2.State:
        settings = {"batching": self._settings.batching, "precision": self._settings.precision}
        state = control_pb2.State(stage="dit", exactness=self._settings.exactness, settings=settings)
        if (loaded := self._service.loaded) is None:
            return state
        snapshot = loaded.batcher.snapshot()
        state.model_digest, state.contract = loaded.model_digest, loaded.contract
        state.environment.CopyFrom(loaded.environment)
        for name, value in self.engine.facts().items():
            state.settings[name] = value
        state.settings["default_size"] = f"{self._default_size[0]}x{self._default_size[1]}"
        state.queue_depth = snapshot.queue_depth + self._service.num_expected
        state.in_flight, state.idle_s, state.units_per_s = snapshot.in_flight, snapshot.idle_s, snapshot.pictures_per_s
        return state

    def apply_limits(self, limits: LiveLimits) -> None:
        self.limits = limits
        if self._service.loaded is not None:
            self.batcher.set_limits(max_num_seqs=limits.max_num_seqs, max_wait_s=_seconds(limits))

    async def profile(self, shape: tuple[int, int], batch_size: int, steps: int) -> Sequence[float]:
        """Measure guided steps of `batch_size` synthetic pictures, one device call a step, so that waves run in between."""
        resolve_generation({"prompt": "x", "height": shape[0], "width": shape[1]})
        return [
            step_ms
            for _ in range(steps)
            for step_ms in await self._worker.run(self.engine.measure, shape[0], shape[1], batch_size, 1)
        ]

    async def profile_rest(self, shape: tuple[int, int]) -> float:
        """Draw synthetic pictures of one step, and take the step off; the median of a few, after an untimed one."""
        await self._worker.run(self.engine.draw_synthetic, *shape)

        async def read() -> float:
            began_s = time.perf_counter()
            await self._worker.run(self.engine.draw_synthetic, *shape)
            drawn_ms = 1e3 * (time.perf_counter() - began_s)
            [step_ms] = await self._worker.run(self.engine.measure, shape[0], shape[1], 1, 1)
            return drawn_ms - step_ms

        return await rest_ms(read)

    async def check_transport(self, address: str) -> control_pb2.CheckTransportResponse:
        raise InvalidRequest([("address", "only the AR stage sends rows; ask one of its pods")])

    def _load(self, checkpoint: Checkpoint) -> Engine:
        dtype: torch.dtype = getattr(torch, self._settings.dtype_name)
        engine = open_engine(
            load(checkpoint, dtype=dtype, device=self._settings.device),
            kernels=self._settings.kernels,
            exactness=self._settings.exactness,
            precision=self._settings.precision,
            step_cache=self._settings.step_cache,
        )
        engine.release()  # what the engine has laid out anew, as it was loaded
        return engine

    def _batcher(self, engine: Engine, policy: Policy) -> Batcher:
        if self._settings.batching == "request":
            return Batcher(engine, self._worker.run, policy, max_queue=self._settings.max_queue)
        return StepBatcher(Stepper(engine), self._worker.run, policy, max_queue=self._settings.max_queue)


def _limits(engine: Engine, max_rows: int) -> Limits:
    row_bytes = engine.config.llm_width * WIDEST_ITEM_BYTES
    return Limits.of(engine.config, max_rows=max_rows, max_payload_bytes=max_rows * row_bytes, memory=engine.memory())


def _seconds(limits: LiveLimits) -> float:
    return (limits.wait_ms or 0.0) / 1000


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
