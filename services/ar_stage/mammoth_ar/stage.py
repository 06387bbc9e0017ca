"""Do: put the AR stage together: checkpoint, engine on its device worker, batcher, DiT replicas, services, live limits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import grpc.aio
import torch

from mammoth_ar.admission import RowLayout
from mammoth_ar.batching import Batcher
from mammoth_ar.conditioning import Scope
from mammoth_ar.engine import Engine
from mammoth_ar.engines import open_engine
from mammoth_ar.handover import Replicas
from mammoth_ar.model.config import LLMConfig
from mammoth_ar.model.weights import load
from mammoth_ar.production import Loaded
from mammoth_ar.profiling import measure
from mammoth_ar.prompt import PromptTemplate
from mammoth_ar.service import ImageGenerationService
from mammoth_ar.settings import ArSettings, parse_targets
from mammoth_ar.tokenizer import Tokenizer
from mammoth_ar.transport import check_transport
from mammoth_serving.checkpoint import Checkpoint
from mammoth_serving.control import ControlService, LiveLimits, rest_ms
from mammoth_serving.device import DeviceWorker, check_device
from mammoth_serving.environment import describe
from mammoth_serving.lifecycle import Gate
from mammoth_serving.served import ServedLog
from mammoth_serving.telemetry import Metrics
from mammoth_wire.errors import InvalidRequest
from mammoth_wire.params import Bounds
from mammoth_wire.tensors import CHUNK_ROWS, DTYPES, contract
from mammoth_wire.v1 import control_pb2, control_pb2_grpc, image_generation_pb2_grpc

__all__ = ["ArStage"]

logger = logging.getLogger(__name__)


class ArStage:
    """The AR stage as `serve` and the Control service see it. `engine` and `batcher` exist once it has started."""

    max_request_bytes = 64 * 2**10  # two prompts of 8 KiB and labels are far less
    engine: Engine
    batcher: Batcher

    def __init__(self, settings: ArSettings, gate: Gate) -> None:
        """Raises ConfigError when a setting does not fit this machine or names no DiT replica."""
        check_device(settings.device, torch.cuda.device_count() if torch.cuda.is_available() else 0)
        self.metrics = Metrics("ar")
        self.capacity = settings.capacity
        self.served = ServedLog()
        self.limits = LiveLimits(min(settings.max_num_seqs or settings.capacity, settings.capacity))
        self._settings, self._gate = settings, gate
        self._targets = parse_targets(settings.dit_target)
        self._worker = DeviceWorker("device")
        self._service = ImageGenerationService(gate, self.metrics, max_queue=settings.max_queue)

    async def start(self) -> None:
        """Load the checkpoint and decode a few tokens."""
        checkpoint = await asyncio.to_thread(Checkpoint.open, self._settings.model)
        defaults = checkpoint.defaults()
        config = LLMConfig.parse(checkpoint.config, head_alignment=self._settings.head_alignment)
        tokenizer = Tokenizer.open(
            checkpoint.path, gen_vocab_start_index=config.gen_vocab_start_index, family=config.family
        )
        template = PromptTemplate.open(checkpoint.path, tokenizer)
        scope = Scope.parse(checkpoint.generation, tokenizer.scope())
        self._max_context = min(self._settings.max_context, config.max_positions)
        self.engine = engine = await self._worker.run(self._load, checkpoint, scope)
        await measure(engine, self._worker.run, num_seqs=1, num_prompt_tokens=8, num_steps=2)
        logger.info("warm", extra={"device": str(engine.device), "dtype": str(engine.dtype)})
        dtype = str(engine.dtype).removeprefix("torch.")
        self.batcher = Batcher(
            engine,
            self._worker.run,
            max_num_seqs=self.limits.max_num_seqs,
            max_queue=self._settings.max_queue,
            chunk_rows=CHUNK_ROWS,
        )
        self._service.loaded = Loaded(
            refusal=engine.refusal,
            served=self.served,
            batcher=self.batcher,
            replicas=Replicas(self._targets),
            template=template,
            layout=RowLayout(DTYPES[dtype], engine.hidden_size, contract(engine.hidden_size, checkpoint.digest)),
            defaults=defaults,
            bounds=Bounds(),
            model_digest=checkpoint.digest,
            environment=describe(
                "ar",
                device=_device_name(engine.device),
                dtype=dtype,
                kernels=engine.kernels,
                row_bucket=engine.row_bucket,
                packages=(*engine.packages, "tiktoken"),
            ),
        )

    async def run(self) -> None:
        """Decode; whatever the engine raises ends the process."""
        await self.batcher.run()

    def register(self, public: grpc.aio.Server, control: grpc.aio.Server) -> list[str]:
        image_generation_pb2_grpc.add_ImageGenerationServicer_to_server(self._service, public)
        control_pb2_grpc.add_ControlServicer_to_server(ControlService(self, self._gate, self.metrics), control)
        return ["mammoth.v1.ImageGeneration"]

    def stalled_s(self) -> float:
        """Time since the last token while a row waits or runs."""
        snapshot = self.batcher.snapshot()
        self.metrics.queue_depth.set(snapshot.queue_depth)
        return self._idle_s() if snapshot.queue_depth + snapshot.num_running else 0.0

    async def close(self) -> None:
        if self._service.loaded is not None:
            await self._service.loaded.replicas.close()
        await asyncio.to_thread(self._worker.close)

    def state(self) -> control_pb2.State:
        settings = {"weights": self._settings.weights, "head_alignment": self._settings.head_alignment}
        state = control_pb2.State(stage="ar", exactness=self._settings.exactness, settings=settings)
        if (loaded := self._service.loaded) is None:
            return state
        snapshot = loaded.batcher.snapshot()
        state.model_digest, state.contract = loaded.model_digest, loaded.layout.contract
        state.environment.CopyFrom(loaded.environment)
        state.queue_depth, state.in_flight = snapshot.queue_depth, snapshot.rows_in_use
        state.idle_s, state.units_per_s = self._idle_s(), snapshot.tokens_per_s or 0.0
        return state

    def apply_limits(self, limits: LiveLimits) -> None:
        self.limits = limits
        if self._service.loaded is not None:
            self.batcher.set_limits(limits.max_num_seqs)

    async def profile(self, shape: tuple[int, int], batch_size: int, steps: int) -> Sequence[float]:
        """Measure decode steps of `batch_size` rows after a context of `shape[0]` tokens."""
        most = self._max_context - steps - 2
        if not 1 <= shape[0] <= most:
            raise InvalidRequest([("shapes.height", f"a context of {shape[0]} tokens is not from 1 to {most}")])
        try:
            return await measure(
                self.engine, self._worker.run, num_seqs=batch_size, num_prompt_tokens=shape[0], num_steps=steps
            )
        finally:
            self.batcher.wake()

    async def profile_rest(self, shape: tuple[int, int]) -> float:
        """Measure how long a prompt of `shape[0]` tokens is read: whole measurements of one step, less the step; the median of a few."""

        async def read() -> float:
            began_s = time.perf_counter()
            [step_ms] = await self.profile(shape, 1, 1)
            return 1e3 * (time.perf_counter() - began_s) - step_ms

        return await rest_ms(read)

    async def check_transport(self, address: str) -> control_pb2.CheckTransportResponse:
        assert self._service.loaded is not None, "Control lets nobody through before loading"
        return await check_transport(address, self._service.loaded.layout, self.engine.scope)

    def _load(self, checkpoint: Checkpoint, scope: Scope) -> Engine:
        dtype: torch.dtype = getattr(torch, self._settings.dtype_name)
        config = LLMConfig.parse(checkpoint.config, head_alignment=self._settings.head_alignment)
        return open_engine(
            load(checkpoint, config, dtype=dtype, device=self._settings.device),
            scope,
            num_slots=self._settings.capacity,
            max_context_tokens=self._max_context,
            prefill_chunk_tokens=self._settings.prefill_chunk,
            kernels=self._settings.kernels,
            exactness=self._settings.exactness,
            weights=self._settings.weights,
        )

    def _idle_s(self) -> float:
        return asyncio.get_running_loop().time() - self.batcher.snapshot().last_progress_at


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
