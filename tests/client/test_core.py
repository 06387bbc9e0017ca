"""What both clients share: requests, retries, deadlines."""

from __future__ import annotations

import uuid

import pytest

from mammoth_client._core import CHANNEL_OPTIONS, Exchange, RetryPolicy, generate_request, next_delay_s
from mammoth_wire import errors, params
from mammoth_wire.v1 import image_generation_pb2

POLICY = RetryPolicy()
UNAVAILABLE = errors.Unavailable("draining")
HINTED = errors.Unavailable("draining", retry_after_s=3.0)
FULL = errors.Overloaded("full", retry_after_s=2.0)


def exchange(timeout_s: float = 10.0, **fields: object) -> Exchange:
    return Exchange("a mammoth", fields, timeout_s=timeout_s, policy=POLICY, now_s=100.0)


def test_a_request_carries_what_was_given_and_nothing_else():
    message = generate_request(
        "a mammoth", {"steps": 7, "guidance": 0.0, "seed": None, "cfg_range": (0, 1), "labels": {}}
    )
    assert params.from_message(message) == {
        "request_id": message.request_id, "prompt": "a mammoth", "steps": 7, "guidance": 0.0, "cfg_range": [0.0, 1.0],
    }  # fmt: skip
    assert uuid.UUID(message.request_id).version == 4


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        pytest.param({"steps": 7.0}, {"steps": 7}, id="a-whole-float-is-a-number-of-steps"),
        pytest.param({"width": [512]}, {"width": 512}, id="a-list-of-one-is-its-item"),
        pytest.param({"width": []}, {}, id="an-empty-list-is-absent"),
        pytest.param({"guidance": 3}, {"guidance": 3.0}, id="an-integer-is-a-guidance"),
        pytest.param({"request_id": "mine"}, {"request_id": "mine"}, id="a-request-id-is-kept"),
        pytest.param({"request_id": ""}, {}, id="an-empty-request-id-is-replaced"),
        pytest.param({"labels": {"team": "art"}}, {"labels": {"team": "art"}}, id="labels"),
        pytest.param({"seed": params.MAX_SEED}, {"seed": params.MAX_SEED}, id="the-largest-seed"),
    ],
)
def test_values_travel_as_the_resolver_reads_them(given, sent):
    fields = params.from_message(generate_request("a mammoth", given))
    del fields["prompt"]
    if "request_id" not in sent:
        assert fields.pop("request_id")
    assert fields == sent


@pytest.mark.parametrize(
    ("prompt", "fields", "name"),
    [
        pytest.param("\udcff", {}, "prompt", id="prompt"),
        pytest.param("a mammoth", {"negative_prompt": "\ud800"}, "negative_prompt", id="negative-prompt"),
        pytest.param("a mammoth", {"labels": {"team": "\ud800"}}, "labels", id="labels"),
    ],
)
def test_text_that_utf_8_cannot_carry_is_refused_by_name(prompt, fields, name):
    with pytest.raises(errors.InvalidRequest, match="lone surrogates") as caught:
        generate_request(prompt, fields)
    assert [field for field, _ in caught.value.violations] == [name]


def test_every_bad_field_is_named_at_once():
    with pytest.raises(errors.InvalidRequest) as caught:
        generate_request("", {"steps": 0, "width": 100})
    assert {field for field, _ in caught.value.violations} == {"prompt", "steps", "width"}


@pytest.mark.parametrize(
    ("err", "num_attempts", "jitter", "policy", "delay_s"),
    [
        pytest.param(UNAVAILABLE, 1, 0.5, POLICY, 0.2, id="first-pause"),
        pytest.param(UNAVAILABLE, 2, 0.5, POLICY, 0.4, id="second-pause-is-twice-as-long"),
        pytest.param(UNAVAILABLE, 3, 0.5, POLICY, 0.8, id="third-pause"),
        pytest.param(UNAVAILABLE, 4, 0.5, POLICY, None, id="four-attempts-are-all"),
        pytest.param(UNAVAILABLE, 1, 0.0, POLICY, 0.16, id="jitter-shortens-by-a-fifth"),
        pytest.param(UNAVAILABLE, 1, 1.0, POLICY, 0.24, id="jitter-lengthens-by-a-fifth"),
        pytest.param(UNAVAILABLE, 9, 0.5, RetryPolicy(max_attempts=10), 5.0, id="pauses-stop-growing"),
        pytest.param(HINTED, 1, 0.5, POLICY, 3.0, id="the-hint-is-longer"),
        pytest.param(FULL, 1, 0.5, POLICY, None, id="a-full-queue-is-the-callers-decision"),
        pytest.param(FULL, 1, 0.5, RetryPolicy(overloaded=True), 2.0, id="unless-asked-for"),
        pytest.param(errors.Overloaded("full"), 1, 0.5, RetryPolicy(overloaded=True), None, id="full-without-a-hint"),
        pytest.param(errors.ShapeTooLarge("big"), 1, 0.5, RetryPolicy(overloaded=True), None, id="too-large-stays-so"),
        pytest.param(errors.EngineFailed("bug"), 1, 0.5, POLICY, None, id="a-bug-is-not-retried"),
        pytest.param(errors.InvalidRequest([("steps", "no")]), 1, 0.5, POLICY, None, id="bad-input-is-not-retried"),
    ],
)
def test_next_delay(err, num_attempts, jitter, policy, delay_s):
    assert next_delay_s(err, num_attempts, jitter, policy) == pytest.approx(delay_s)


def test_attempts_share_one_deadline():
    ours = exchange(timeout_s=10.0)
    assert ours.begin(100.0) == 10.0
    assert ours.delay_after(UNAVAILABLE, 104.0, 0.5) == pytest.approx(0.2)
    assert ours.begin(104.2) == pytest.approx(5.8)


def test_a_pause_that_outlasts_the_deadline_is_not_made():
    ours = exchange(timeout_s=1.0)
    ours.begin(100.0)
    with pytest.raises(errors.Unavailable):
        ours.delay_after(HINTED, 100.0, 0.5)


def test_a_deadline_that_passed_while_pausing_ends_the_request():
    ours = exchange(timeout_s=1.0)
    ours.begin(100.0)
    with pytest.raises(errors.DeadlineExceeded, match="1 attempts") as caught:
        ours.begin(101.0)
    assert caught.value.metadata == {"stage": "client"}


def test_nothing_is_retried_once_an_event_has_arrived():
    ours = exchange()
    ours.begin(100.0)
    ours.read(image_generation_pb2.GenerateEvent(sequence=0, accepted=image_generation_pb2.Accepted()))
    with pytest.raises(errors.Unavailable):
        ours.delay_after(UNAVAILABLE, 100.0, 0.5)


def test_channels_are_set_up_as_the_contract_says():
    assert {
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.max_receive_message_length", 8 * 1024 * 1024),
        ("grpc.lb_policy_name", "round_robin"),
    } <= set(CHANNEL_OPTIONS)
