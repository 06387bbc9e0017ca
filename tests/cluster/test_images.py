"""How the light images are put together: what an image holds, how it runs, and what its archive says."""

from __future__ import annotations

import io
import json
import tarfile
from importlib.metadata import distribution

import pytest
from harness.dockerfile import run_config
from harness.light import DOCKERFILES, closure
from harness.oci import Image, Layer, write_archive, writing


@pytest.mark.parametrize("name", DOCKERFILES)
class TestDockerfile:
    def test_runs_the_command_itself_and_not_as_root(self, name):
        config = run_config(DOCKERFILES[name].read_text())
        assert config["Entrypoint"] == [f"mammoth-{name}"]
        assert config["User"] == "10001:10001"

    def test_writes_nowhere_but_to_tmp(self, name):
        assert {"HOME=/tmp", "PYTHONDONTWRITEBYTECODE=1"} <= set(run_config(DOCKERFILES[name].read_text())["Env"])

    def test_installs_the_project_last_and_keeps_no_cache(self, name):
        installs = [line for line in DOCKERFILES[name].read_text().splitlines() if "pip install" in line]
        assert f"[{name}]" in installs[-1]
        assert all("--no-cache-dir --constraint constraints.txt" in line for line in installs)


def test_both_stages_share_the_layer_that_holds_torch():
    heavy = [
        text[text.rindex("FROM ") : text.index("COPY checkpoints")]
        for text in (DOCKERFILES[stage].read_text() for stage in ("ar", "dit"))
    ]
    assert heavy[0] == heavy[1]


def test_an_image_holds_what_its_extra_asks_for_and_no_tool():
    project = distribution("mammoth-serve")
    ar, dit, operator = (closure(project, {extra}) for extra in ("ar", "dit", "operator"))
    assert {"torch", "tiktoken", "grpcio"} <= ar
    assert "diffusers" in dit - ar
    assert not {"torch", "safetensors"} & operator
    assert not {"pytest", "mypy", "mammoth-serve"} & (ar | dit | operator)


def test_an_archive_names_every_image_and_holds_a_shared_layer_once(tmp_path):
    with writing(tmp_path / "shared.tar") as layer:
        layer.text(b"hello", "etc/hello", mode=0o600)
    shared = Layer.of(tmp_path / "shared.tar")
    target = io.BytesIO()
    write_archive(
        [Image(["a:1", "a:2"], [shared], {"User": "1"}), Image(["b:1"], [shared, shared], {"User": "2"})], target
    )
    target.seek(0)
    with tarfile.open(fileobj=target) as tar:
        names = tar.getnames()
        index = json.load(tar.extractfile("index.json"))
    assert names.count(f"blobs/sha256/{shared.sha256}") == 1
    annotations = [entry["annotations"]["io.containerd.image.name"] for entry in index["manifests"]]
    assert annotations == ["a:1", "a:2", "b:1"]
    assert all(f"blobs/{entry['digest'].replace(':', '/')}" in names for entry in index["manifests"])


def test_the_last_stage_of_a_dockerfile_says_how_its_image_runs():
    text = (
        'FROM a\nUSER 1\nFROM b\n# ENV NO=1\nENV A=1 B="two words" \\\n    C=3\nEXPOSE 80 81\nENTRYPOINT ["x", "y"]\n'
    )
    assert run_config(text) == {
        "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "A=1", "B=two words", "C=3"],
        "ExposedPorts": {"80/tcp": {}, "81/tcp": {}},
        "Entrypoint": ["x", "y"],
    }
