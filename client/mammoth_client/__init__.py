"""The client library of mammoth-serve: a prompt in, pictures out, blocking or with asyncio.

    with Client("127.0.0.1:50051") as client:
        [picture] = client.generate("a mammoth in the snow", seed=7)
        picture.save("mammoth.png")

`mammoth_client.testing` has a fake server for your tests, `mammoth_client.pipeline` starts the real stages.
"""

from __future__ import annotations

from mammoth_client._core import RetryPolicy
from mammoth_client.client import AsyncClient, Client
from mammoth_client.receipts import ConditioningParameters, DiffusionParameters, Environment, GenerateFields, Receipt
from mammoth_client.types import (
    Accepted,
    ArProgress,
    Batched,
    Conditioned,
    Done,
    Event,
    Picture,
    Queued,
    ServiceHealth,
    Step,
    Times,
)
from mammoth_wire.errors import (
    AlreadyRunning,
    Cancelled,
    ContractMismatch,
    DataLoss,
    DeadlineExceeded,
    DeadlineUnreachable,
    EngineFailed,
    InvalidRequest,
    MammothError,
    NotFound,
    Overloaded,
    ShapeTooLarge,
    Unavailable,
)

__all__ = [
    "Accepted",
    "AlreadyRunning",
    "ArProgress",
    "AsyncClient",
    "Batched",
    "Cancelled",
    "Client",
    "Conditioned",
    "ConditioningParameters",
    "ContractMismatch",
    "DataLoss",
    "DeadlineExceeded",
    "DeadlineUnreachable",
    "DiffusionParameters",
    "Done",
    "EngineFailed",
    "Environment",
    "Event",
    "GenerateFields",
    "InvalidRequest",
    "MammothError",
    "NotFound",
    "Overloaded",
    "Picture",
    "Queued",
    "Receipt",
    "RetryPolicy",
    "ServiceHealth",
    "ShapeTooLarge",
    "Step",
    "Times",
    "Unavailable",
]
