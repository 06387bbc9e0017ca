"""The committed checkpoint in both production engines, and a small stand-in for the npm package."""

from __future__ import annotations

import io
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # `bench` and `checkpoints` run from the root and are never installed

from mammoth_ar.conditioning import Grid, Sampling, Scope  # noqa: E402
from mammoth_ar.engine import Engine as ArEngine  # noqa: E402
from mammoth_ar.prompt import PromptTemplate  # noqa: E402
from mammoth_ar.sequence import Rows, Running, Sequence  # noqa: E402
from mammoth_ar.testing import open_tokenizer  # noqa: E402
from mammoth_dit.engine import Engine as DitEngine  # noqa: E402
from mammoth_dit.jobs import Job  # noqa: E402
from mammoth_dit.model.weights import load  # noqa: E402
from mammoth_serving.checkpoint import Checkpoint  # noqa: E402
from mammoth_wire.params import Defaults, Diffusion  # noqa: E402

MODEL = ROOT / "checkpoints" / "emoji"
GRID = Grid(8, 8)


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What the AR stage hands over for one prompt."""

    hidden_TH: Tensor
    ids_T: Tensor
    num_prompt: int


class Painter:
    """Both engines as the stages load them on a CPU."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        tokenizer = open_tokenizer(checkpoint)
        self.checkpoint = checkpoint
        self.scope = Scope.parse(checkpoint.generation)
        self.defaults = Defaults.from_generation_config(checkpoint.generation)
        self.template = PromptTemplate.open(checkpoint.path, tokenizer)
        self.ar = ArEngine.load(checkpoint, self.scope, num_slots=4, max_context_tokens=192)
        self.dit = DitEngine(load(checkpoint, dtype=torch.float32))

    def write(self, prompts: list[str], seed: int = 0) -> list[Written]:
        """Decode up to four prompts together."""
        sampling = Sampling(seed, temperature=self.defaults.temperature, top_k=self.defaults.top_k)
        sequences = [Sequence(self.template.render(prompt, GRID).ids, GRID, sampling) for prompt in prompts]
        runnings = [self.ar.admit(sequence) for sequence in sequences]
        parts = [[self._prefill(running)] for running in runnings]
        while not runnings[0].is_done:
            for rows, new in zip(parts, self.ar.decode(runnings), strict=True):
                assert isinstance(new, Rows)
                rows.append(new)
        for running in runnings:
            self.ar.release(running)
        return [
            Written(torch.cat([r.hidden for r in rows]), torch.cat([r.ids for r in rows]), len(sequence.prompt_ids))
            for rows, sequence in zip(parts, sequences, strict=True)
        ]

    def draw(self, written: list[Written], *, seed: int = 0, guidance: float = 4.0, steps: int = 20) -> np.ndarray:
        """Return uint8 [N,128,128,3]."""
        jobs = [self.job(each, seed=seed, guidance=guidance, steps=steps) for each in written]
        return np.stack([picture.rgb for picture in self.dit.sample(jobs)])

    def job(self, written: Written, *, seed: int = 0, guidance: float = 4.0, steps: int = 20) -> Job:
        params = Diffusion(self.defaults.height, self.defaults.width, guidance, (0.0, 1.0), steps)
        return Job("emoji", params, seed, written.hidden_TH, written.ids_T, written.num_prompt)

    def _prefill(self, running: Running) -> Rows:
        rows = self.ar.prefill(running)
        assert isinstance(rows, Rows)
        assert running.is_prefilled
        return rows


@pytest.fixture(scope="session")
def open_painter():
    """Return a function that loads the checkpoint in a folder."""
    return lambda path: Painter(Checkpoint.open(path))


@pytest.fixture(scope="session")
def painter(open_painter) -> Painter:
    return open_painter(MODEL)


@pytest.fixture(scope="session")
def package(tmp_path_factory) -> Path:
    """A work folder with an archive like the npm package: noise under the names of 255 real characters."""
    from checkpoints.emoji.train.data import ARCHIVE

    work = tmp_path_factory.mktemp("emoji")
    random = np.random.default_rng(0)
    with tarfile.open(work / ARCHIVE, "w:gz") as tar:
        for stem in [f"{code_point:x}" for code_point in range(0x1F400, 0x1F4FF)] + ["1f44b-1f3fb", "2764-fe0f"]:
            file = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (32, 32, 4), np.uint8)).save(file, "webp", lossless=True)
            member = tarfile.TarInfo(f"package/assets/{stem}.webp")
            member.size = file.tell()
            file.seek(0)
            tar.addfile(member, file)
    return work
