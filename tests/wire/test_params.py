"""The one resolver: precedence, defaults, bounds, and errors that name every bad field at once."""

from __future__ import annotations

import math

import pytest

from mammoth_wire.errors import InvalidRequest
from mammoth_wire.params import (
    MAX_SEED,
    Bounds,
    Defaults,
    diffusion_message,
    from_message,
    neutral_diffusion,
    resolve_diffusion,
    resolve_generation,
)
from mammoth_wire.v1 import image_generation_pb2


def flat(**fields):
    return resolve_generation({"prompt": "a red apple", **fields})


def refused(**fields):
    with pytest.raises(InvalidRequest) as caught:
        flat(**fields)
    return dict(caught.value.violations)


def test_an_empty_request_takes_every_default():
    generation = flat()
    assert generation.diffusion.key == (1024, 1024, 50)
    assert (generation.diffusion.guidance, generation.diffusion.cfg_range) == (9.0, (0.0, 1.0))
    assert (generation.conditioning.ar_height, generation.conditioning.ar_width) == (64, 64)
    assert (generation.conditioning.temperature, generation.conditioning.top_k, generation.conditioning.top_p) == (
        1.0,
        2048,
        1.0,
    )
    assert (generation.seed, generation.num_images, generation.negative_prompt) == (None, 1, "")


def test_a_checkpoint_replaces_defaults_and_greedy_means_temperature_zero():
    defaults = Defaults.from_generation_config(
        {"height": 128, "width": 256, "top_k": 5, "do_sample": False, "eol_token_id": 9}
    )
    generation = resolve_generation({"prompt": "x"}, defaults=defaults)
    assert generation.diffusion.key == (128, 256, 50)
    assert (generation.conditioning.top_k, generation.conditioning.temperature) == (5, 0.0)


def test_zero_counts_as_set():
    assert flat(guidance=0.0).diffusion.guidance == 0.0
    assert flat(temperature=0).conditioning.temperature == 0.0
    assert flat(top_k=0).conditioning.top_k == 0


@pytest.mark.parametrize(
    ("fields", "field", "allowed"),
    [
        pytest.param({"bogus": 1}, "bogus", "allowed: request_id, prompt", id="unknown-field"),
        pytest.param({"prompt": "  "}, "prompt", "1 to 8192 bytes", id="empty-prompt"),
        pytest.param({"prompt": "é" * 4097}, "prompt", "at most 8192 bytes", id="long-prompt-counts-bytes"),
        pytest.param(
            {"negative_prompt": "x" * 8193}, "negative_prompt", "at most 8192 bytes", id="long-negative-prompt"
        ),
        pytest.param({"prompt": 5}, "prompt", "not text", id="prompt-a-number"),
        pytest.param({"height": 1000}, "height", "multiple of 16", id="height-not-a-multiple"),
        pytest.param({"width": 15}, "width", "from 16 to 2048", id="width-too-small"),
        pytest.param({"width": 4096}, "width", "from 16 to 2048", id="width-too-large"),
        pytest.param({"height": -16}, "height", "from 16 to 2048", id="height-negative"),
        pytest.param({"height": "1024"}, "height", "is text", id="height-as-text"),
        pytest.param({"steps": 0}, "steps", "from 1 to 200", id="no-steps"),
        pytest.param({"steps": 201}, "steps", "from 1 to 200", id="too-many-steps"),
        pytest.param({"steps": True}, "steps", "from 1 to 200", id="steps-a-boolean"),
        pytest.param({"steps": 3.7}, "steps", "from 1 to 200", id="steps-a-fraction"),
        pytest.param({"guidance": math.nan}, "guidance", "a finite number", id="guidance-nan"),
        pytest.param({"guidance": math.inf}, "guidance", "a finite number", id="guidance-infinite"),
        pytest.param({"guidance": 1e38}, "guidance", "from 0 to 100", id="guidance-beyond-drawing"),
        pytest.param({"guidance": "high"}, "guidance", "is text", id="guidance-as-text"),
        pytest.param({"guidance": True}, "guidance", "a finite number", id="guidance-a-boolean"),
        pytest.param({"cfg_range": [0.8, 0.2]}, "cfg_range", "0 <= start <= end <= 1", id="range-reversed"),
        pytest.param({"cfg_range": [0.2, 1.5]}, "cfg_range", "0 <= start <= end <= 1", id="range-above-one"),
        pytest.param({"cfg_range": ["0.2", "0.8"]}, "cfg_range", "is text", id="range-of-strings"),
        pytest.param({"cfg_range": "ab"}, "cfg_range", "is text", id="range-a-string"),
        pytest.param({"cfg_range": [0.5]}, "cfg_range", "two numbers", id="range-of-one"),
        pytest.param({"cfg_range": [0.1, math.nan]}, "cfg_range", "a finite number", id="range-with-nan"),
        pytest.param({"ar_height": 0}, "ar_height", "from 1 to 512", id="no-grid-rows"),
        pytest.param({"ar_guidance": -1.0}, "ar_guidance", "from 0 to 100", id="ar-guidance-negative"),
        pytest.param({"temperature": -0.1}, "temperature", "from 0 (greedy) to 100", id="temperature-negative"),
        pytest.param({"top_k": -1}, "top_k", "0 (off)", id="top-k-negative"),
        pytest.param({"top_p": 0.0}, "top_p", "above 0 and at most 1", id="top-p-zero"),
        pytest.param({"top_p": 1.1}, "top_p", "above 0 and at most 1", id="top-p-above-one"),
        pytest.param({"seed": -1}, "seed", f"from 0 to {MAX_SEED}", id="seed-negative"),
        pytest.param(
            {"seed": MAX_SEED, "num_images": 2}, "seed", f"from 0 to {MAX_SEED - 1}", id="seed-of-the-last-image"
        ),
        pytest.param({"num_images": 9}, "num_images", "from 1 to 8", id="too-many-images"),
        pytest.param({"output_format": "gif"}, "output_format", "png", id="unknown-format"),
        pytest.param({"request_id": "a/b"}, "request_id", "without '/'", id="request-id-with-a-slash"),
        pytest.param({"labels": {"k": "v" * 200}}, "labels", "128 characters", id="long-label"),
    ],
)
def test_a_bad_field_is_named_with_what_it_may_be(fields, field, allowed):
    violations = refused(**fields)
    assert list(violations) == [field]
    assert allowed in violations[field]


def test_every_bad_field_is_reported_at_once():
    assert set(refused(steps=0, width=17, guidance=math.nan, seed=-5)) == {"steps", "width", "guidance", "seed"}


def test_the_area_is_bounded_as_well_as_the_sides():
    with pytest.raises(InvalidRequest, match="more than 1048576 pixels"):
        resolve_generation({"prompt": "x", "width": 2048, "height": 1024}, bounds=Bounds(max_pixels=2**20))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        pytest.param({"sampling": {"extra_args": {"seed": 4}}}, "extra_args.seed", id="F7-seed-is-no-extra-argument"),
        pytest.param(
            {"sampling": {"extra_args": {"generator_device": "cpu"}}}, "extra_args.generator_device", id="F7-device"
        ),
        pytest.param(
            {"additional_information": {"text_guidance_scale": ["x"]}}, "guidance", id="F5-guidance-everywhere"
        ),
        pytest.param(
            {"prompt": {"additional_information": {"cfg_range": [0.9, 0.1]}}}, "cfg_range", id="F5-range-everywhere"
        ),
        pytest.param({"sampling": {"num_outputs_per_prompt": 2}}, "num_outputs_per_prompt", id="one-picture-a-job"),
    ],
)
def test_a_neutral_request_is_checked_in_every_source(request_, field):
    with pytest.raises(InvalidRequest) as caught:
        resolve_diffusion(request_)
    assert [name for name, _ in caught.value.violations] == [field]


def test_a_nested_one_item_list_unwraps_to_its_range():
    assert resolve_diffusion({"additional_information": {"cfg_range": [[0.25, 0.5]]}}).cfg_range == (0.25, 0.5)


def test_travelled_parameters_resolve_to_themselves():
    diffusion = flat(width=48, height=32, steps=7, guidance=0.0, cfg_range=(0.25, 0.5)).diffusion
    message = diffusion_message(diffusion, seed=3)
    assert resolve_diffusion(neutral_diffusion(message), bounds=Bounds()) == diffusion


def test_an_unknown_wire_field_is_refused_and_an_unset_one_is_absent():
    newer = image_generation_pb2.GenerateRequest(prompt="x", guidance=0.0)
    newer.MergeFromString(bytes([0xB8, 0x1F, 0x01]))  # field 503, varint 1
    fields = from_message(newer)
    assert fields == {"prompt": "x", "guidance": 0.0, "field 503": True}
    with pytest.raises(InvalidRequest, match="field 503: unknown field"):
        resolve_generation(fields)


def test_a_flood_of_unknown_fields_is_answered_briefly():
    flood = image_generation_pb2.GenerateRequest(prompt="x")
    flood.MergeFromString(b"".join(bytes([0xB8 | (i & 7), 0x1F, 0x01]) if not i & 7 else b"" for i in range(80_000)))
    with pytest.raises(InvalidRequest) as caught:
        resolve_generation(from_message(flood))
    assert 1 <= len(caught.value.violations) <= 12
