"""Receipts: wire, value, file and back."""

from __future__ import annotations

import json

import pytest

from mammoth_client import ConditioningParameters, DiffusionParameters, Environment, InvalidRequest, Receipt
from mammoth_client._core import generate_request
from mammoth_wire.params import MAX_SEED, from_message, resolve_generation

RECEIPT = Receipt(
    request_id="r-1",
    image_index=2,
    prompt="un mammouth sous la neige, 猛犸",
    negative_prompt="blur",
    conditioning=ConditioningParameters(
        ar_height=5, ar_width=7, ar_guidance=2.5, temperature=0.1 + 0.2, top_k=0, top_p=0.9, seed=MAX_SEED
    ),
    diffusion=DiffusionParameters(
        height=64, width=96, steps=3, guidance=1e-9, cfg_start=0.1, cfg_end=0.7, seed=MAX_SEED
    ),
    model_digest="ab" * 32,
    rows_sha256="cd" * 32,
    rgb_sha256="ef" * 32,
    ar=Environment(
        stage="ar", device="cpu", dtype="float32", kernels="plain", row_bucket=1, versions={"torch": "2.11.0"}
    ),
    dit=Environment(stage="dit", device="H200", dtype="bfloat16", kernels="fast", row_bucket=0, versions={}),
)


def altered(**changes: object) -> str:
    document = json.loads(RECEIPT.to_json())
    document["receipt"] |= changes
    return json.dumps(document)


def test_a_receipt_survives_its_file_bit_for_bit():
    assert Receipt.from_json(RECEIPT.to_json()) == RECEIPT
    assert Receipt.from_json(RECEIPT.to_json()).to_json() == RECEIPT.to_json()


def test_a_receipt_survives_the_wire():
    assert Receipt.from_message(RECEIPT.to_message()) == RECEIPT


def test_the_file_names_its_format_and_every_field():
    document = json.loads(RECEIPT.to_json())
    assert document["format"] == "mammoth-receipt-1"
    assert document["receipt"]["dit"]["row_bucket"] == 0
    assert document["receipt"]["diffusion"]["seed"] == str(MAX_SEED)
    assert "猛犸" in RECEIPT.to_json()


def test_asking_again_resolves_to_the_same_parameters():
    request = generate_request(RECEIPT.prompt, RECEIPT.request_fields())
    again = resolve_generation(from_message(request))
    assert again.diffusion.cfg_range == (0.1, 0.7)
    assert again.conditioning.temperature == 0.1 + 0.2
    assert (again.seed, again.num_images, again.negative_prompt) == (MAX_SEED, 1, "blur")
    assert (again.conditioning.ar_height, again.conditioning.ar_width, again.conditioning.top_k) == (5, 7, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("not json", "is not JSON", id="no-json"),
        pytest.param("[]", "is not a receipt of format", id="a-list"),
        pytest.param("{}", "is not a receipt of format", id="no-format"),
        pytest.param('{"format": "mammoth-receipt-9"}', "is not a receipt of format", id="another-format"),
        pytest.param('{"format": "mammoth-receipt-1"}', "is not a receipt of format", id="no-receipt"),
        pytest.param('{"format": "mammoth-receipt-1", "receipt": 3}', "is not a receipt of format", id="a-number"),
        pytest.param("[" * 10**5, "is not JSON", id="too-deep"),
        pytest.param(altered(image_index="two"), "cannot be read", id="a-word-for-a-number"),
        pytest.param(altered(scheduler="x"), "cannot be read", id="a-field-of-the-future"),
        pytest.param(altered(rgb_sha256="ef"), "holds no rgb_sha256", id="a-short-digest"),
    ],
)
def test_anything_else_is_refused(text, says):
    with pytest.raises(InvalidRequest, match=says) as caught:
        Receipt.from_json(text)
    assert caught.value.violations[0][0] == "receipt"
    assert "\n" not in caught.value.message


def test_two_seeds_cannot_be_asked_for():
    document = json.loads(RECEIPT.to_json())
    document["receipt"]["diffusion"]["seed"] = "1"
    with pytest.raises(InvalidRequest, match="two seeds"):
        Receipt.from_json(json.dumps(document)).request_fields()


def test_differences_name_what_changed_and_leave_out_what_bits_do_not_depend_on():
    document = json.loads(RECEIPT.to_json())
    document["receipt"] |= {"request_id": "r-2", "image_index": 0, "model_digest": "00"}
    document["receipt"]["ar"]["versions"] = {"torch": "2.13.0", "cuda": "13"}
    other = Receipt.from_json(json.dumps(document))
    assert RECEIPT.differences(RECEIPT) == ()
    assert RECEIPT.differences(other) == (
        f"model_digest: {'ab' * 32} then, 00 now",
        "ar.versions.torch: 2.11.0 then, 2.13.0 now",
        "ar.versions.cuda: absent then, 13 now",
    )
