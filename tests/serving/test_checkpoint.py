"""A checkpoint is what its headers say, or it is refused with the file and the key."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mammoth_serving.checkpoint import Checkpoint, CheckpointError, write_index
from mammoth_serving.tiny import checkpoint_files, write_shard

SHAPES = {"a.weight": (3, 4), "a.bias": (4,), "b.weight": (2, 2, 2)}


@pytest.fixture
def folder(tmp_path):
    for name, text in checkpoint_files("preview").items():
        (tmp_path / name).write_text(text)
    write_shard(tmp_path / "model-00001-of-00002.safetensors", {"a.weight": (3, 4), "a.bias": (4,)})
    write_shard(tmp_path / "model-00002-of-00002.safetensors", {"b.weight": (2, 2, 2)})
    write_index(tmp_path)
    return tmp_path


def test_names_shapes_tensors_and_configuration_are_read(folder):
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.names() == sorted(SHAPES)
    assert checkpoint.names("a.") == ["a.bias", "a.weight"]
    assert checkpoint.config["model_type"] == "mammothmoda2"
    assert checkpoint.generation["top_k"] == 2048
    read = dict(checkpoint.tensors(list(SHAPES)))
    assert {name: tuple(tensor.shape) for name, tensor in read.items()} == SHAPES
    shard = load_file(folder / "model-00002-of-00002.safetensors")
    assert np.array_equal(read["b.weight"].numpy(), shard["b.weight"])


def test_only_the_shards_that_hold_what_is_asked_for_are_read(folder):
    checkpoint = Checkpoint.open(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert [name for name, _ in checkpoint.tensors(["a.bias"])] == ["a.bias"]


def test_one_file_without_an_index_is_accepted(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.names() == ["x"]
    assert checkpoint.generation == {}


def test_the_digest_depends_on_configuration_names_and_shapes_and_on_nothing_else(folder, tmp_path_factory):
    def digest_after(change) -> str:
        copy = tmp_path_factory.mktemp("copy") / "c"
        shutil.copytree(folder, copy)
        change(copy)
        return Checkpoint.open(copy).digest

    def reshape(copy):
        write_shard(copy / "model-00002-of-00002.safetensors", {"b.weight": (2, 4)})

    original = Checkpoint.open(folder).digest
    assert len(original) == 64
    assert digest_after(lambda copy: (copy / "README.md").write_text("hello")) == original
    assert digest_after(lambda copy: (copy / "config.json").write_text("{}")) != original
    assert digest_after(reshape) != original


def corrupt(name, edit):
    def change(folder):
        path = folder / name
        path.write_bytes(edit(path.read_bytes()))

    return change


def edit_index(**changes):
    def change(folder):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"] |= changes
        path.write_text(json.dumps(index))

    return change


SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param(lambda folder: (folder / "config.json").unlink(), "config.json: No such file", id="no-config"),
        pytest.param(corrupt("config.json", lambda data: b"{"), "config.json: not JSON", id="config-no-json"),
        pytest.param(
            corrupt("config.json", lambda data: b"[]"),
            "config.json: an object is expected, not list",
            id="config-a-list",
        ),
        pytest.param(lambda folder: (folder / SHARD).unlink(), f"{SHARD}: No such file", id="missing-shard"),
        pytest.param(corrupt(SHARD, lambda data: data[:-3]), "truncated: it ends at byte", id="truncated-data"),
        pytest.param(corrupt(SHARD, lambda data: data[:40]), "truncated in its header", id="truncated-header"),
        pytest.param(corrupt(SHARD, lambda data: b"PK" + data), "not a safetensors file", id="another-format"),
        pytest.param(
            corrupt(SHARD, lambda data: data.replace(b"[3,4]", b"[9,4]")),
            "a.weight: shape [9, 4] needs 144",
            id="wrong-bytes",
        ),
        pytest.param(edit_index(ghost=SHARD), "index and shards disagree about ghost", id="index-promises-more"),
        pytest.param(edit_index(ghost="../x.safetensors"), "leaves the folder", id="index-leaves-the-folder"),
        pytest.param(
            lambda folder: (folder / "model.safetensors.index.json").unlink(),
            "neither model.safetensors.index.json nor",
            id="no-weights",
        ),
    ],
)
def test_a_broken_checkpoint_names_the_file_and_the_key(folder, change, text):
    change(folder)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert text in str(caught.value)


@pytest.mark.parametrize("source", ["./nowhere", "nowhere", "/tmp/no/such/folder"])
def test_a_path_that_is_no_folder_is_refused_without_a_download(source):
    with pytest.raises(CheckpointError, match="not a checkpoint folder"):
        Checkpoint.open(source)


def test_check_names_every_missing_unexpected_and_misshapen_key(folder):
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check({"a.weight": (3, 5), "a.gain": (1,)}, prefixes=["a."])
    message = str(caught.value)
    assert "missing a.gain" in message
    assert "unexpected a.bias" in message
    assert "a.weight has shape [3, 4], expected [3, 5]" in message
    assert "b.weight" not in message


def test_check_maps_old_names_and_drops_what_is_knowingly_ignored(folder):
    names = Checkpoint.open(folder).check(
        {"new.weight": (3, 4)},
        prefixes=["new."],
        canonical=lambda name: name.replace("a.", "new."),
        ignored=lambda name: name == "new.bias",
    )
    assert names == {"a.weight": "new.weight"}
