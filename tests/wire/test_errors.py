"""The error table reads the same in both directions, over a real channel, and stays small."""

from __future__ import annotations

import grpc
import pytest

from mammoth_wire import errors
from mammoth_wire.errors import (
    ContractMismatch,
    EngineFailed,
    InvalidRequest,
    MammothError,
    Overloaded,
    Unavailable,
    as_status,
    from_rpc_error,
)
from mammoth_wire.v1 import control_pb2, control_pb2_grpc

SAMPLES = [
    InvalidRequest([("steps", "0 is not a whole number from 1 to 200"), ("width", "17 is not a multiple of 16")]),
    *(
        kind("something happened", retry_after_s=2.5, stage="dit", chunk="3")
        for kind in errors.ERRORS.values()
        if kind is not InvalidRequest
    ),
]


@pytest.fixture
async def failing_with():
    """A real server whose GetState fails as told, and a caller that returns the typed error."""

    class Failing(control_pb2_grpc.ControlServicer):
        error: Exception

        async def GetState(self, request, context):
            async with as_status(context):
                raise self.error

    servicer = Failing()
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def call(error):
            servicer.error = error
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await control_pb2_grpc.ControlStub(channel).GetState(control_pb2.GetStateRequest())
            return caught.value

        yield call
    await server.stop(None)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
async def test_an_error_crosses_the_wire_unchanged(failing_with, error):
    got = from_rpc_error(await failing_with(error))
    assert type(got) is type(error)
    assert (got.message, got.violations, got.retry_after_s) == (error.message, error.violations, error.retry_after_s)
    assert got.metadata == error.metadata


async def test_a_blocking_client_reads_the_same_error(failing_with):
    err = await failing_with(Overloaded("full", retry_after_s=1.0))

    class Blocking(grpc.RpcError):
        def code(self):
            return err.code()

        def details(self):
            return err.details()

        def trailing_metadata(self):
            return tuple(err.trailing_metadata())

    assert isinstance(from_rpc_error(Blocking()), Overloaded)


async def test_a_bug_becomes_an_id_without_its_text(failing_with, caplog):
    rpc_error = await failing_with(KeyError("the prompt of somebody"))
    got = from_rpc_error(rpc_error)
    assert isinstance(got, EngineFailed)
    assert "prompt" not in str(rpc_error)
    assert got.metadata["error_id"] in [record.error_id for record in caplog.records if hasattr(record, "error_id")]


async def test_trailers_stay_under_4_kib(failing_with):
    rpc_error = await failing_with(InvalidRequest([(f"field{i}", "x" * 5000) for i in range(100)]))
    assert sum(len(key) + len(value) for key, value in rpc_error.trailing_metadata()) < 4096
    assert len(rpc_error.details()) < 2048


async def test_trailers_stay_under_4_kib_in_any_script(failing_with):
    error = ContractMismatch("\u6771" * 50_000, theirs="\u4eac" * 50_000)
    got = from_rpc_error(await failing_with(error))
    assert isinstance(got, ContractMismatch)
    assert got.message.startswith("\u6771\u6771")


async def test_an_unreachable_server_is_unavailable():
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control_pb2_grpc.ControlStub(channel).GetState(control_pb2.GetStateRequest())
    assert isinstance(from_rpc_error(caught.value), Unavailable)


def test_no_two_errors_share_status_and_reason():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MammothError)]
    assert len(errors.ERRORS) == len(kinds) - 1
