"""Translate: the messages of one Denoise stream to an Ask and, when its rows are complete, to a Job."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mammoth_dit.admission import Ask, Limits
from mammoth_dit.jobs import Job
from mammoth_wire.errors import ContractMismatch, InvalidRequest
from mammoth_wire.params import Bounds, neutral_diffusion, resolve_diffusion
from mammoth_wire.tensors import Assembler, Rows
from mammoth_wire.v1 import diffusion_pb2, types_pb2

__all__ = ["Intake", "ask_of"]

MAX_CONTRACT_CHARS = 80  # of a contract that we do not know
NEGATIVE = diffusion_pb2.RowChunk.PART_NEGATIVE
CONDITION = diffusion_pb2.RowChunk.PART_CONDITION
TORCH_TYPES = {
    types_pb2.DTYPE_FLOAT32: (np.int32, torch.float32),
    types_pb2.DTYPE_BFLOAT16: (np.int16, torch.bfloat16),
    types_pb2.DTYPE_FLOAT16: (np.int16, torch.float16),
}


def ask_of(begin: diffusion_pb2.Begin, *, contract: str, bounds: Bounds, budget_s: float) -> Ask:
    """Return what `begin` asks for, as far as it is known before the rows.

    Raises InvalidRequest for parameters outside `bounds`, ContractMismatch when the AR stage serves another model.
    """
    if begin.contract != contract:
        theirs = begin.contract[:MAX_CONTRACT_CHARS]
        text = f"the rows are of contract {theirs!r}, this replica serves {contract!r}"
        raise ContractMismatch(text, ours=contract, theirs=theirs)
    negative = tuple(begin.negative_rows.shape) if begin.HasField("negative_rows") else None
    return Ask(
        job_id=begin.job_id,
        params=resolve_diffusion(neutral_diffusion(begin.parameters), bounds=bounds),
        seed=begin.parameters.seed,
        hidden_shape=tuple(begin.rows.shape) if begin.HasField("rows") else None,
        answer_start=begin.answer_start_index,
        negative_shape=negative,
        budget_s=budget_s,
    )


class Intake:
    """Owns the rows of one admitted picture while they arrive: negative rows, if announced, then condition rows."""

    def __init__(self, begin: diffusion_pb2.Begin, ask: Ask, limits: Limits) -> None:
        def assembler(head: types_pb2.TensorHeader, field: str, part: str) -> Assembler:
            max_rows = limits.max_rows if limits.max_rows is not None else math.prod(head.shape[:1])
            return Assembler(head, field=field, part=part, width=limits.llm_width, max_rows=max_rows)

        self._ask = ask
        self._rows = assembler(begin.rows, "rows", "condition")
        announced = begin.HasField("negative_rows")
        self._negative = assembler(begin.negative_rows, "negative_rows", "negative") if announced else None

    def take(self, chunk: diffusion_pb2.RowChunk) -> int:
        """Check and store a chunk; return its bytes. Raises DataLoss or InvalidRequest naming it."""
        if chunk.part == NEGATIVE and self._negative is not None:
            self._negative.add(chunk)
        elif chunk.part == CONDITION and (self._negative is None or self._negative.complete):
            self._rows.add(chunk)
        else:
            order = "negative rows first, then condition rows" if self._negative is not None else "condition rows alone"
            raise InvalidRequest([("rows.part", f"{chunk.part} does not come next; announced: {order}")])
        return len(chunk.data)

    def finish(self, end: diffusion_pb2.End) -> tuple[Ask, Job]:
        """Return the completed Ask and its Job. Raises DataLoss when counts or digests disagree."""
        rows = self._rows.finish(end.num_rows, end.sha256)
        negative = self._negative.finish(end.num_negative_rows, end.negative_sha256) if self._negative else None
        job = Job(
            id=self._ask.job_id,
            params=self._ask.params,
            seed=self._ask.seed,
            hidden_TH=_tensor(rows),
            token_ids_T=torch.from_numpy(rows.ids),
            answer_start=self._ask.answer_start,
            negative_LH=None if negative is None else _tensor(negative),
        )
        return replace(self._ask, token_ids=rows.ids.tolist()), job


def _tensor(rows: Rows) -> Tensor:
    """View received bits [T, H] as a tensor of their element type, without a copy."""
    bits, dtype = TORCH_TYPES[rows.dtype]
    return torch.from_numpy(rows.bits.view(bits)).view(dtype)
