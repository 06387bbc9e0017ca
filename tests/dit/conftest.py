"""Golden cases found by kind, and the real engine at toy width."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mammoth_dit.engine import Engine, Exactness
from mammoth_dit.engines import Kernels, open_engine
from mammoth_dit.fast.engine import FastEngine
from mammoth_dit.jobs import Job
from mammoth_dit.model.weights import load
from mammoth_dit.testing import TinyEngine
from mammoth_serving.checkpoint import Checkpoint
from mammoth_wire.params import Diffusion

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = Path(os.environ.get("MAMMOTH_GOLDEN", REPOSITORY.parent / "shared" / "golden")) / "dit"
KINDS = {
    "forward_case": "single transformer forward",
    "loop_case": "complete denoise loop + VAE decode",
    "noise_case": "initial noise",
    "policy_case": "admission, grouping and CFG activity tables (no tensors)",
    "qformer_case": "Q-Former image refiner",
    "scheduler_case": "scheduler",
}


@dataclass(frozen=True)
class Case:
    """One folder of recorded values of the authors' modules; `facts` is its case.json."""

    path: Path
    facts: dict[str, Any]

    @cached_property
    def io(self) -> dict[str, Tensor]:
        return load_file(self.path / "io.safetensors")

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint.open(self.path)

    def checkpoint_in(self, folder: Path) -> Checkpoint:
        """Open the case's weights under an empty configuration, for a case without one."""
        (folder / "config.json").write_text("{}")
        shutil.copyfile(self.path / "model.safetensors", folder / "model.safetensors")
        return Checkpoint.open(folder)

    def engine(
        self, dtype: torch.dtype = torch.float32, exactness: Exactness = "strict", kernels: Kernels = "plain"
    ) -> Engine:
        """The engine of a path; the fast one steps all rows of a picture size together."""
        engine = open_engine(load(self.checkpoint, dtype=dtype), kernels=kernels, exactness=exactness)
        assert isinstance(engine, FastEngine) == (kernels == "fast")
        if isinstance(engine, FastEngine):
            for job in self.jobs:
                engine.take_times(job.key[:2], {1: 8.0, 8: 1.0})
        return engine

    def job(self, request: dict[str, Any]) -> Job:
        inputs = f"inputs/{request['id']}"
        shared = self.io.get("inputs/negative_hidden_states")
        negative = self.io.get(f"{inputs}/negative_hidden_states", shared)
        return Job(
            id=request["id"],
            params=Diffusion(
                height=request["height"],
                width=request["width"],
                guidance=request["text_guidance_scale"],
                cfg_range=tuple(request["cfg_range"]),
                steps=request["num_inference_steps"],
            ),
            seed=request["noise_seed"],
            hidden_TH=self.io[f"{inputs}/full_hidden_states"],
            token_ids_T=self.io[f"{inputs}/full_token_ids"],
            answer_start=request["answer_start_index"],
            negative_LH=None if negative is None else negative.flatten(0, -2),
        )

    @property
    def jobs(self) -> list[Job]:
        return [self.job(request) for request in self.facts.get("requests", [])]


def found(kind: str) -> list[Case]:
    files = sorted(GOLDEN.glob("*/case.json")) if GOLDEN.is_dir() else []
    cases = [Case(file.parent, json.loads(file.read_text())) for file in files]
    return [case for case in cases if case.facts["kind"] == kind]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in KINDS.keys() & set(metafunc.fixturenames):
        absent = pytest.param(None, marks=pytest.mark.skip(reason=f"no '{KINDS[name]}' in {GOLDEN}"), id="absent")
        cases = [pytest.param(case, id=case.path.name) for case in found(KINDS[name])] or [absent]
        metafunc.parametrize(name, cases, scope="session")


@pytest.fixture(scope="session", params=["preview", "dev"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def strict(family: Any, tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    return TinyEngine(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="session")
def tolerant(family: Any, tmp_path_factory: pytest.TempPathFactory) -> TinyEngine:
    return TinyEngine(tmp_path_factory.mktemp(family), family, exactness="tolerant")
