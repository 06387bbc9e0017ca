"""Both stages refuse what they cannot serve before they load it, with an error that `run_stage` turns into exit code 2."""

from __future__ import annotations

import json
import shutil

import pytest

from mammoth_ar.settings import ArSettings
from mammoth_ar.stage import ArStage
from mammoth_dit.settings import DitSettings
from mammoth_dit.stage import DitStage
from mammoth_serving.checkpoint import CheckpointError
from mammoth_serving.config import ConfigError
from mammoth_serving.lifecycle import Gate

BOTH_STAGES = pytest.mark.parametrize(
    ("stage", "settings"), [(ArStage, ArSettings), (DitStage, DitSettings)], ids=["ar", "dit"]
)


@BOTH_STAGES
@pytest.mark.parametrize("device", ["banana", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_refused(stage, settings, device):
    with pytest.raises(ConfigError, match=f"--device: '{device}' is not cpu, cuda or cuda:N of this machine"):
        stage(settings(model="never-opened", device=device), Gate())


@BOTH_STAGES
async def test_an_unusable_generation_default_is_refused(stage, settings, tiny_checkpoint, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint, folder)
    path = folder / "t2i_generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"height": 100}))
    with pytest.raises(CheckpointError, match="t2i_generation_config.json: height: 100 is not a multiple of 16"):
        await stage(settings(model=str(folder)), Gate()).start()
