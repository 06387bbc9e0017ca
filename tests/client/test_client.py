"""Both clients against a real server on loopback."""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from mammoth_client import (
    Accepted,
    AlreadyRunning,
    AsyncClient,
    Cancelled,
    Client,
    ContractMismatch,
    DataLoss,
    DeadlineExceeded,
    DeadlineUnreachable,
    EngineFailed,
    InvalidRequest,
    MammothError,
    NotFound,
    Overloaded,
    Picture,
    RetryPolicy,
    ServiceHealth,
    ShapeTooLarge,
    Unavailable,
)
from mammoth_client.testing import Call, Reply, fake_server

DRAINING = Reply(error=Unavailable("draining"))


def test_generate_returns_pictures_in_order_that_match_their_receipts(api):
    with fake_server(chunk_bytes=64) as server:
        pictures = api.generate(server.address, "a mammoth", num_images=3, seed=7, width=32, height=48)
    assert [picture.image_index for picture in pictures] == [0, 1, 2]
    assert [picture.receipt.diffusion.seed for picture in pictures] == [7, 8, 9]
    assert all(picture.verify() for picture in pictures)
    assert pictures[0].to_pil().size == (32, 48)
    assert len({picture.png for picture in pictures}) == 3


def test_a_changed_picture_does_not_verify(api):
    with fake_server() as server:
        [ours] = api.generate(server.address, "a mammoth")
        [other] = api.generate(server.address, "another mammoth")
    swapped = Picture(png=other.png, receipt=ours.receipt, image_index=0, times=ours.times)
    assert not swapped.verify()


def test_the_blocking_and_the_asyncio_client_agree():
    with fake_server() as server:
        with Client(server.address) as client:
            blocking = client.generate("a mammoth", seed=1, request_id="same")

        async def run() -> list[Picture]:
            async with AsyncClient(server.address) as client:
                return await client.generate("a mammoth", seed=1, request_id="same")

        assert asyncio.run(run()) == blocking
    assert server.calls[0].fields == server.calls[1].fields


def test_stream_yields_each_picture_as_soon_as_it_is_finished(api):
    with fake_server() as server:
        names = [type(event).__name__ for event in api.stream(server.address, "a mammoth", num_images=2, steps=1)]
    assert names[0] == "Accepted"
    assert names.index("Picture") < len(names) - 1
    assert names.count("Picture") == names.count("Done") == 2


def test_on_event_sees_everything_that_stream_yields(api):
    seen: list[object] = []
    with fake_server() as server:
        [picture] = api.generate(server.address, "a mammoth", on_event=seen.append, request_id="a")
        assert seen == api.stream(server.address, "a mammoth", request_id="a")
    assert seen[-1] == picture


def test_what_on_event_raises_cancels_the_request(api):
    def refuse(event: object) -> None:
        raise LookupError(str(event))

    with fake_server(Reply(num_events=1)) as server:
        with pytest.raises(LookupError, match="Accepted"):
            api.generate(server.address, "a mammoth", on_event=refuse)
        assert server.calls[0].outcome() == "cancelled"


def test_leaving_the_stream_reaches_the_server_while_the_client_lives_on(api):
    seen: list[str] = []
    with fake_server(Reply(num_events=3)) as server:
        events = api.first(server.address, 3, lambda: seen.append(server.calls[0].outcome()))
        assert isinstance(events[0], Accepted)
    assert seen == ["cancelled"]


def test_cancelling_the_task_reaches_the_server():
    async def run(address: str) -> None:
        arrived = asyncio.Event()
        async with AsyncClient(address) as client:
            task = asyncio.create_task(client.generate("a mammoth", on_event=lambda _: arrived.set()))
            await arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with fake_server(Reply(num_events=1)) as server:
        asyncio.run(run(server.address))
        assert server.calls[0].outcome() == "cancelled"


def test_closing_the_client_ends_its_requests():
    with fake_server(Reply(num_events=1)) as server:
        client = Client(server.address)
        events = client.stream("a mammoth")
        next(events)
        client.close()
        with pytest.raises(Cancelled):
            next(events)
        assert server.calls[0].outcome() == "cancelled"


BAD_FIELDS = [
    pytest.param({"scheduler": "ddim"}, "scheduler", id="unknown-field"),
    pytest.param({"steps": 0}, "steps", id="steps-zero"),
    pytest.param({"steps": 201}, "steps", id="steps-too-many"),
    pytest.param({"steps": True}, "steps", id="steps-a-boolean"),
    pytest.param({"steps": 3.7}, "steps", id="steps-a-fraction"),
    pytest.param({"steps": "20"}, "steps", id="steps-text"),
    pytest.param({"width": 100}, "width", id="width-no-multiple-of-16"),
    pytest.param({"height": 2064}, "height", id="height-too-large"),
    pytest.param({"height": 0}, "height", id="height-zero"),
    pytest.param({"ar_width": 0}, "ar_width", id="grid-zero"),
    pytest.param({"guidance": math.nan}, "guidance", id="guidance-nan"),
    pytest.param({"guidance": math.inf}, "guidance", id="guidance-infinite"),
    pytest.param({"cfg_range": (0.8, 0.2)}, "cfg_range", id="range-reversed"),
    pytest.param({"cfg_range": ("0", "1")}, "cfg_range", id="range-of-text"),
    pytest.param({"cfg_range": "01"}, "cfg_range", id="range-as-text"),
    pytest.param({"cfg_range": (0.0,)}, "cfg_range", id="range-of-one"),
    pytest.param({"cfg_range": (0.0, math.nan)}, "cfg_range", id="range-nan"),
    pytest.param({"temperature": -0.1}, "temperature", id="temperature-negative"),
    pytest.param({"top_k": -1}, "top_k", id="top-k-negative"),
    pytest.param({"top_p": 0.0}, "top_p", id="top-p-zero"),
    pytest.param({"seed": -1}, "seed", id="seed-negative"),
    pytest.param({"seed": 2**63}, "seed", id="seed-too-large"),
    pytest.param({"num_images": 9}, "num_images", id="too-many-images"),
    pytest.param({"output_format": "gif"}, "output_format", id="format-unknown"),
    pytest.param({"request_id": "a/b"}, "request_id", id="request-id-with-slash"),
    pytest.param({"request_id": 7}, "request_id", id="request-id-a-number"),
    pytest.param({"labels": {"a": "x" * 200}}, "labels", id="label-too-long"),
    pytest.param({"prompt": ""}, "prompt", id="prompt-empty"),
    pytest.param({"prompt": " \n"}, "prompt", id="prompt-blank"),
    pytest.param({"prompt": "é" * 4097}, "prompt", id="prompt-too-long"),
    pytest.param({"prompt": None}, "prompt", id="prompt-none"),
    pytest.param({"prompt": 3}, "prompt", id="prompt-a-number"),
    pytest.param({"negative_prompt": "x" * 8193}, "negative_prompt", id="negative-prompt-too-long"),
    pytest.param({"timeout_s": 0}, "timeout_s", id="timeout-zero"),
    pytest.param({"timeout_s": 3601}, "timeout_s", id="timeout-too-long"),
    pytest.param({"timeout_s": math.nan}, "timeout_s", id="timeout-nan"),
    pytest.param({"timeout_s": True}, "timeout_s", id="timeout-a-boolean"),
    pytest.param({"timeout_s": "soon"}, "timeout_s", id="timeout-a-word"),
]


@pytest.mark.parametrize(("given", "field"), BAD_FIELDS)
def test_a_bad_field_never_leaves_the_client(api, shared_server, given, field):
    fields = {"prompt": "a mammoth", **given}
    with pytest.raises(InvalidRequest) as caught:
        api.generate(shared_server.address, **fields)
    assert field in {name for name, _ in caught.value.violations}
    assert caught.value.message.startswith(f"{field}: ")
    assert shared_server.calls == []


@pytest.fixture(scope="module")
def shared_server():
    with fake_server() as server:
        yield server


def test_stream_checks_before_its_first_event():
    with Client() as client, pytest.raises(InvalidRequest):
        client.stream("a mammoth", steps=0)


def test_what_only_the_server_knows_is_refused_there_by_name(api):
    error = InvalidRequest([("prompt", "9000 tokens and 4161 more exceed the context of 8192")])
    with fake_server(Reply(error=error)) as server, pytest.raises(InvalidRequest) as caught:
        api.generate(server.address, "a mammoth")
    assert caught.value.violations == error.violations
    assert len(server.calls) == 1


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(Overloaded("the queue is full", retry_after_s=1.5, queue_depth="64"), id="overloaded"),
        pytest.param(ShapeTooLarge("does not fit", limit="1024x1024"), id="shape-too-large"),
        pytest.param(DeadlineUnreachable("needs 30 s", eta_s="30"), id="deadline-unreachable"),
        pytest.param(ContractMismatch("two models", ours="a", theirs="b"), id="contract-mismatch"),
        pytest.param(AlreadyRunning("running"), id="already-running"),
        pytest.param(DataLoss("chunk 3", part="condition", chunk="3"), id="data-loss"),
        pytest.param(NotFound("unknown"), id="not-found"),
        pytest.param(DeadlineExceeded("too late", stage="dit"), id="deadline-exceeded"),
        pytest.param(EngineFailed("internal error 12ab", error_id="12ab"), id="engine-failed"),
        pytest.param(Unavailable("draining", retry_after_s=0.001), id="unavailable"),
    ],
)
def test_errors_arrive_as_they_were_raised(api, error):
    replies = [Reply(error=error)] * 4
    with fake_server(*replies) as server, pytest.raises(MammothError) as caught:
        api.generate(server.address, "a mammoth")
    assert type(caught.value) is type(error)
    assert caught.value.message == error.message
    assert caught.value.retry_after_s == error.retry_after_s
    assert caught.value.metadata == error.metadata


def test_a_server_that_cancels_is_told_from_a_caller_that_does(api):
    with fake_server(Reply(error=Cancelled("shutting down"), num_events=2)) as server, pytest.raises(Cancelled):
        api.generate(server.address, "a mammoth")


def test_a_server_that_hangs_up_before_it_says_anything_is_asked_again(api):
    with fake_server(Reply(error=Cancelled("shutting down"))) as server:
        assert len(api.generate(server.address, "a mammoth", retry=RetryPolicy(first_s=0.001))) == 1
    assert len(server.calls) == 2


@pytest.mark.parametrize(
    ("num_failures", "retry", "num_calls", "ends"),
    [
        pytest.param(0, {}, 1, "picture", id="no-failure"),
        pytest.param(1, {}, 2, "picture", id="one-failure"),
        pytest.param(3, {}, 4, "picture", id="three-failures"),
        pytest.param(4, {}, 4, "error", id="four-failures-are-one-too-many"),
        pytest.param(1, {"max_attempts": 1}, 1, "error", id="no-retries-wanted"),
    ],
)
def test_an_unavailable_server_is_asked_again(api, num_failures, retry, num_calls, ends):
    policy = RetryPolicy(first_s=0.001, **retry)
    with fake_server(*[DRAINING] * num_failures) as server:
        if ends == "picture":
            assert len(api.generate(server.address, "a mammoth", retry=policy)) == 1
        else:
            with pytest.raises(Unavailable, match="draining"):
                api.generate(server.address, "a mammoth", retry=policy)
    assert len(server.calls) == num_calls
    assert len({call.fields["request_id"] for call in server.calls}) == 1


def test_a_full_queue_is_asked_again_when_wanted(api):
    full = Reply(error=Overloaded("full", retry_after_s=0.01))
    with fake_server(full, full) as server:
        assert api.generate(server.address, "a mammoth", retry=RetryPolicy(first_s=0.001, overloaded=True))
    assert len(server.calls) == 3


def test_a_request_that_has_begun_is_not_sent_again(api):
    with fake_server(Reply(error=Unavailable("draining"), num_events=1)) as server, pytest.raises(Unavailable):
        api.generate(server.address, "a mammoth")
    assert len(server.calls) == 1


def test_nobody_there_is_unavailable(api, nowhere):
    with pytest.raises(Unavailable):
        api.generate(nowhere, "a mammoth")
    with pytest.raises(Unavailable):
        api.status(nowhere)


def test_the_deadline_ends_a_request_on_both_sides(api):
    with fake_server(Reply(num_events=2)) as server:
        with pytest.raises(DeadlineExceeded):
            api.generate(server.address, "a mammoth", timeout_s=1.0)
        assert server.calls[0].outcome() == "cancelled"


@pytest.mark.parametrize(("serving", "state"), [(True, "SERVING"), (False, "NOT_SERVING")])
def test_status_tells_the_health_of_every_service(api, serving, state):
    with fake_server(serving=serving) as server:
        services = api.status(server.address)
    assert services == (ServiceHealth("", state), ServiceHealth("mammoth.v1.ImageGeneration", state))
    assert [service.serving for service in services] == [serving, serving]


def test_the_token_travels_with_every_call_and_may_change(api, tmp_path):
    path = tmp_path / "token"
    with fake_server() as server:
        for token in ("one", "two\n"):
            path.write_text(token)
            api.settings(server.address, token_file=path)
    assert [call.metadata["authorization"] for call in server.calls] == ["Bearer one", "Bearer two"]


def test_no_token_no_header(api):
    with fake_server() as server:
        api.settings(server.address)
    assert "authorization" not in server.calls[0].metadata


def test_many_threads_may_share_a_client():
    with fake_server() as server, Client(server.address) as client, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(client.generate, "a mammoth", seed=seed) for seed in range(16)]
        found = [future.result() for future in asked]
    assert [picture.receipt.diffusion.seed for [picture] in found] == list(range(16))


def test_many_tasks_may_share_a_client():
    async def run(address: str) -> list[list[Picture]]:
        async with AsyncClient(address) as client:
            return await asyncio.gather(*(client.generate("a mammoth", seed=seed) for seed in range(16)))

    with fake_server() as server:
        found = asyncio.run(run(server.address))
    assert [picture.receipt.diffusion.seed for [picture] in found] == list(range(16))


def test_pictures_are_saved(tmp_path):
    with fake_server() as server, Client(server.address) as client:
        [picture] = client.generate("a mammoth")
    path = picture.save(tmp_path / "a.png")
    assert path.read_bytes() == picture.png
    assert "png=" not in repr(picture)


def test_a_call_that_goes_on_has_no_outcome():
    with pytest.raises(TimeoutError):
        Call({}, {}).outcome(timeout_s=0.01)
