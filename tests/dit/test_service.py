"""The Denoise stream over real gRPC: what is refused, what is damaged, what is left, and what never changes."""

from __future__ import annotations

import asyncio
import hashlib
import random
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import numpy as np
import pytest
from PIL import Image

from mammoth_wire.errors import (
    AlreadyRunning,
    ContractMismatch,
    DataLoss,
    DeadlineExceeded,
    InvalidRequest,
    MammothError,
    Overloaded,
    from_packed,
)
from mammoth_wire.tensors import RowDigest, Rows, chunks, contract, header
from mammoth_wire.v1 import control_pb2, control_pb2_grpc, diffusion_pb2_grpc, types_pb2
from mammoth_wire.v1.diffusion_pb2 import Begin, DenoiseRequest, End, RowChunk

WIDTH = 64
F32 = types_pb2.DTYPE_FLOAT32
GEN = 520
EMPTY = Rows(np.zeros(0, np.int32), np.zeros((0, WIDTH), "<u4"), F32)


def make_rows(ids, seed: int) -> Rows:
    values = np.random.default_rng(seed).standard_normal((len(ids), WIDTH)).astype("<f4")
    return Rows(np.array(ids, np.int32), values.view("<u4"), F32)


@dataclass
class Sketch:
    """What a picture's stream is made of; a test changes what it wants to be wrong."""

    job_id: str = "job"
    num_text: int = 5
    num_image: int = 90
    num_negative: int = 0
    height: int = 32
    width: int = 48
    steps: int = 3
    guidance: float = 4.0
    cfg: tuple[float, float] = (0.0, 1.0)
    seed: int = 1
    begin: dict = field(default_factory=dict)
    end: dict = field(default_factory=dict)

    @property
    def rows(self) -> Rows:
        return make_rows([7] * self.num_text + [GEN] * self.num_image, abs(self.seed))

    def messages(self, digest: str) -> list[DenoiseRequest]:
        rows, negative = self.rows, make_rows([9] * self.num_negative, 99) if self.num_negative else EMPTY
        parameters = types_pb2.DiffusionParameters(
            height=self.height, width=self.width, steps=self.steps, guidance=self.guidance,
            cfg_start=self.cfg[0], cfg_end=self.cfg[1], seed=self.seed,
        )  # fmt: skip
        fields = {
            "job_id": self.job_id,
            "parameters": parameters,
            "rows": header("rows", F32, len(rows), WIDTH),
            "negative_rows": header("negative_rows", F32, len(negative), WIDTH) if self.num_negative else None,
            "answer_start_index": self.num_text,
            "contract": contract(WIDTH, digest),
        }
        sha256, negative_sha256 = RowDigest(), RowDigest()
        sha256.update(rows)
        negative_sha256.update(negative)
        end = {
            "num_rows": len(rows),
            "sha256": sha256.digest(),
            "num_negative_rows": len(negative),
            "negative_sha256": negative_sha256.digest(),
        }
        return [
            DenoiseRequest(begin=Begin(**{**fields, **self.begin})),
            *(DenoiseRequest(rows=chunk) for chunk in chunks(negative, part=RowChunk.PART_NEGATIVE)),
            *(DenoiseRequest(rows=chunk) for chunk in chunks(rows, part=RowChunk.PART_CONDITION)),
            DenoiseRequest(end=End(**{**end, **self.end})),
        ]


class Caller:
    """Sends sketches to a served DiT and reads what comes back."""

    def __init__(self, served):
        self.served = served
        self.stub = diffusion_pb2_grpc.DiffusionStub(served.channel)
        self.digest = served.stage._service.loaded.model_digest

    def call(self, sketch: Sketch, *, timeout=30, edit=lambda messages: messages):
        return self.stub.Denoise(iter(edit(sketch.messages(self.digest))), timeout=timeout)

    async def events(self, sketch: Sketch, **how):
        events = []
        async for event in self.call(sketch, **how):
            if event.HasField("failed"):
                raise from_packed(event.failed.status)
            events.append(event)
        return events

    async def picture(self, sketch: Sketch, **how) -> tuple[str, bytes]:
        events = await self.events(sketch, **how)
        data = b"".join(event.image.data for event in events if event.HasField("image"))
        return events[-1].drawn.rgb_sha256, data

    async def error(self, sketch: Sketch, **how):
        with pytest.raises(MammothError) as caught:
            await self.events(sketch, **how)
        return caught.value


@pytest.fixture
def caller(dit):
    return Caller(dit)


async def idle(served):
    """Wait until no call is inside and nothing waits or runs."""
    async with asyncio.timeout(10):
        await served.gate.emptied()
        while served.stage.batcher.active_ids or served.stage.batcher.snapshot().in_flight:
            await asyncio.sleep(0.005)


async def test_a_picture_is_queued_batched_stepped_and_delivered(caller):
    events = await caller.events(Sketch())
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "queued"
    assert [kind for kind in kinds if kind not in ("queued", "heartbeat")] == [
        "batched",
        *["step"] * 3,
        "image",
        "drawn",
    ]
    assert [(event.step.index, event.step.total) for event in events if event.HasField("step")] == [
        (1, 3),
        (2, 3),
        (3, 3),
    ]
    drawn = events[-1].drawn
    data = b"".join(event.image.data for event in events if event.HasField("image"))
    assert data.startswith(b"\x89PNG")
    assert drawn.model_digest == caller.digest
    assert drawn.times.batch_size == 1
    assert drawn.environment.versions["torch"]


async def test_the_digest_is_of_the_pixels_in_the_png(caller, tmp_path):
    sha256, data = await caller.picture(Sketch())
    (tmp_path / "picture.png").write_bytes(data)
    with Image.open(tmp_path / "picture.png") as image:
        assert image.size == (48, 32)
        assert hashlib.sha256(image.convert("RGB").tobytes()).hexdigest() == sha256


async def test_a_picture_has_the_same_bytes_alone_and_in_any_company(serve_dit):
    sketches = [
        Sketch(job_id="a", seed=1, guidance=4.0),
        Sketch(job_id="b", seed=2, guidance=1.0, num_text=2, num_image=9),
        Sketch(job_id="c", seed=3, guidance=7.5, cfg=(0.4, 0.7), num_text=11),
        Sketch(job_id="d", seed=4, guidance=9.0, num_negative=70),
    ]
    async with serve_dit(request_batch_max_wait_ms=2000.0, max_num_seqs=4) as served:
        caller = Caller(served)
        together = await asyncio.gather(*(caller.events(sketch) for sketch in sketches))
        assert {event.batched.size for events in together for event in events if event.HasField("batched")} == {4}
        served.stage.batcher.set_limits(max_wait_s=0.0)
        for sketch, events in zip(sketches, together, strict=True):
            sha256, data = await caller.picture(sketch)
            assert sha256 == events[-1].drawn.rgb_sha256
            assert data == b"".join(event.image.data for event in events if event.HasField("image"))
        assert len({events[-1].drawn.rgb_sha256 for events in together}) == 4


REFUSED_AT_BEGIN = [
    pytest.param(Sketch(height=40), InvalidRequest, "height: 40 is not a multiple of 16", id="height"),
    pytest.param(Sketch(width=0), InvalidRequest, "width: 0 is not pixels, a multiple of 16", id="width"),
    pytest.param(Sketch(steps=0), InvalidRequest, "steps: 0 is not", id="steps"),
    pytest.param(Sketch(steps=201), InvalidRequest, "steps: 201 is not", id="too-many-steps"),
    pytest.param(Sketch(guidance=float("nan")), InvalidRequest, "guidance: nan is not", id="guidance-nan"),
    pytest.param(Sketch(guidance=float("inf")), InvalidRequest, "guidance: inf is not", id="guidance-infinite"),
    pytest.param(Sketch(cfg=(0.8, 0.2)), InvalidRequest, "cfg_range: [0.8, 0.2]", id="range-reversed"),
    pytest.param(Sketch(seed=-1), InvalidRequest, "seed: -1 is not", id="seed"),
    pytest.param(Sketch(job_id=""), InvalidRequest, "job_id: 1 to 128 printable characters", id="no-id"),
    pytest.param(Sketch(begin={"contract": "rows-0/64/x"}), ContractMismatch, "rows-0/64/x", id="contract"),
    pytest.param(Sketch(begin={"rows": None}), InvalidRequest, "rows: missing", id="no-rows"),
    pytest.param(Sketch(begin={"answer_start_index": 96}), InvalidRequest, "answer_start_index: 96 is outside 0..95", id="answer-outside"),
    pytest.param(Sketch(begin={"answer_start_index": -1}), InvalidRequest, "answer_start_index: -1 is outside", id="answer-negative"),
    pytest.param(Sketch(begin={"rows": types_pb2.TensorHeader(dtype=77, shape=[95, 64], total_bytes=24320)}), InvalidRequest, "rows.dtype: 77 is unknown", id="dtype"),
    pytest.param(Sketch(begin={"rows": types_pb2.TensorHeader(dtype=F32, shape=[2**40, 64], total_bytes=2**48)}), InvalidRequest, "rows: 1099511627776 rows, at most 16384", id="overflow"),
    pytest.param(Sketch(begin={"rows": types_pb2.TensorHeader(dtype=F32, shape=[95, 64], total_bytes=1)}), InvalidRequest, "rows.total_bytes", id="bytes"),
    pytest.param(Sketch(begin={"rows": types_pb2.TensorHeader(dtype=F32, shape=[95, 32], total_bytes=12160)}), InvalidRequest, "rows: shape [95, 32]", id="width-of-rows"),
]  # fmt: skip


@pytest.mark.parametrize(("sketch", "kind", "text"), REFUSED_AT_BEGIN)
async def test_what_can_never_work_is_refused_at_begin_before_any_row(caller, sketch, kind, text):
    def only_begin(messages):
        return messages[:1]

    error = await caller.error(sketch, edit=only_begin)
    assert type(error) is kind
    assert text in error.message
    await idle(caller.served)


def without(index):
    return lambda messages: [message for i, message in enumerate(messages) if i != index]


def doubled(index):
    return lambda messages: [*messages[: index + 1], *messages[index:]]


def swapped(messages):
    messages[1], messages[2] = messages[2], messages[1]
    return messages


def damaged(**fields):
    def edit(messages):
        for name, value in fields.items():
            setattr(messages[1].rows, name, value)
        return messages

    return edit


def repeated_with_other_bytes(messages):
    other = next(chunks(make_rows(list(messages[1].rows.token_ids), 1234), part=RowChunk.PART_CONDITION))
    return [*messages[:2], DenoiseRequest(rows=other), *messages[2:]]


def with_nan(messages):
    rows = make_rows(list(messages[1].rows.token_ids), 5)
    rows.bits[3, 3] = 0x7FC00000
    return [messages[0], DenoiseRequest(rows=next(chunks(rows, part=RowChunk.PART_CONDITION))), *messages[2:]]


DAMAGED_ON_THE_WAY = [
    pytest.param(Sketch(), damaged(crc32c=1), DataLoss, "condition chunk 0: crc32c does not match", id="wrong-crc"),
    pytest.param(Sketch(), damaged(data=b"x" * 100), DataLoss, "condition chunk 0: crc32c", id="bytes-short"),
    pytest.param(Sketch(), swapped, DataLoss, "condition chunk 1: chunk 0 is missing before it", id="out-of-order"),
    pytest.param(Sketch(), without(2), DataLoss, "95 rows announced, 64 received", id="chunk-missing"),
    pytest.param(Sketch(), repeated_with_other_bytes, DataLoss, "condition chunk 0: repeated with other bytes", id="twice-other-bytes"),
    pytest.param(Sketch(), lambda messages: messages[:2], DataLoss, "the stream ended before rows or end", id="cut-in-the-middle"),
    pytest.param(Sketch(), lambda messages: messages[1:], InvalidRequest, "part: rows where begin comes next", id="no-begin"),
    pytest.param(Sketch(end={"num_rows": 94}), doubled(1), DataLoss, "95 received, 94 closed", id="count-disagrees"),
    pytest.param(Sketch(end={"sha256": bytes(32)}), doubled(2), DataLoss, "the digest of 95 rows does not match", id="digest-disagrees"),
    pytest.param(Sketch(), with_nan, InvalidRequest, "rows: chunk 0 holds NaN or infinite values", id="nan"),
    pytest.param(Sketch(num_image=0, begin={"answer_start_index": 2}), list, InvalidRequest, "no visual token", id="no-visual-token"),
    pytest.param(Sketch(num_negative=5), swapped, InvalidRequest, "negative rows first", id="negative-rows-late"),
]  # fmt: skip


@pytest.mark.parametrize(("sketch", "edit", "kind", "text"), DAMAGED_ON_THE_WAY)
async def test_damaged_rows_end_their_own_stream_and_a_neighbour_keeps_its_bytes(serve_dit, sketch, edit, kind, text):
    neighbour = Sketch(job_id="neighbour", seed=8)
    async with serve_dit(request_batch_max_wait_ms=50.0) as served:
        caller = Caller(served)
        alone = await caller.picture(neighbour)
        error, beside = await asyncio.gather(caller.error(sketch, edit=edit), caller.picture(neighbour))
        assert type(error) is kind
        assert text in error.message
        assert beside == alone
        await idle(served)


async def test_an_identical_repeat_of_a_chunk_changes_nothing(caller):
    assert await caller.picture(Sketch(), edit=doubled(1)) == await caller.picture(Sketch())


async def test_a_job_id_that_is_running_is_refused_and_free_again_afterwards(caller):
    first = caller.call(Sketch(steps=50))
    await first.read()
    error = await caller.error(Sketch(steps=50))
    assert isinstance(error, AlreadyRunning)
    first.cancel()
    await idle(caller.served)
    await caller.picture(Sketch())


async def test_a_full_queue_refuses_with_a_hint_and_a_place_frees_when_somebody_leaves(serve_dit):
    async with serve_dit(max_queue=2) as served:
        caller = Caller(served)
        gates = [asyncio.Event() for _ in range(2)]

        async def held(sketch, gate):
            messages = sketch.messages(caller.digest)
            yield messages[0]
            await gate.wait()
            for message in messages[1:]:
                yield message

        calls = [caller.stub.Denoise(held(Sketch(job_id=f"h{i}"), gate)) for i, gate in enumerate(gates)]
        for call in calls:
            assert (await call.read()).HasField("queued")
        error = await caller.error(Sketch(job_id="late"))
        assert isinstance(error, Overloaded)
        assert error.retry_after_s > 0
        calls[0].cancel()
        async with asyncio.timeout(5):
            while served.stage._service.num_expected > 1:
                await asyncio.sleep(0.005)
        await caller.picture(Sketch(job_id="late"))
        gates[1].set()
        events = []
        while (event := await calls[1].read()) is not grpc.aio.EOF:
            events.append(event)
        assert events[-1].HasField("drawn")


async def test_a_deadline_says_where_the_picture_was(caller):
    error = await caller.error(Sketch(steps=200, height=256, width=256), timeout=0.5)
    assert isinstance(error, DeadlineExceeded)
    await idle(caller.served)


async def test_a_caller_that_leaves_frees_its_place_within_a_step_and_nothing_leaks_over_200_cancels(caller):
    rng = random.Random(0)

    async def impatient(i):
        call = caller.call(Sketch(job_id=f"job-{i}", steps=rng.choice([2, 5, 20]), seed=i), timeout=600)
        for _ in range(rng.randrange(6)):
            if await call.read() is grpc.aio.EOF:
                break
        call.cancel()

    for begin in range(0, 200, 20):
        await asyncio.gather(*(impatient(i) for i in range(begin, begin + 20)))
    await idle(caller.served)
    assert caller.served.stage._service.num_expected == 0
    assert await caller.picture(Sketch())


async def test_an_idle_replica_refuses_nothing_for_what_other_shapes_took(caller):
    batcher = caller.served.stage.batcher
    batcher._pace.measure((32, 48, 3), 1, 1e6)
    assert batcher.eta_s((32, 48, 3)) > 1e5
    await caller.picture(Sketch(), timeout=20)
    assert batcher.eta_s((512, 512, 50)) is None


async def test_an_accepted_picture_is_never_refused_for_load(serve_dit):
    async with serve_dit(max_queue=1) as served:
        caller, arrive = Caller(served), asyncio.Event()

        async def late():
            messages = Sketch(job_id="late").messages(caller.digest)
            yield messages[0]
            await arrive.wait()
            for message in messages[1:]:
                yield message

        call = caller.stub.Denoise(late(), timeout=60)
        await call.read()
        served.stage.batcher._pace.measure((32, 48, 3), 1, 1e6)
        arrive.set()
        while (event := await call.read()) is not grpc.aio.EOF:
            assert not event.HasField("failed")
            last = event
        assert last.HasField("drawn")


async def test_a_stream_without_rows_keeps_its_place_no_longer_than_its_deadline(caller):
    async def stalling():
        yield Sketch().messages(caller.digest)[0]
        await asyncio.Event().wait()

    call = caller.stub.Denoise(stalling(), timeout=0.5)
    events = []
    with suppress(grpc.aio.AioRpcError):
        while (event := await call.read()) is not grpc.aio.EOF:
            events.append(event)
    assert events[0].HasField("queued")
    assert all("before all rows" in from_packed(event.failed.status).message for event in events[1:])
    await idle(caller.served)
    assert caller.served.stage._service.num_expected == 0


async def test_limits_hold_from_the_next_wave_on(serve_dit):
    async with serve_dit(request_batch_max_wait_ms=2000.0, max_num_seqs=2) as served:
        caller = Caller(served)
        control = control_pb2_grpc.ControlStub(served.control)
        await control.SetLimits(control_pb2.SetLimitsRequest(epoch=1, max_num_seqs=3))
        together = await asyncio.gather(*(caller.events(Sketch(job_id=str(i), seed=i)) for i in range(3)))
        assert {event.batched.size for events in together for event in events if event.HasField("batched")} == {3}


async def test_a_profile_measures_every_shape_and_batch(dit):
    control = control_pb2_grpc.ControlStub(dit.control)
    request = control_pb2.ProfileRequest(shapes=[control_pb2.Shape(height=32, width=32)], batch_sizes=[1, 2], steps=2)
    reply = await control.Profile(request)
    assert [(row.batch_size, len(row.step_ms)) for row in reply.measurements] == [(1, 2), (2, 2)]
    assert all(ms > 0 for row in reply.measurements for ms in row.step_ms)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await control.Profile(control_pb2.ProfileRequest(shapes=request.shapes, batch_sizes=[9]))
    assert "batch_sizes: 9 is not from 1 to the capacity 8" in caught.value.details()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param({"batch_sizes": [0]}, "batch_sizes: 0 is not from 1 to the capacity 8", id="zero"),
        pytest.param({"steps": 2**31 - 1}, "steps: 2147483647 is not from 1 to 32", id="steps"),
        pytest.param({"shapes": [control_pb2.Shape(height=32, width=32)] * 65}, "65 shapes x 1 batch sizes", id="many"),
        pytest.param({"shapes": [control_pb2.Shape(height=33, width=32)]}, "height: 33 is not a multiple", id="shape"),
    ],
)
async def test_a_profile_that_cannot_be_or_would_never_end_is_refused(dit, fields, text):
    control = control_pb2_grpc.ControlStub(dit.control)
    request = {"shapes": [control_pb2.Shape(height=32, width=32)], **fields}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await control.Profile(control_pb2.ProfileRequest(**request))
    assert text in caught.value.details()


async def test_pictures_are_drawn_in_between_a_profile_that_its_caller_can_leave(dit):
    control = control_pb2_grpc.ControlStub(dit.control)
    shapes = [control_pb2.Shape(height=128, width=128)] * 8
    profile = control.Profile(control_pb2.ProfileRequest(shapes=shapes, batch_sizes=[8], steps=32))
    await asyncio.sleep(0.05)
    assert await Caller(dit).picture(Sketch())
    assert not profile.done()
    profile.cancel()
    await idle(dit)


MODES = [("request", "plain", "bf16", "off"), ("request", "fast", "bf16", "off"), ("step", "plain", "bf16", "off"),
         ("step", "fast", "bf16", "off"), ("step", "fast", "fp8", "residual")]  # fmt: skip


@pytest.mark.parametrize(("batching", "kernels", "precision", "step_cache"), MODES)
async def test_every_mode_serves_and_says_what_it_is(serve_dit, batching, kernels, precision, step_cache):
    settings = {"batching": batching, "kernels": kernels, "precision": precision, "step_cache": step_cache}
    async with serve_dit(**settings) as served:
        caller = Caller(served)
        sketches = [Sketch(job_id=str(seed), seed=seed, steps=3 + seed % 2) for seed in range(4)]
        together = await asyncio.gather(*(caller.events(sketch) for sketch in sketches))
        for sketch, events in zip(sketches, together, strict=True):
            drawn = events[-1].drawn
            assert drawn.environment.kernels.startswith(kernels)
            assert (await caller.picture(sketch))[0] == drawn.rgb_sha256
            steps = [event.step.index for event in events if event.HasField("step")]
            assert steps == list(range(1, sketch.steps + 1))
        state = await control_pb2_grpc.ControlStub(served.control).GetState(control_pb2.GetStateRequest())
        assert (state.settings["batching"], state.settings["precision"]) == (batching, precision)
        assert ("/fp8/step-cache" in state.environment.kernels) == (precision == "fp8")
        assert ("reused_steps" in state.settings) == (step_cache == "residual")


async def test_a_picture_that_had_to_be_drawn_plainly_says_so(serve_dit):
    async with serve_dit(kernels="fast") as served:
        caller = Caller(served)
        engine = served.stage.engine

        def broken(rows, shape):
            raise RuntimeError("no kernel image")

        engine._exact._step = broken
        events = await caller.events(Sketch())
        assert events[-1].drawn.environment.kernels == "plain"
        assert served.stage._service.loaded.environment.kernels == "fast/torch"
