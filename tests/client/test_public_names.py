"""What users may import, pinned, and what an import may not drag in."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import mammoth_client
import mammoth_client.pipeline
import mammoth_client.testing
from mammoth_client import AsyncClient, Client, GenerateFields
from mammoth_wire import params

PUBLIC = [
    "Accepted", "AlreadyRunning", "ArProgress", "AsyncClient", "Batched", "Cancelled", "Client", "Conditioned",
    "ConditioningParameters", "ContractMismatch", "DataLoss", "DeadlineExceeded", "DeadlineUnreachable",
    "DiffusionParameters", "Done", "EngineFailed", "Environment", "Event", "GenerateFields", "InvalidRequest",
    "MammothError", "NotFound", "Overloaded", "Picture", "Queued", "Receipt", "RetryPolicy", "ServiceHealth",
    "ShapeTooLarge", "Step", "Times", "Unavailable",
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "names"),
    [
        pytest.param(mammoth_client, PUBLIC, id="mammoth_client"),
        pytest.param(
            mammoth_client.testing,
            ["Call", "FakeServer", "Outcome", "Pipeline", "Reply", "fake_server", "pipeline"],
            id="testing",
        ),
        pytest.param(mammoth_client.pipeline, ["FlagValue", "Pipeline", "pipeline", "stage_flags"], id="pipeline"),
    ],
)
def test_public_names_are_pinned_and_there(module, names):
    assert module.__all__ == names
    assert all(hasattr(module, name) for name in names)


def test_both_clients_have_the_same_surface():
    def surface(client: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(client, callable)
            if not name.startswith("_")
        }

    assert surface(Client) == surface(AsyncClient)
    assert list(surface(Client)) == ["close", "from_env", "generate", "status", "stream"]
    assert inspect.signature(Client) == inspect.signature(AsyncClient)


def test_typed_fields_are_those_of_the_resolver():
    assert {"prompt", *GenerateFields.__annotations__} == set(params.FIELDS)


def test_importing_everything_needs_neither_torch_nor_kopf_nor_pillow_nor_another_package_of_ours():
    program = (
        "import sys, mammoth_client.__main__, mammoth_client.testing; "
        "print(sorted({'torch', 'kopf', 'PIL', 'mammoth_serving', 'mammoth_ar', 'mammoth_dit'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
