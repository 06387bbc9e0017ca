"""Where a client connects, from the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from mammoth_client import AsyncClient, Client, InvalidRequest
from mammoth_client.settings import Settings


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, Settings(), id="nothing-set"),
        pytest.param({"MAMMOTH_ADDRESS": "", "MAMMOTH_TIMEOUT_S": ""}, Settings(), id="empty-is-absent"),
        pytest.param({"MAMMOTH_ADDRESS": "dns:///ar:50051"}, Settings(address="dns:///ar:50051"), id="address"),
        pytest.param({"MAMMOTH_TIMEOUT_S": "12.5"}, Settings(timeout_s=12.5), id="timeout"),
        pytest.param({"MAMMOTH_TOKEN_FILE": "/run/token"}, Settings(token_file=Path("/run/token")), id="token"),
    ],
)
def test_the_environment_is_read(environ, expected, monkeypatch):
    assert Settings.from_env(environ) == expected
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with Client.from_env() as client:
        assert client.settings == expected
    assert AsyncClient.from_env().settings == expected


@pytest.mark.parametrize("text", ["0", "-1", "3601", "nan", "soon"])
def test_a_bad_timeout_names_its_variable(text):
    with pytest.raises(InvalidRequest, match="MAMMOTH_TIMEOUT_S: "):
        Settings.from_env({"MAMMOTH_TIMEOUT_S": text})


def test_a_bad_timeout_of_the_constructor_is_refused():
    with pytest.raises(InvalidRequest, match="timeout_s: 4000 is not"):
        Client(timeout_s=4000)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="missing"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe", id="not-ascii"),
        pytest.param(b"one\ntwo", id="two-lines"),
    ],
)
def test_an_unusable_token_file_is_named(content, tmp_path):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidRequest, match="token_file: "):
        Settings(token_file=path).metadata()
