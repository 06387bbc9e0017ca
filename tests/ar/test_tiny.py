"""The tiny checkpoint is a checkpoint: written twice it is the same, and the production loader takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mammoth_ar.model.config import LLMConfig
from mammoth_ar.model.weights import load
from mammoth_ar.tiny import SHARD, main
from mammoth_serving.checkpoint import Checkpoint
from mammoth_serving.tiny import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_the_command_writes_a_checkpoint_that_loads(tmp_path: Path, family: str) -> None:
    main([str(tmp_path / "new"), "--family", family])
    checkpoint = Checkpoint.open(tmp_path / "new")
    config = LLMConfig.parse(checkpoint.config)
    assert config.family == family
    assert load(checkpoint, config).config == config


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        main([str(tmp_path / name)])
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert files[0] == files[1]
    assert SHARD in files[0]
