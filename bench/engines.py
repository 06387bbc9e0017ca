"""Do: draw a picture with both engines in this process: no service, no queue, no event loop, nothing on a wire.

The request is resolved, rendered and turned into a job by the stages' own code, so that the work is the same as theirs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mammoth_ar.admission import order_of
from mammoth_ar.conditioning import Scope
from mammoth_ar.engine import Engine as ArEngine
from mammoth_ar.model.decoder import Decoder
from mammoth_ar.prompt import PromptTemplate
from mammoth_ar.sequence import Rows, Sequence
from mammoth_ar.testing import open_tokenizer
from mammoth_dit import png
from mammoth_dit.engine import Engine as DitEngine
from mammoth_dit.jobs import Job, Picture
from mammoth_dit.model.weights import load
from mammoth_serving.checkpoint import Checkpoint
from mammoth_wire.params import Defaults, resolve_generation

__all__ = ["Drawn", "Engines"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a picture took in each engine, and its digest. AR: prefill and decode. DiT: conditioning, denoising, VAE, PNG.

    CPU seconds are those of the calling thread, which does all the work when torch has one thread.
    """

    ar_s: float
    ar_cpu_s: float
    dit_s: float
    dit_cpu_s: float
    rgb_sha256: str


class Engines:
    """Both engines of a checkpoint, float32 on the CPU, strict: as the stages load them there."""

    def __init__(self, model: Path, *, num_slots: int, max_context_tokens: int) -> None:
        checkpoint = Checkpoint.open(model)
        tokenizer = open_tokenizer(checkpoint)
        self._defaults = Defaults.from_generation_config(checkpoint.generation)
        self._template = PromptTemplate.open(checkpoint.path, tokenizer)
        self._ar = ArEngine.load(
            checkpoint,
            Scope.parse(checkpoint.generation, tokenizer.scope()),
            num_slots=num_slots,
            max_context_tokens=max_context_tokens,
        )
        self._dit = DitEngine(load(checkpoint, dtype=torch.float32))

    @property
    def decoder(self) -> Decoder:
        """The LLM, whose weights a caller may change between pictures."""
        return self._ar.decoder

    def draw(self, fields: Mapping[str, Any]) -> Drawn:
        """Draw the picture of a request with a seed and no negative prompt; raise the error of the engine that fails."""
        began = _now()
        job = self.job(fields)
        decoded = _now()
        picture = self.sample(job)
        png.encode(picture.rgb)
        drawn = _now()
        (ar_s, ar_cpu_s), (dit_s, dit_cpu_s) = decoded - began, drawn - decoded
        return Drawn(float(ar_s), float(ar_cpu_s), float(dit_s), float(dit_cpu_s), picture.rgb_sha256)

    def sample(self, job: Job) -> Picture:
        """Run the DiT stage's half; raise the engine's error."""
        [picture] = self._dit.sample([job])
        if not isinstance(picture, Picture):
            raise picture
        return picture

    def job(self, fields: Mapping[str, Any]) -> Job:
        """Run the AR stage's half of a request and return what the DiT stage would receive."""
        generation = resolve_generation(fields, defaults=self._defaults)
        assert generation.seed is not None, "both sides must draw the same picture"
        order = order_of(generation, self._template, request_id="bench", seed=generation.seed)
        [sequence] = order.sequences
        rows = self._decode(sequence)
        return Job(
            id="bench",
            params=generation.diffusion,
            seed=generation.seed,
            hidden_TH=torch.cat([part.hidden for part in rows]),
            token_ids_T=torch.cat([part.ids for part in rows]),
            answer_start=len(sequence.prompt_ids),
        )

    def _decode(self, sequence: Sequence) -> list[Rows]:
        """Return the condition rows of a sequence, prompt and grid."""
        running = self._ar.admit(sequence)
        parts = []
        while not running.is_prefilled:
            parts.append(self._ar.prefill(running))
        while not running.is_done:
            parts += self._ar.decode([running])
        self._ar.release(running)
        return [_rows(part) for part in parts if part is not None]


def _now() -> npt.NDArray[np.float64]:
    """Return wall and CPU seconds."""
    return np.array([time.perf_counter(), time.thread_time()])


def _rows(outcome: Rows | Exception) -> Rows:
    if not isinstance(outcome, Rows):
        raise outcome
    return outcome
