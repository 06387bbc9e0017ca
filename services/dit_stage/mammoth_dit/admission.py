"""Decide whether a picture may enter: every rule before the queue, so that a bad request dies alone. Pure.

A rule is a function, the tuple is the policy: what can never work comes before what cannot work now. Sizes, steps, guidance
and range are the resolver's (`mammoth_wire.params`); its result is part of an Ask and is never derived again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mammoth_dit.memory import Memory
from mammoth_dit.model.config import ModelConfig, RotaryConfig, TokenIds
from mammoth_dit.selection import count_rows
from mammoth_wire.errors import (
    AlreadyRunning,
    DeadlineUnreachable,
    InvalidRequest,
    MammothError,
    Overloaded,
    ShapeTooLarge,
    Unavailable,
)
from mammoth_wire.params import MAX_SEED, UNBOUNDED, Bounds, Defaults, Diffusion, resolve_diffusion

__all__ = ["IDLE", "Ask", "Limits", "Load", "admit", "refusal"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model can take, and how much of it this deployment accepts. None switches a bound off."""

    llm_width: int
    tokens: TokenIds
    rotary: RotaryConfig
    num_queries: int | None
    side_multiple_px: int
    max_rows: int | None = None
    max_payload_bytes: int | None = None
    memory: Memory | None = None

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        *,
        max_rows: int | None = None,
        max_payload_bytes: int | None = None,
        memory: Memory | None = None,
    ) -> Limits:
        return cls(
            llm_width=config.llm_width,
            tokens=config.tokens,
            rotary=config.rotary,
            num_queries=config.num_queries,
            side_multiple_px=config.transformer.side_multiple_px,
            max_rows=max_rows,
            max_payload_bytes=max_payload_bytes,
            memory=memory,
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to draw one picture, as far as it is known: headers first, ids when the rows are complete.

    `hidden_shape` None means that no condition is announced, `token_ids` None that its rows are still to come (rules that
    need them pass). `synthetic` is the engine's own warm-up, which needs no condition.
    """

    job_id: str
    params: Diffusion
    seed: int = 0
    hidden_shape: tuple[int, ...] | None = None
    token_ids: Sequence[int] | None = None
    answer_start: int = 0
    negative_shape: tuple[int, ...] | None = None
    item_bytes: int = 4
    finite: bool = True
    num_generators: int = 1
    budget_s: float | None = None
    synthetic: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """How busy this replica is. `eta_s` is the estimate for the asked picture, None before anything was measured."""

    active_ids: frozenset[str] = frozenset()
    draining: bool = False
    queue_depth: int = 0
    max_queue: int | None = None
    eta_s: float | None = None
    retry_after_s: float | None = None


IDLE = Load()
Rule = Callable[[Ask, Load, Limits], MammothError | None]


def _invalid(field: str, text: str) -> InvalidRequest:
    return InvalidRequest([(field, text)])


def seed_is_in_range(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    if not 0 <= ask.seed <= MAX_SEED:
        return _invalid("seed", f"{ask.seed} is not a whole number from 0 to {MAX_SEED}")
    return None


def one_generator_draws_the_noise(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    if ask.num_generators != 1:
        return _invalid("generator", f"{ask.num_generators} generators for one picture")
    return None


def sides_fit_the_patches(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    for field, side_px in (("height", ask.params.height), ("width", ask.params.width)):
        if side_px % limits.side_multiple_px:
            return _invalid(field, f"{side_px} is not a multiple of {limits.side_multiple_px}")
    return None


def the_picture_fits_the_device(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    height_px, width_px = ask.params.height, ask.params.width
    if limits.memory is None or limits.memory.fits(height_px, width_px):
        return None
    side_px = limits.memory.largest_side_px()
    limit = f"{side_px}x{side_px} pixels"
    return ShapeTooLarge(f"{width_px}x{height_px} pixels do not fit in this device's memory, {limit} do", limit=limit)


def a_condition_is_announced(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    if ask.hidden_shape is None:
        return _invalid("rows", "missing: hidden states and token ids of the AR stage")
    return None


def rows_are_hidden_states(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    for field, shape in (("rows", ask.hidden_shape), ("negative_rows", ask.negative_shape)):
        if shape is not None and (len(shape) != 2 or shape[1] != limits.llm_width):
            return _invalid(field, f"shape {list(shape)} is not [T, {limits.llm_width}]")
    return None


def rows_are_not_too_many(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    num_rows = _num_rows(ask.hidden_shape) + _num_rows(ask.negative_shape)
    if limits.max_rows is not None and num_rows > limits.max_rows:
        return _invalid("rows", f"{num_rows} rows, at most {limits.max_rows}")
    num_bytes = num_rows * limits.llm_width * ask.item_bytes
    if limits.max_payload_bytes is not None and num_bytes > limits.max_payload_bytes:
        return _invalid("rows", f"{num_bytes} bytes, at most {limits.max_payload_bytes}")
    return None


def the_answer_starts_inside(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    num_rows = _num_rows(ask.hidden_shape)
    if not 0 <= ask.answer_start <= num_rows:
        return _invalid("answer_start_index", f"{ask.answer_start} is outside 0..{num_rows}")
    return None


def every_row_has_an_id(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    num_rows = _num_rows(ask.hidden_shape)
    if ask.token_ids is not None and len(ask.token_ids) != num_rows:
        return _invalid("token_ids", f"{len(ask.token_ids)} ids for {num_rows} rows")
    return None


def an_image_row_exists(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    if ask.answer_start == _num_rows(ask.hidden_shape):
        return _invalid("answer_start_index", "no row lies in the answer")
    if ask.token_ids is not None and count_rows(ask.token_ids, ask.answer_start, limits.tokens)[1] == 0:
        return _invalid("token_ids", f"no id of the answer reaches {limits.tokens.gen_vocab_start}: no visual token")
    return None


def every_position_is_in_the_tables(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    num_text, num_image = (
        (0, 1) if ask.token_ids is None else count_rows(ask.token_ids, ask.answer_start, limits.tokens)
    )
    num_condition = num_text + (num_image if limits.num_queries is None else limits.num_queries)
    num_rows, num_columns = (side // limits.side_multiple_px for side in (ask.params.height, ask.params.width))
    for field, num_caption in (("rows", num_condition), ("negative_rows", _num_rows(ask.negative_shape))):
        if not limits.rotary.admits(num_caption, num_rows, num_columns):
            over = f"{num_caption} caption tokens with {num_rows} x {num_columns} patches"
            return _invalid(field, f"{over} exceed the rotary tables {list(limits.rotary.lengths)}")
    return None


def hidden_states_are_finite(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    return None if ask.finite else _invalid("rows", "a hidden state is not finite")


def the_id_is_free(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    return AlreadyRunning(f"job {ask.job_id} is running") if ask.job_id in load.active_ids else None


def the_replica_takes_work(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    return Unavailable("draining", retry_after_s=load.retry_after_s) if load.draining else None


def the_queue_has_room(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    if load.max_queue is not None and load.queue_depth >= load.max_queue:
        return Overloaded(f"{load.queue_depth} jobs wait, the queue is full", retry_after_s=load.retry_after_s)
    return None


def the_deadline_can_be_met(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    if ask.budget_s is not None and load.eta_s is not None and load.eta_s > ask.budget_s:
        text = f"the picture would take about {load.eta_s:.1f} s, the caller allows {ask.budget_s:.1f} s"
        return DeadlineUnreachable(text, eta_s=f"{load.eta_s:.1f}")
    return None


PARAMETER_RULES: Sequence[Rule] = (
    seed_is_in_range,
    one_generator_draws_the_noise,
    sides_fit_the_patches,
    the_picture_fits_the_device,
)
CONDITION_RULES: Sequence[Rule] = (
    a_condition_is_announced,
    rows_are_hidden_states,
    rows_are_not_too_many,
    the_answer_starts_inside,
    every_row_has_an_id,
    an_image_row_exists,
    every_position_is_in_the_tables,
    hidden_states_are_finite,
)
LOAD_RULES: Sequence[Rule] = (the_id_is_free, the_replica_takes_work, the_queue_has_room, the_deadline_can_be_met)


def refusal(ask: Ask, load: Load, limits: Limits) -> MammothError | None:
    """Return the first reason not to take `ask`, or None."""
    condition = () if ask.synthetic else CONDITION_RULES
    rules = (*PARAMETER_RULES, *condition, *LOAD_RULES)
    return next((err for rule in rules if (err := rule(ask, load, limits)) is not None), None)


def admit(
    request: Mapping[str, Any],
    limits: Limits,
    *,
    load: Load = IDLE,
    bounds: Bounds = UNBOUNDED,
    defaults: Defaults = Defaults(),
    synthetic: bool = False,
) -> Ask:
    """Resolve and check a neutral request (`id`, `prompt`, `sampling`, `additional_information`, `ar`), or raise its refusal.

    `ar` holds `hidden_shape`, `token_ids`, `answer_start_index` and, optionally, `negative_shape`. `synthetic` is the
    engine's to say, never the request's.
    """
    params = resolve_diffusion(request, defaults=defaults, bounds=bounds)
    sampling = request.get("sampling") or {}
    ar = request.get("ar")
    generator = sampling.get("generator")
    ask = Ask(
        job_id=str(request.get("id", "")),
        params=params,
        seed=_whole("seed", sampling.get("seed") or 0),
        num_generators=len(generator) if isinstance(generator, list | tuple) else 1,
        synthetic=synthetic,
        **({} if synthetic or ar is None else _condition(ar)),
    )
    if (err := refusal(ask, load, limits)) is not None:
        raise err
    return ask


def _condition(ar: Mapping[str, Any]) -> dict[str, Any]:
    shape, ids, negative = ar.get("hidden_shape"), ar.get("token_ids"), ar.get("negative_shape")
    if not isinstance(shape, list | tuple):
        raise _invalid("rows", "hidden states are no tensor")
    if not isinstance(ids, list | tuple):
        raise _invalid("token_ids", "not a list")
    return {
        "hidden_shape": tuple(shape),
        "token_ids": [_whole("token_ids", token_id) for token_id in ids],
        "answer_start": _whole("answer_start_index", ar.get("answer_start_index")),
        "negative_shape": None if negative is None else tuple(negative),
    }


def _whole(field: str, value: Any) -> int:
    """Return `value` as an int; nothing is truncated, neither a fraction nor a boolean."""
    try:
        number = int(value)
        exact = not isinstance(value, bool) and (isinstance(value, str) or number == value)
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact:
        raise _invalid(field, f"{value!r:.40} is not a whole number")
    return number


def _num_rows(shape: tuple[int, ...] | None) -> int:
    return shape[0] if shape else 0
