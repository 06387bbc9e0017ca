"""Strict loading: every key is accounted for, by name, before data is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mammoth_ar.model.config import LLMConfig
from mammoth_ar.model.weights import canonical, load
from mammoth_ar.testing import make_checkpoint
from mammoth_serving.checkpoint import Checkpoint, CheckpointError

State = dict[str, Tensor]
BODY = "llm_model.model.language_model."
KEY = f"{BODY}layers.1.mlp.up_proj.weight"


def rewritten(path: Path, change: Callable[[State], State]) -> Checkpoint:
    """Return the tiny Preview checkpoint in one shard with its tensors changed."""
    shards = make_checkpoint(path / "original").path.glob("*.safetensors")
    state = change({name: tensor for shard in shards for name, tensor in load_file(shard).items()})
    folder = path / "changed"
    folder.mkdir()
    (folder / "config.json").write_text((path / "original" / "config.json").read_text())
    save_file(state, folder / "model.safetensors")
    return Checkpoint.open(folder)


def load_all(checkpoint: Checkpoint) -> State:
    return load(checkpoint, LLMConfig.parse(checkpoint.config)).state_dict()


def without(state: State, key: str) -> State:
    return {name: tensor for name, tensor in state.items() if name != key}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param(lambda state: without(state, KEY), f"missing {KEY}", id="missing"),
        pytest.param(
            lambda state: state | {f"{BODY}layers.1.gen_mlp.up_proj.weight": torch.zeros(1)},
            f"unexpected {BODY}layers.1.gen_mlp.up_proj.weight",
            id="expert-out-of-range",
        ),
        pytest.param(lambda state: state | {KEY: torch.zeros(2, 2)}, f"{KEY} has shape", id="misshapen"),
        pytest.param(
            lambda state: state | {"llm_model.model.norm.weight": torch.zeros(64)}, f"{BODY}norm.weight", id="twice"
        ),
    ],
)
def test_a_key_that_does_not_fit_is_named(tmp_path: Path, change: Callable[[State], State], text: str) -> None:
    with pytest.raises(CheckpointError, match=text.replace(".", r"\.")):
        load_all(rewritten(tmp_path, change))


def test_old_style_names_load_the_same(tmp_path: Path) -> None:
    def old(state: State) -> State:
        return {name.replace("llm_model.model.language_model.", "llm_model.model."): t for name, t in state.items()}

    expected = load_all(make_checkpoint(tmp_path / "new"))
    actual = load_all(rewritten(tmp_path, old))
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_the_vision_tower_stored_frequencies_and_the_other_stage_are_left_out(tmp_path: Path) -> None:
    extra = {
        name: torch.zeros(3)
        for name in (
            "llm_model.model.visual.blocks.0.norm1.weight",
            "llm_model.visual.blocks.1.norm1.weight",
            f"{BODY}rotary_emb.inv_freq",
            "gen_transformer.x_embedder.weight",
        )
    }
    load_all(rewritten(tmp_path, lambda state: state | extra))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llm_model.model.layers.0.mlp.up_proj.weight", f"{BODY}layers.0.mlp.up_proj.weight"),
        ("llm_model.model.embed_tokens.weight", f"{BODY}embed_tokens.weight"),
        ("llm_model.visual.merger.ln_q.weight", "llm_model.model.visual.merger.ln_q.weight"),
        (f"{BODY}norm.weight", f"{BODY}norm.weight"),
        ("llm_model.lm_head.weight", "llm_model.lm_head.weight"),
        ("gen_vae.model.weight", "gen_vae.model.weight"),
    ],
)
def test_names_have_one_canonical_form(name: str, expected: str) -> None:
    assert canonical(name) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_tensors_are_cast_while_loading(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = make_checkpoint(tmp_path)
    decoder = load(checkpoint, LLMConfig.parse(checkpoint.config), dtype=dtype)
    assert {tensor.dtype for tensor in decoder.state_dict().values()} == {dtype}
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
