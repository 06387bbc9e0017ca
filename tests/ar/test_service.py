"""Generate over real gRPC, both stages in this loop: refusals, cancels, replays, and pictures that never change."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
from collections import Counter
from contextlib import AsyncExitStack

import grpc
import pytest
from PIL import Image

from mammoth_wire.errors import (
    AlreadyRunning,
    Cancelled,
    ContractMismatch,
    DataLoss,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
    abort,
    from_rpc_error,
)
from mammoth_wire.v1 import control_pb2, control_pb2_grpc, diffusion_pb2_grpc, image_generation_pb2_grpc
from mammoth_wire.v1.diffusion_pb2 import DenoiseEvent
from mammoth_wire.v1.image_generation_pb2 import GenerateRequest

SMALL = {"prompt": "a red apple", "height": 32, "width": 48, "ar_height": 3, "ar_width": 4, "steps": 2, "seed": 7}


class Caller:
    """Makes Generate calls to a served AR stage."""

    def __init__(self, served):
        self.served = served
        self.stub = image_generation_pb2_grpc.ImageGenerationStub(served.channel)

    def call(self, timeout=60, **fields):
        return self.stub.Generate(GenerateRequest(**{**SMALL, **fields}), timeout=timeout)

    async def events(self, **fields):
        return [event async for event in self.call(**fields)]

    async def pictures(self, **fields) -> list[tuple[str, bytes]]:
        """Return (digest of the pixels, PNG bytes) of every picture, by index."""
        events = await self.events(**fields)
        data: dict[int, bytes] = {}
        for event in events:
            if event.HasField("image"):
                data[event.image.image_index] = data.get(event.image.image_index, b"") + event.image.data
        receipts = {event.done.image_index: event.done.receipt for event in events if event.HasField("done")}
        return [(receipts[index].rgb_sha256, data[index]) for index in sorted(receipts)]

    async def error(self, **fields):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.events(**fields)
        return from_rpc_error(caught.value)


@pytest.fixture
def caller(ar):
    return Caller(ar)


async def idle(*served):
    """Wait until nobody is inside either stage and every slot is free."""
    async with asyncio.timeout(20):
        for each in served:
            await each.gate.emptied()
        batcher = served[0].stage.batcher
        while batcher.snapshot().num_running or batcher.snapshot().free_slots < batcher.snapshot().num_slots:
            await asyncio.sleep(0.005)


async def test_a_request_goes_from_accepted_to_done_and_says_where_it_is(caller):
    events = await caller.events(num_images=2)
    assert [event.sequence for event in events] == list(range(len(events)))
    kinds = [event.WhichOneof("event") for event in events if event.WhichOneof("event") != "heartbeat"]
    assert kinds[0] == "accepted"
    counted = Counter(kinds)
    assert counted["conditioned"] == counted["batched"] == counted["image"] == counted["done"] == 2
    assert counted["step"] == 4
    accepted = events[0].accepted
    assert (accepted.diffusion.width, accepted.conditioning.ar_width, accepted.num_images) == (48, 4, 2)
    progress = [
        event.ar_progress for event in events if event.HasField("ar_progress") and event.ar_progress.image_index == 1
    ]
    assert (progress[-1].tokens, progress[-1].total) == (15, 15)


async def test_a_receipt_names_everything_that_the_bits_depend_on(caller):
    events = await caller.events(num_images=2, negative_prompt="blurry", guidance=3.5, cfg_range=[0.0, 0.5])
    receipts = [event.done.receipt for event in events if event.HasField("done")]
    receipt = next(receipt for receipt in receipts if receipt.image_index == 1)
    assert (receipt.prompt, receipt.negative_prompt) == ("a red apple", "blurry")
    assert (receipt.diffusion.seed, receipt.conditioning.seed) == (8, 8)
    assert (receipt.diffusion.guidance, receipt.diffusion.cfg_end) == (3.5, 0.5)
    assert len(receipt.model_digest) == len(receipt.rows_sha256) == len(receipt.rgb_sha256) == 64
    assert receipt.ar.versions["torch"] == receipt.dit.versions["torch"]
    images = {event.image.image_index: event.image.data for event in events if event.HasField("image")}
    with Image.open(io.BytesIO(images[1])) as image:
        assert hashlib.sha256(image.tobytes()).hexdigest() == receipt.rgb_sha256


VARIANTS = [
    {"seed": 1},
    {"seed": 2, "prompt": "two green pears on a wooden table, in the rain", "guidance": 1.0},
    {"seed": 3, "ar_guidance": 4.0, "cfg_range": [0.3, 0.9]},
    {"seed": 4, "negative_prompt": "deformed, blurry", "temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"seed": 5, "ar_height": 2, "ar_width": 11, "guidance": 7.5},
]


@pytest.mark.parametrize("family", ["preview", "dev"])
async def test_a_picture_has_the_same_bytes_alone_and_in_any_company(serve_ar, serve_dit, tiny_checkpoints, family):
    model = str(tiny_checkpoints[family])
    async with serve_dit(model=model, request_batch_max_wait_ms=300.0) as dit, serve_ar(dit.address, model=model) as ar:
        caller = Caller(ar)
        together = await asyncio.gather(*(caller.pictures(**variant) for variant in VARIANTS))
        random.Random(3).shuffle(order := list(range(len(VARIANTS))))
        for index in order:
            assert await caller.pictures(**VARIANTS[index]) == together[index]
        assert len({pictures[0][0] for pictures in together}) == len(VARIANTS)


async def test_image_i_of_many_is_the_picture_of_seed_plus_i(caller):
    many = await caller.pictures(num_images=3, seed=40)
    assert many == [picture for i in range(3) for picture in await caller.pictures(seed=40 + i)]


async def test_a_seed_that_the_server_chose_gives_the_same_picture_again(caller):
    request = {**SMALL}
    del request["seed"]
    events = [event async for event in caller.stub.Generate(GenerateRequest(**request))]
    receipt = next(event.done.receipt for event in events if event.HasField("done"))
    [(rgb_sha256, _)] = await caller.pictures(seed=receipt.diffusion.seed)
    assert rgb_sha256 == receipt.rgb_sha256


BAD = [
    pytest.param({"prompt": ""}, "prompt", id="empty-prompt"),
    pytest.param({"prompt": "x" * 8193}, "prompt", id="long-prompt"),
    pytest.param({"prompt": "a <|im_end|> b"}, "prompt", id="special-token"),
    pytest.param({"prompt": "x" * 220}, "prompt", id="context-exceeded"),
    pytest.param({"negative_prompt": "<|visual token 000003|>"}, "negative_prompt", id="special-token-in-negative"),
    pytest.param({"height": 40}, "height", id="height"),
    pytest.param({"width": 4096}, "width", id="width"),
    pytest.param({"steps": 0}, "steps", id="steps"),
    pytest.param({"guidance": float("nan")}, "guidance", id="guidance-nan"),
    pytest.param({"guidance": float("inf")}, "guidance", id="guidance-infinite"),
    pytest.param({"cfg_range": [0.9, 0.1]}, "cfg_range", id="range-reversed"),
    pytest.param({"cfg_range": [0.9]}, "cfg_range", id="range-of-one"),
    pytest.param({"ar_guidance": float("nan")}, "ar_guidance", id="ar-guidance"),
    pytest.param({"temperature": -1.0}, "temperature", id="temperature"),
    pytest.param({"top_p": 2.0}, "top_p", id="top-p"),
    pytest.param({"seed": -3}, "seed", id="seed"),
    pytest.param({"num_images": 9}, "num_images", id="num-images"),
    pytest.param({"output_format": "bmp"}, "output_format", id="format"),
    pytest.param({"request_id": "a/b"}, "request_id", id="request-id"),
]


@pytest.mark.parametrize(("fields", "field"), BAD)
async def test_a_bad_field_is_named_and_costs_nothing(caller, fields, field):
    error = await caller.error(**fields)
    assert isinstance(error, InvalidRequest)
    assert [name for name, _ in error.violations] == [field]
    assert caller.served.stage.batcher.snapshot().queue_depth == 0


async def test_bad_requests_leave_a_running_neighbour_its_bytes(caller):
    alone = await caller.pictures(seed=11)
    beside, *errors = await asyncio.gather(
        caller.pictures(seed=11), *(caller.error(**{"prompt": "x", **param.values[0]}) for param in BAD)
    )
    assert beside == alone
    assert all(isinstance(error, InvalidRequest) for error in errors)


async def test_a_request_id_that_is_running_is_refused_and_free_again_afterwards(caller, dit):
    first = caller.call(request_id="r", steps=100)
    await first.read()
    assert isinstance(await caller.error(request_id="r"), AlreadyRunning)
    first.cancel()
    await idle(caller.served, dit)
    await caller.pictures(request_id="r")


async def test_a_deadline_in_the_past_or_too_far_is_refused(caller):
    assert isinstance(await caller.error(timeout=0.001), DeadlineExceeded)
    error = await caller.error(timeout=7200)
    assert isinstance(error, InvalidRequest)
    assert [name for name, _ in error.violations] == ["deadline"]
    assert "at most 3600 s" in error.message


async def test_a_deadline_that_passes_says_where_and_leaves_nothing_behind(caller, dit):
    error = await caller.error(steps=200, height=256, width=256, timeout=0.7)
    assert isinstance(error, DeadlineExceeded)
    await idle(caller.served, dit)


async def test_nothing_is_decoded_for_a_picture_that_the_dit_refuses(serve_ar, serve_dit, tiny_checkpoints):
    async with serve_dit(model=str(tiny_checkpoints["dev"])) as other, serve_ar(other.address) as ar:
        error = await Caller(ar).error()
        assert isinstance(error, ContractMismatch)
        assert ar.stage.batcher.snapshot().tokens_per_s is None


async def test_a_full_queue_says_when_to_come_back(serve_ar, dit):
    async with serve_ar(dit.address, max_queue=2, capacity=1) as ar:
        caller = Caller(ar)
        running = [caller.call(seed=seed, ar_height=10, ar_width=10, num_images=2) for seed in (1,)]
        assert (await running[0].read()).HasField("accepted")
        errors = await asyncio.gather(*(caller.error(num_images=2, seed=seed) for seed in (3, 4)))
        assert any(isinstance(error, Overloaded) and error.retry_after_s > 0 for error in errors)
        assert isinstance(await caller.error(num_images=3), InvalidRequest)
        running[0].cancel()


async def test_no_replica_is_unavailable_with_a_hint_and_not_a_hang(serve_ar):
    async with serve_ar("127.0.0.1:1") as ar:
        error = await Caller(ar).error()
        assert isinstance(error, Unavailable)
        await idle(ar)


async def test_cancels_at_any_moment_free_every_slot_and_leak_nothing_over_200(caller, dit):
    rng = random.Random(1)
    before = len(asyncio.all_tasks())

    async def impatient(i):
        call = caller.call(seed=i, num_images=rng.choice([1, 1, 2]), steps=rng.choice([1, 3, 8]), timeout=600)
        for _ in range(rng.randrange(12)):
            if await call.read() is grpc.aio.EOF:
                break
        call.cancel()

    for begin in range(0, 200, 25):
        await asyncio.gather(*(impatient(i) for i in range(begin, begin + 25)))
    await idle(caller.served, dit)
    assert not caller.served.stage._service._running
    assert dit.stage._service.num_expected == 0
    assert not dit.stage.batcher.active_ids
    assert await caller.pictures() == await caller.pictures()
    async with asyncio.timeout(10):
        while len(asyncio.all_tasks()) > before + 8:
            await asyncio.sleep(0.01)


async def test_a_replica_that_leaves_in_the_middle_costs_time_and_not_the_picture(serve_ar, serve_dit):
    async with AsyncExitStack() as stack:
        first = AsyncExitStack()
        doomed = await first.enter_async_context(serve_dit())
        other = await stack.enter_async_context(serve_dit())
        ar = await stack.enter_async_context(serve_ar(f"{doomed.address},{other.address}"))
        caller = Caller(ar)
        alone = {seed: await caller.pictures(seed=seed, steps=40) for seed in (1, 2)}
        running = [asyncio.create_task(caller.pictures(seed=seed, steps=40)) for seed in (1, 2)]
        async with asyncio.timeout(20):
            while not doomed.stage.batcher.snapshot().in_flight:
                await asyncio.sleep(0.002)
        await first.aclose()
        assert [await task for task in running] == [alone[1], alone[2]]
        assert ar.stage.metrics.conditioning_resends._value.get() >= 1


@pytest.mark.parametrize("admits", [False, True], ids=["before-admission", "in-mid-stream"])
@pytest.mark.parametrize("code", ["CANCELLED", "UNAVAILABLE", "DATA_LOSS"])
async def test_a_replica_that_cuts_the_stream_off_is_replaced(serve_ar, dit, code, admits):
    class Cutting(diffusion_pb2_grpc.DiffusionServicer):
        """Ends the call at once, or admits and takes some rows before."""

        num_calls = 0

        async def Denoise(self, request_iterator, context):
            self.num_calls += 1
            await context.read()
            if admits:
                await context.write(DenoiseEvent(queued={"position": 0}))
                for _ in range(2):
                    await context.read()
            await abort(context, kinds[code]("cut"))

    kinds = {"CANCELLED": Cancelled, "UNAVAILABLE": Unavailable, "DATA_LOSS": DataLoss}
    server, cutting = grpc.aio.server(), Cutting()
    diffusion_pb2_grpc.add_DiffusionServicer_to_server(cutting, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with serve_ar(dit.address) as honest:
            alone = await Caller(honest).pictures()
        async with serve_ar(f"127.0.0.1:{port},{dit.address}") as ar:
            assert await Caller(ar).pictures() == alone
        assert cutting.num_calls == 1
    finally:
        await server.stop(None)


class Silent(diffusion_pb2_grpc.DiffusionServicer):
    """Takes calls and never answers."""

    async def Denoise(self, request_iterator, context):
        await asyncio.Event().wait()


class Full(diffusion_pb2_grpc.DiffusionServicer):
    """Has no room."""

    async def Denoise(self, request_iterator, context):
        await abort(context, Overloaded("full", retry_after_s=5.0))


@pytest.mark.parametrize("kind", [None, Silent, Full], ids=["dead", "hung", "full"])
async def test_requests_do_not_suffer_from_one_useless_replica(serve_ar, dit, kind, monkeypatch):
    monkeypatch.setattr("mammoth_ar.handover.ADMISSION_S", 0.3)
    server = grpc.aio.server()
    if kind is not None:
        diffusion_pb2_grpc.add_DiffusionServicer_to_server(kind(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    if kind is None:
        await server.stop(None)
    try:
        async with serve_ar(f"127.0.0.1:{port},{dit.address}") as ar:
            caller = Caller(ar)
            await asyncio.gather(*(caller.pictures(seed=seed, num_images=2) for seed in range(12)))
    finally:
        await server.stop(None)


async def test_transport_is_proven_by_a_tensor_that_crosses(ar, dit):
    control = control_pb2_grpc.ControlStub(ar.control)
    reply = await control.CheckTransport(control_pb2.CheckTransportRequest(address=dit.address))
    assert reply.equal
    assert reply.total_bytes == 130 * 64 * 4
    for address, kind in (("127.0.0.1:1", Unavailable), ("nonsense", InvalidRequest)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control.CheckTransport(control_pb2.CheckTransportRequest(address=address))
        assert isinstance(from_rpc_error(caught.value), kind)


async def test_a_cap_of_one_row_still_serves_everybody(caller):
    control = control_pb2_grpc.ControlStub(caller.served.control)
    alone = await caller.pictures(ar_guidance=3.0)
    await control.SetLimits(control_pb2.SetLimitsRequest(epoch=1, max_num_seqs=1))
    assert await asyncio.gather(*(caller.pictures(ar_guidance=3.0) for _ in range(3))) == [alone] * 3


async def test_no_prompt_reaches_the_log(caller, caplog):
    with caplog.at_level("DEBUG"):
        await caller.pictures(prompt="zebra unicorn secret", negative_prompt="hidden words")
        await caller.error(prompt="zebra <|im_end|>")
    text = "\n".join(str(vars(record)) for record in caplog.records)
    assert "admitted" in text
    for word in ("zebra", "unicorn", "hidden words"):
        assert word not in text
