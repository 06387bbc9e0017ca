"""Decide: what a request becomes, before anything is decoded: one sequence and one announcement a picture.

Everything that can be refused is refused here, naming the field; what depends on load comes last.
"""

from __future__ import annotations

from dataclasses import dataclass

from mammoth_ar.conditioning import Grid, Sampling
from mammoth_ar.prompt import PromptTemplate
from mammoth_ar.sequence import Sequence
from mammoth_wire.durations import duration
from mammoth_wire.errors import DeadlineUnreachable
from mammoth_wire.params import Conditioning, Generation, diffusion_message
from mammoth_wire.tensors import header
from mammoth_wire.v1 import diffusion_pb2, types_pb2

__all__ = ["Order", "RowLayout", "begin_of", "check_deadline", "order_of"]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows that this stage writes: their element type, their width, the contract that they follow."""

    dtype: types_pb2.DType.ValueType
    width: int
    contract: str


@dataclass(frozen=True, slots=True)
class Order:
    """A request with nothing left open: one sequence a picture, whose seeds count up from `seed`."""

    request_id: str
    generation: Generation
    seed: int
    sequences: tuple[Sequence, ...]


def order_of(generation: Generation, template: PromptTemplate, *, request_id: str, seed: int) -> Order:
    """Return the order for `generation`, with the id and the seed that it gets where the caller left them out.

    Raises InvalidRequest when prompt or negative prompt spell a special token.
    """
    conditioning = generation.conditioning
    grid = Grid(conditioning.ar_height, conditioning.ar_width)
    prompt = template.render(generation.prompt, grid)
    negative = template.render_negative(generation.negative_prompt) if generation.negative_prompt.strip() else ()
    sequences = tuple(
        Sequence(
            prompt_ids=prompt.ids,
            grid=grid,
            sampling=_sampling(conditioning, seed + index),
            tail_ids=prompt.tail_ids,
            negative_ids=negative,
        )
        for index in range(generation.num_images)
    )
    return Order(request_id, generation, seed, sequences)


def begin_of(
    job_id: str, sequence: Sequence, generation: Generation, layout: RowLayout, expected_in_s: float | None
) -> diffusion_pb2.Begin:
    """Return the announcement of a picture: every row that will come is known from the grid."""
    num_prompt, num_negative = len(sequence.prompt_ids), len(sequence.negative_ids)
    negative = header("negative_rows", layout.dtype, num_negative, layout.width) if num_negative else None
    return diffusion_pb2.Begin(
        job_id=job_id,
        parameters=diffusion_message(generation.diffusion, sequence.sampling.seed),
        rows=header("rows", layout.dtype, num_prompt + sequence.grid.num_tokens, layout.width),
        negative_rows=negative,
        answer_start_index=num_prompt,
        contract=layout.contract,
        expected_in=duration(expected_in_s),
    )


def check_deadline(estimate_s: float | None, remaining_s: float) -> None:
    """Raise DeadlineUnreachable when the rows alone would take longer than the caller allows."""
    if estimate_s is not None and estimate_s > remaining_s:
        text = f"decoding would take about {estimate_s:.1f} s, the deadline allows {remaining_s:.1f} s"
        raise DeadlineUnreachable(text, eta_s=f"{estimate_s:.1f}")


def _sampling(conditioning: Conditioning, seed: int) -> Sampling:
    return Sampling(
        seed=seed,
        ar_guidance=conditioning.ar_guidance,
        temperature=conditioning.temperature,
        top_k=conditioning.top_k,
        top_p=conditioning.top_p,
        repetition_penalty=conditioning.repetition_penalty,
    )
