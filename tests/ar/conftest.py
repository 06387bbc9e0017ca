"""Golden cases as fixtures: every JSON file of the folder is a case, opened through the production loader."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mammoth_ar.conditioning import Scope
from mammoth_ar.engine import Engine
from mammoth_ar.model.config import HeadAlignment, LLMConfig
from mammoth_ar.model.decoder import Decoder
from mammoth_ar.model.weights import load
from mammoth_ar.testing import fast_engine
from mammoth_serving.checkpoint import Checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = Path(os.environ.get("MAMMOTH_GOLDEN", REPOSITORY.parent / "shared" / "golden")) / "ar"
CASES = sorted(GOLDEN.glob("*.json")) if GOLDEN.is_dir() else []


@dataclass(frozen=True)
class Case:
    """One recorded run of the authors' classes; `io` holds float64 or integer tensors by name."""

    facts: dict[str, Any]
    description: dict[str, Any]
    io: dict[str, Tensor]
    checkpoint: Checkpoint

    @property
    def scope(self) -> Scope:
        ids = self.facts["ids"]
        return Scope(ids["eol_token_id"], ids["visual_token_start_id"], ids["visual_token_end_id"])

    def group(self, name: str) -> dict[str, Tensor]:
        found = {key.removeprefix(f"{name}."): value for key, value in self.io.items() if key.startswith(f"{name}.")}
        if not found:
            pytest.skip(f"{self.description['case']} has no {name}.* tensors")
        return found

    def decoder(self, *, head_alignment: HeadAlignment = "concat", dtype: torch.dtype = torch.float32) -> Decoder:
        config = LLMConfig.parse(self.checkpoint.config, head_alignment=head_alignment)
        return load(self.checkpoint, config, dtype=dtype)

    def engine(self, **options: Any) -> Engine:
        decoder = self.decoder(head_alignment=options.pop("head_alignment", "concat"))
        if options.get("exactness") == "fast":
            del options["exactness"]
            return fast_engine(decoder, self.scope, **({"num_slots": 4, "max_context_tokens": 128} | options))
        return Engine(decoder, self.scope, **({"num_slots": 4, "max_context_tokens": 128} | options))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        absent = pytest.param(None, marks=pytest.mark.skip(reason=f"no golden cases in {GOLDEN}"), id="absent")
        cases = [pytest.param(path, id=path.stem) for path in CASES] or [absent]
        metafunc.parametrize("case", cases, indirect=True, scope="session")


@pytest.fixture(scope="session")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    source: Path = request.param
    description = json.loads(source.read_text())
    folder = tmp_path_factory.mktemp(source.stem)
    (folder / "config.json").write_text(json.dumps(description["config"]))
    shutil.copyfile(source.with_suffix(".weights.safetensors"), folder / "model.safetensors")
    io = load_file(source.with_suffix(".io.safetensors"))
    return Case(description["facts"], description, io, Checkpoint.open(folder))
