"""A checkpoint is what its headers say, or it is refused with the file and the key."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mammoth_serving.checkpoint import Checkpoint, CheckpointError, write_index
from mammoth_serving.tiny import checkpoint_files, write_shard
from mammoth_wire.params import Defaults

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


def edit_header(**changes):
    """Change what a shard's header says of `a.weight`."""

    def change(header):
        header["a.weight"] |= changes

    return rewrite_header(change)


def rewrite_header(change):
    def edit(data):
        num_bytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + num_bytes])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + num_bytes :]

    return corrupt(SHARD, edit)


DEEP = b"[" * 200_000


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
        pytest.param(corrupt("config.json", lambda data: DEEP), "config.json: not JSON", id="config-too-deep"),
        pytest.param(corrupt(SHARD, lambda data: data + b"x"), f"{SHARD}: not a safetensors file", id="trailing-bytes"),
        pytest.param(edit_header(data_offsets=[0, 48]), f"{SHARD}: not a safetensors file", id="overlapping"),
        pytest.param(edit_header(data_offsets=[-48, 0]), "a.weight: unreadable header entry", id="negative-offset"),
        pytest.param(edit_header(shape=[-3, -4]), "a.weight: unreadable header entry", id="negative-shape"),
        pytest.param(edit_header(shape=[3.0, 4.0]), "a.weight: unreadable header entry", id="fractional-shape"),
        pytest.param(edit_header(shape=[float("inf")]), "a.weight: unreadable header entry", id="endless-shape"),
        pytest.param(edit_header(shape=[10**4000] * 2), "a.weight: unreadable header entry", id="absurd-shape"),
        pytest.param(edit_header(dtype="X9"), f"{SHARD}: not a safetensors file", id="unknown-dtype"),
        pytest.param(edit_header(dtype=[]), "a.weight: unreadable header entry", id="dtype-a-list"),
        pytest.param(
            rewrite_header(lambda header: header.update(__metadata__={"a": 1})),
            f"{SHARD}: not a safetensors file",
            id="metadata-no-text",
        ),
        pytest.param(edit_index(ghost="a\0b"), "is no name of a file", id="shard-name-with-nul"),
        pytest.param(edit_index(ghost="a\ud800"), "is no name of a file", id="shard-name-with-half-a-character"),
        pytest.param(edit_index(ghost=SHARD), "index and shards disagree about ghost", id="index-promises-more"),
        pytest.param(
            edit_index(ghost="../x.safetensors"), "is no name of a file in the folder", id="index-leaves-the-folder"
        ),
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
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["./nowhere", "nowhere", "/tmp/no/such/folder"])
def test_a_path_that_is_no_folder_is_refused_without_a_download(source):
    with pytest.raises(CheckpointError, match="not a checkpoint folder"):
        Checkpoint.open(source)


@pytest.mark.parametrize("source", ["~no such user/x", "x" * 5000], ids=["no-such-home", "too-long"])
def test_a_path_that_no_machine_could_have_is_refused(source):
    with pytest.raises(CheckpointError, match=f"^{source}: "):
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


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint16", "bool"])
def test_weights_that_are_no_floating_point_numbers_are_refused(tmp_path, dtype):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": np.ones(2, dtype), "b": np.ones(2, dtype)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=r": a is stored as \w+, not as F64, F32, F16 or BF16$"):
        checkpoint.check({"a": (2,)}, prefixes=["a"])


def test_eight_bit_weights_of_the_other_stage_do_not_matter(folder):
    rewrite_header(lambda header: header["a.bias"].update(dtype="F8_E4M3", shape=[16]))(folder)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.check({"b.weight": (2, 2, 2)}, prefixes=["b."])
    with pytest.raises(CheckpointError, match="a.bias is stored as F8_E4M3"):
        checkpoint.check({"a.weight": (3, 4), "a.bias": (16,)}, prefixes=["a."])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_floating_point_weights_of_any_width_are_taken(tmp_path, dtype):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": np.ones(2, dtype)}, tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).check({"a": (2,)}, prefixes=["a"]) == {"a": "a"}


def opened_with(folder, **values):
    path = folder / "t2i_generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        pytest.param({"height": 100}, "height: 100 is not a multiple of 16", id="height-between"),
        pytest.param({"height": [128]}, "height: [128] is not pixels, a multiple of 16 from 16", id="height-a-list"),
        pytest.param({"width": 10**9}, "width: 1000000000 is not pixels", id="width-too-large"),
        pytest.param({"height": "128"}, "height: '128' is text, not a number", id="height-quoted"),
        pytest.param({"top_k": "abc"}, "top_k: 'abc' is not 0 (off) or a whole number from 0", id="top-k-text"),
        pytest.param({"top_p": 2}, "top_p: 2 is not above 0 and at most 1", id="top-p-above-one"),
        pytest.param({"temperature": float("nan")}, "temperature: nan is not", id="temperature-nan"),
        pytest.param({"repetition_penalty": 0}, "repetition_penalty: 0 is not above 0", id="no-penalty"),
        pytest.param({"do_sample": "no"}, "do_sample: 'no' is not true or false", id="do-sample-text"),
        pytest.param({"height": 100, "top_p": 2}, "; top_p: 2 is not", id="every-key"),
    ],
)
def test_an_unusable_generation_default_names_the_file_the_key_and_what_it_may_be(folder, values, text):
    with pytest.raises(CheckpointError) as caught:
        opened_with(folder, **values).defaults()
    assert str(caught.value).startswith(str(folder / "t2i_generation_config.json: "))
    assert text in str(caught.value)


def test_a_checkpoints_defaults_replace_ours_where_it_sets_them(folder):
    checkpoint = opened_with(folder, height=256, width=None, top_k=7, do_sample=None)
    assert checkpoint.defaults() == Defaults(height=256, top_k=7)
    assert opened_with(folder, do_sample=False).defaults().temperature == 0
