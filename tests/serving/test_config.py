"""Settings from flags and environment: a flag wins, and every bad value is reported at once."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from mammoth_serving.config import ConfigError, ServingSettings, load


def read(*argv: str, **environ: str) -> ServingSettings:
    return load(ServingSettings, argv, environ, prog="mammoth-test")


def test_defaults_are_the_documented_ports():
    settings = read("--model", "somewhere")
    assert (settings.port, settings.control_port, settings.health_port, settings.metrics_port) == (
        50051,
        50052,
        50053,
        9090,
    )
    assert settings.exactness == "strict"


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_default():
    settings = read(
        "--max-num-seqs=4",
        MAMMOTH_MODEL="m",
        MAMMOTH_MAX_NUM_SEQS="3",
        MAMMOTH_DRAIN_SECONDS="1.5",
        MAMMOTH_REFLECTION="yes",
    )
    assert (settings.model, settings.max_num_seqs, settings.drain_seconds, settings.reflection) == ("m", 4, 1.5, True)


def test_every_bad_value_is_reported_at_once_with_what_it_may_be():
    with pytest.raises(ConfigError) as caught:
        read(
            "--port",
            "70000",
            "--exactness",
            "loose",
            "--bogus",
            "1",
            MAMMOTH_CAPACITY="many",
            MAMMOTH_DRAIN_SECONDS="nan",
            MAMMOTH_REFLECTION="maybe",
        )
    lines = str(caught.value).splitlines()
    assert "--bogus: unknown flag (see --help)" in lines
    assert "--model (or MAMMOTH_MODEL): required: checkpoint folder, or hub repository OWNER/NAME[@REVISION]" in lines
    assert "--port: '70000' is not a whole number from 0 to 65535" in lines
    assert "MAMMOTH_CAPACITY: 'many' is not a whole number from 1 to 1024" in lines
    assert "MAMMOTH_DRAIN_SECONDS: 'nan' is not a number from 0 to 3600" in lines
    assert "--exactness: 'loose' is not one of strict, tolerant" in lines
    assert any(line.startswith("MAMMOTH_REFLECTION: 'maybe' is not one of 1, true") for line in lines)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--device", "cpu"], "float32"),
        (["--device", "cuda:1"], "bfloat16"),
        (["--device", "cpu", "--dtype", "bfloat16"], "bfloat16"),
        (["--device", "cuda", "--dtype", "float32"], "float32"),
    ],
)
def test_the_element_type_follows_the_device_unless_it_is_named(argv, expected):
    assert read("--model", "m", *argv).dtype_name == expected


def test_settings_are_frozen():
    with pytest.raises(FrozenInstanceError):
        read("--model", "m").port = 1


def test_help_names_every_flag_and_variable(capsys):
    with pytest.raises(SystemExit, match="0"):
        read("--help")
    text = capsys.readouterr().out
    for item in fields(ServingSettings):
        assert "--" + item.name.replace("_", "-") in text
        assert "MAMMOTH_" + item.name.upper() in text.replace("\n", "").replace(" ", "")
