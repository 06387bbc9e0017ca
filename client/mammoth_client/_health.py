"""Translate: grpc.health.v1 to ServiceHealth and back, for either kind of channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from mammoth_client.types import ServiceHealth
from mammoth_wire.errors import MammothError, NotFound

__all__ = ["SERVICES", "checker", "health_of", "health_without", "question"]

SERVICES = ("", "mammoth.v1.ImageGeneration")


def checker(channel: Any) -> Callable[..., Any]:
    """Return Health/Check of a blocking or asyncio channel; the published type stubs leave it out."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    check: Callable[..., Any] = stub.Check
    return check


def question(service: str) -> health_pb2.HealthCheckRequest:
    """Return the request that asks for the health of `service`."""
    return health_pb2.HealthCheckRequest(service=service)


def health_of(service: str, answer: health_pb2.HealthCheckResponse) -> ServiceHealth:
    """Return what the server said."""
    return ServiceHealth(service, health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def health_without(service: str, err: MammothError) -> ServiceHealth:
    """Return the health of a service that the server does not know; raise any other failure."""
    if not isinstance(err, NotFound):
        raise err
    return ServiceHealth(service, "SERVICE_UNKNOWN")
