"""Loading is strict: every key accounted for, what is left out is left out knowingly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mammoth_dit.model.weights import load
from mammoth_dit.testing import tiny_checkpoint
from mammoth_dit.tiny import SHARD_NAME, write
from mammoth_serving.checkpoint import Checkpoint, CheckpointError, write_index


@pytest.fixture
def folder(tmp_path):
    tiny_checkpoint(tmp_path)
    return tmp_path


def rewrite(folder: Path, change) -> Checkpoint:
    state = load_file(folder / SHARD_NAME)
    change(state)
    save_file(state, folder / SHARD_NAME)
    write_index(folder)
    return Checkpoint.open(folder)


def test_every_stored_value_reaches_its_parameter(folder, family):
    write_family(folder, family)
    state = load_file(folder / SHARD_NAME)
    model = load(Checkpoint.open(folder), dtype=torch.float32)
    for prefix, module in (("gen_transformer.", model.transformer), ("gen_vae.", model.vae)):
        for name, value in module.state_dict().items():
            assert torch.equal(value, state[prefix + name]), name
    assert (model.refiner is None) == (family == "dev")


def write_family(folder: Path, family: str) -> None:
    for file in folder.iterdir():
        file.unlink()
    tiny_checkpoint(folder, family)


def test_weights_are_cast_while_they_load(folder):
    model = load(Checkpoint.open(folder), dtype=torch.bfloat16)
    modules = (model.transformer, model.refiner, model.vae)
    assert {parameter.dtype for module in modules for parameter in module.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for module in modules for parameter in module.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda s: s.pop("gen_transformer.x_embedder.bias"), "missing gen_transformer.x_embedder.bias", id="missing"),
        pytest.param(lambda s: s.update({"gen_vae.decoder.extra": torch.ones(1)}), "unexpected gen_vae.decoder.extra", id="unexpected"),
        pytest.param(lambda s: s.update({"gen_image_condition_refiner.query": torch.ones(1, 9, 64)}), r"query has shape \[1, 9, 64\]", id="shape"),
    ],
)  # fmt: skip
def test_a_key_that_does_not_fit_is_named(folder, change, message):
    with pytest.raises(CheckpointError, match=message):
        load(rewrite(folder, change), dtype=torch.float32)


def test_what_serves_editing_and_encoding_is_left_in_the_file(folder):
    left_out = (
        "gen_transformer.image_index_embedding",
        "gen_transformer.ref_image_patch_embedder.weight",
        "gen_transformer.ref_image_refiner.0.attn.to_q.weight",
        "gen_vae.encoder.conv_in.weight",
        "gen_tokenizer.anything",
        "llm_model.anything",
    )
    checkpoint = rewrite(folder, lambda state: state.update({name: torch.ones(2) for name in left_out}))
    assert load(checkpoint, dtype=torch.float32).transformer is not None


def test_a_transformer_alone_loads_only_when_asked_for(folder):
    def drop(state):
        for name in [name for name in state if not name.startswith("gen_transformer.")]:
            del state[name]

    checkpoint = rewrite(folder, drop)
    model = load(checkpoint, dtype=torch.float32, parts=("transformer",))
    assert model.transformer is not None
    assert model.refiner is model.vae is None
    with pytest.raises(CheckpointError, match="missing gen_"):
        load(checkpoint, dtype=torch.float32)


@pytest.mark.parametrize(
    ("vae", "message"),
    [
        pytest.param(None, "gen_vae_config: missing", id="none"),
        pytest.param(
            {"latent_channels": 16, "up_block_types": ["NoSuchBlock"]}, "gen_vae_config: diffusers", id="unknown block"
        ),
    ],
)
def test_a_decoder_that_cannot_be_built_is_refused(folder, vae, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"gen_vae_config": vae}))
    with pytest.raises(CheckpointError, match=message):
        load(Checkpoint.open(folder), dtype=torch.float32)


def test_a_shard_written_twice_has_the_same_bytes(folder):
    before = (folder / SHARD_NAME).read_bytes()
    write(folder)
    assert (folder / SHARD_NAME).read_bytes() == before
