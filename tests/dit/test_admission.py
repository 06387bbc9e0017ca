"""Every rule before the queue: who is refused, by which field, and which reason comes first."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mammoth_dit.admission import IDLE, Ask, Limits, Load, admit, refusal
from mammoth_dit.model.config import ModelConfig, RotaryConfig, TokenIds
from mammoth_serving.tiny import tiny_config
from mammoth_wire.errors import AlreadyRunning, DeadlineUnreachable, InvalidRequest, Overloaded, Unavailable
from mammoth_wire.params import Bounds, Diffusion

LIMITS = Limits(
    llm_width=8,
    tokens=TokenIds(200, frozenset({190})),
    rotary=RotaryConfig((2, 2, 2), (20, 16, 16)),
    num_queries=4,
    side_multiple_px=16,
    max_rows=30,
    max_payload_bytes=900,
)
PARAMS = Diffusion(32, 48, guidance=4.0, cfg_range=(0.0, 1.0), steps=7)
GOOD = Ask("job", PARAMS, seed=1, hidden_shape=(4, 8), token_ids=[10, 190, 200, 201], answer_start=2)


def changed(**fields: Any) -> Ask:
    return dataclasses.replace(GOOD, **fields)


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(GOOD, id="complete"),
        pytest.param(changed(token_ids=None), id="rows still to come"),
        pytest.param(changed(hidden_shape=(2, 8), token_ids=[200, 201], answer_start=0), id="no question"),
        pytest.param(changed(negative_shape=(6, 8)), id="negative rows"),
        pytest.param(Ask("dummy", PARAMS, synthetic=True), id="warm-up"),
    ],
)
def test_a_picture_that_can_be_drawn_is_taken(ask):
    assert refusal(ask, IDLE, LIMITS) is None


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        pytest.param(changed(seed=-1), "seed", id="negative seed"),
        pytest.param(changed(seed=2**63), "seed", id="seed past int64"),
        pytest.param(changed(num_generators=0), "generator", id="no generator"),
        pytest.param(changed(num_generators=2), "generator", id="two generators"),
        pytest.param(changed(params=dataclasses.replace(PARAMS, height=24)), "height", id="half a patch"),
        pytest.param(changed(hidden_shape=None), "rows", id="no condition"),
        pytest.param(changed(hidden_shape=(1, 4, 8)), "rows", id="three axes"),
        pytest.param(changed(hidden_shape=(4, 9)), "rows", id="another width"),
        pytest.param(changed(negative_shape=(4, 9)), "negative_rows", id="another width, negative"),
        pytest.param(changed(answer_start=-1), "answer_start_index", id="answer before the rows"),
        pytest.param(changed(answer_start=5), "answer_start_index", id="answer behind the rows"),
        pytest.param(changed(answer_start=4), "answer_start_index", id="no answer"),
        pytest.param(changed(answer_start=4, token_ids=None), "answer_start_index", id="no answer, known early"),
        pytest.param(changed(token_ids=[10, 200, 201]), "token_ids", id="an id too few"),
        pytest.param(changed(token_ids=[10, 200, 11, 199]), "token_ids", id="no visual token"),
        pytest.param(changed(hidden_shape=(31, 8), token_ids=None), "rows", id="too many rows"),
        pytest.param(changed(hidden_shape=(20, 8), negative_shape=(11, 8), token_ids=None), "rows", id="too many together"),
        pytest.param(changed(hidden_shape=(29, 8), token_ids=None), "rows", id="too many bytes"),
        pytest.param(changed(hidden_shape=(18, 8), token_ids=[1] * 17 + [200], answer_start=17), "rows", id="caption too long"),
        pytest.param(changed(negative_shape=(17, 8)), "negative_rows", id="negative caption too long"),
        pytest.param(changed(params=dataclasses.replace(PARAMS, width=272), token_ids=None), "rows", id="too wide for the tables"),
        pytest.param(changed(finite=False), "rows", id="not finite"),
    ],
)  # fmt: skip
def test_a_picture_that_can_never_be_drawn_is_refused_by_field(ask, field):
    err = refusal(ask, IDLE, LIMITS)
    assert isinstance(err, InvalidRequest)
    assert [name for name, _ in err.violations] == [field]


@pytest.mark.parametrize(
    ("load", "kind"),
    [
        pytest.param(Load(active_ids=frozenset({"job"})), AlreadyRunning, id="same id"),
        pytest.param(Load(draining=True, retry_after_s=1.0), Unavailable, id="draining"),
        pytest.param(Load(queue_depth=8, max_queue=8, retry_after_s=3.0), Overloaded, id="queue full"),
        pytest.param(Load(eta_s=12.0), DeadlineUnreachable, id="too late"),
    ],
)
def test_a_picture_that_cannot_be_drawn_now_is_refused_without_blame(load, kind):
    ask = changed(budget_s=10.0)
    assert type(refusal(ask, load, LIMITS)) is kind
    assert isinstance(refusal(changed(finite=False), load, LIMITS), InvalidRequest), "what never works comes first"


def test_no_estimate_refuses_nobody():
    assert refusal(changed(budget_s=0.1), IDLE, LIMITS) is None
    assert refusal(changed(budget_s=None), Load(eta_s=1e6), LIMITS) is None


@pytest.mark.parametrize("start", [200, 350], ids=["parent", "nested"])
def test_admission_and_selection_read_one_threshold(start):  # F9
    config = tiny_config("dev")
    config["llm_config"]["gen_vocab_start_index"] = 200
    if start == 350:
        config["llm_config"]["text_config"]["gen_vocab_start_index"] = 350
    else:
        config["llm_config"]["text_config"].pop("gen_vocab_start_index", None)
    limits = Limits.of(ModelConfig.parse(config))
    shape = (2, limits.llm_width)
    below = Ask("job", PARAMS, hidden_shape=shape, token_ids=[1, start - 1], answer_start=1)
    assert isinstance(refusal(below, IDLE, limits), InvalidRequest)
    assert refusal(dataclasses.replace(below, token_ids=[1, start]), IDLE, limits) is None


def request(**changes: Any) -> dict[str, Any]:
    ar = {"hidden_shape": [4, 8], "token_ids": [10, 11, 200, 201], "answer_start_index": 2}
    whole = {"id": "job", "prompt": {"height": 32, "width": 48}, "sampling": {"seed": 5}, "ar": ar}
    for path, value in changes.items():
        section, _, key = path.partition("__")
        whole[section] = {**whole[section], key: value} if key else value
    return whole


def test_a_neutral_request_becomes_an_ask():
    ask = admit(request(), LIMITS)
    assert (ask.job_id, ask.params.key, ask.seed, ask.answer_start) == ("job", (32, 48, 50), 5, 2)
    assert ask.hidden_shape == (4, 8)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        pytest.param({"ar": None}, "rows", id="no condition"),
        pytest.param({"ar__hidden_shape": None}, "rows", id="no hidden states"),
        pytest.param({"ar__token_ids": "200"}, "token_ids", id="ids are text"),
        pytest.param({"ar__token_ids": [10, 11, 200, True]}, "token_ids", id="a boolean id"),
        pytest.param({"ar__token_ids": [10, 11, 200, 200.5]}, "token_ids", id="a fractional id"),
        pytest.param({"ar__token_ids": [10, 11, 200, float("nan")]}, "token_ids", id="no number"),
        pytest.param({"ar__answer_start_index": None}, "answer_start_index", id="no answer start"),
        pytest.param({"ar__answer_start_index": 1.5}, "answer_start_index", id="a fractional answer start"),
        pytest.param({"sampling__num_outputs_per_prompt": 2}, "num_outputs_per_prompt", id="two pictures"),
        pytest.param({"sampling__generator": []}, "generator", id="no generator"),
        pytest.param({"sampling__generator": [1, 2]}, "generator", id="two generators"),
        pytest.param({"sampling__seed": 0.5}, "seed", id="a fractional seed"),
        pytest.param({"sampling__guidance_scale": "high"}, "guidance", id="guidance is text"),
        pytest.param({"sampling__guidance_scale": float("nan")}, "guidance", id="guidance is no number"),
        pytest.param({"sampling__extra_args": {"cfg_range": ["a", "b"]}}, "cfg_range", id="range is text"),
        pytest.param(
            {"additional_information": {"cfg_range": [0.9, 0.1]}}, "cfg_range", id="range only in the request"
        ),
        pytest.param({"sampling__extra_args": {"seed": 7}}, "extra_args.seed", id="seed among extra arguments"),
        pytest.param({"sampling__num_inference_steps": 201}, "steps", id="more steps than served"),
        pytest.param({"prompt": {"height": 4096, "width": 32}}, "height", id="larger than served"),
    ],
)
def test_a_malformed_request_is_refused_by_field(changes, field):  # F4, F5, F7
    with pytest.raises(InvalidRequest) as refused:
        admit(request(**changes), LIMITS, bounds=Bounds())
    assert field in [name for name, _ in refused.value.violations]


def test_a_warm_up_is_the_engines_word_not_the_requests():
    with pytest.raises(InvalidRequest):
        admit({"dummy": True, "id": "dummy_req_id"}, LIMITS)
    assert admit({}, LIMITS, synthetic=True).params.key == (1024, 1024, 50)
    with pytest.raises(InvalidRequest):
        admit({"prompt": {"height": 500}}, LIMITS, synthetic=True)
