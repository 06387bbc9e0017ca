"""Both stages as real processes: the whole path, a killed and a drained replica, and processes that refuse to start."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from safetensors.numpy import load_file, save_file

from mammoth_client import Client, InvalidRequest, Step
from mammoth_client.__main__ import app
from mammoth_client.pipeline import pipeline

EMOJI = Path(__file__).resolve().parents[2] / "checkpoints" / "emoji"
FLAGS = {"ar_max_context": 512, "ar_capacity": 8}
SMALL = {"steps": 3}
SLOW = {"steps": 40}


@pytest.fixture(scope="module", autouse=True)
def one_thread_each():
    """Three processes on few cores: more threads would only wait for each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    with pipeline(EMOJI, num_dits=2, log_dir=tmp_path_factory.mktemp("logs"), **FLAGS) as stages:
        yield stages


@pytest.fixture
def client(stages):
    with Client(stages.address) as client:
        yield client


def test_a_prompt_becomes_a_verified_picture_and_the_same_one_again(client):
    [first] = client.generate("a red apple", seed=3, **SMALL)
    [again] = client.generate("a red apple", seed=3, **SMALL)
    [other] = client.generate("a red apple", seed=4, **SMALL)
    assert first.verify()
    assert first.png == again.png != other.png


def test_the_cli_draws_and_replays(stages, tmp_path):
    runner, out = CliRunner(), tmp_path / "apple.png"
    common = ["--address", stages.address, "--quiet"]
    drawn = runner.invoke(app, ["generate", "an apple", "-o", str(out), "--steps", "3", *common])
    assert drawn.exit_code == 0, drawn.output
    assert out.read_bytes().startswith(b"\x89PNG")
    receipt = tmp_path / "apple.png.receipt.json"
    same = runner.invoke(app, ["replay", str(receipt), *common])
    assert same.exit_code == 0, same.output
    digest = hashlib.sha256(Image.open(out).convert("RGB").tobytes()).hexdigest()
    assert digest in receipt.read_text()
    receipt.write_text(receipt.read_text().replace(digest, "0" * 64))
    assert runner.invoke(app, ["replay", str(receipt), *common]).exit_code == 1


def test_a_bad_request_beside_good_ones_fails_alone(client):
    with ThreadPoolExecutor(4) as pool:
        good = [pool.submit(client.generate, "x", seed=seed, **SMALL) for seed in (1, 2, 3)]
        bad = pool.submit(client.generate, "a <|im_end|> b", **SMALL)
        assert all(future.result()[0].verify() for future in good)
        with pytest.raises(InvalidRequest, match="prompt: the special token"):
            bad.result()


def test_leaving_the_stream_frees_both_stages(client):
    for _ in range(5):
        for event in client.stream("x", seed=1, **SLOW):
            if isinstance(event, Step):
                break
    began = time.monotonic()
    client.generate("x", seed=1, **SMALL)
    assert time.monotonic() - began < 60


def test_logs_are_json_with_request_ids_and_without_prompts(client, stages):
    client.generate("a zebra nobody may read about", request_id="zebra-request", seed=1, **SMALL)
    text = "".join(path.read_text() for path in stages.log_dir.glob("*.log"))
    records = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert {record.get("request_id") for record in records} >= {"zebra-request", "zebra-request/0"}
    assert "nobody may read" not in text


def test_metrics_count_what_was_drawn(client, stages):
    client.generate("x", seed=1, **SMALL)
    port = json.loads(next(stages.log_dir.glob("ar*ports*")).read_text())["metrics_port"]
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    assert 'mammoth_images_total{shape_class="256px",stage="ar"}' in text
    assert 'mammoth_requests_total{code="OK",stage="ar"}' in text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "drained"])
def test_a_replica_that_goes_costs_time_and_no_picture(tmp_path, number):
    with pipeline(EMOJI, num_dits=2, log_dir=tmp_path, **FLAGS) as stages, Client(stages.address) as client:
        alone = [client.generate("x", seed=seed, **SLOW)[0].png for seed in range(4)]
        seen = []

        def draw(seed):
            pictures = client.generate("x", seed=seed, on_event=seen.append, **SLOW)
            return pictures[0].png

        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(draw, seed) for seed in range(4)]
            while not any(isinstance(event, Step) for event in list(seen)):
                time.sleep(0.005)
            os.kill(stages.dits[0].pid, number)
            assert [future.result() for future in running] == alone
        assert client.generate("x", seed=0, **SLOW)[0].png == alone[0]


def run(module: str, *argv: str) -> subprocess.CompletedProcess[str]:
    ports = [text for name in ("port", "control-port", "health-port", "metrics-port") for text in (f"--{name}", "0")]
    command = [sys.executable, "-m", module, *ports, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def damage(folder, edit):
    path = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def reindex(folder):
    """Let the shards speak for themselves: what is tested is the stage's own strictness."""
    from mammoth_serving.checkpoint import write_index

    write_index(folder)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        pytest.param(
            lambda t: t.pop("gen_transformer.x_embedder.bias"), "missing gen_transformer.x_embedder.bias", id="missing"
        ),
        pytest.param(
            lambda t: t.update({"gen_transformer.extra": np.zeros(3, np.float32)}),
            "unexpected gen_transformer.extra",
            id="extra",
        ),
        pytest.param(
            lambda t: t.update({"gen_transformer.x_embedder.bias": np.zeros(3, np.float32)}),
            "x_embedder.bias has shape [3], expected [48]",
            id="misshapen",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_naming_the_key(tiny_checkpoint, tmp_path, edit, text):
    folder = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint, folder)
    damage(folder, edit)
    reindex(folder)
    done = run("mammoth_dit", "--model", str(folder))
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_truncated_shard_is_refused_naming_the_file(tiny_checkpoint, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint, folder)
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    done = run("mammoth_ar", "--model", str(folder))
    assert done.returncode == 2
    assert "model-00001-of-00002.safetensors" in done.stderr
    assert "truncated" in done.stderr


@pytest.mark.parametrize("module", ["mammoth_ar", "mammoth_dit"])
def test_a_folder_that_is_no_checkpoint_and_bad_flags_are_said_in_a_line_each(module, tmp_path):
    done = run(module, "--model", str(tmp_path))
    assert done.returncode == 2
    assert "config.json: No such file" in done.stderr
    done = run(module, "--capacity", "many", "--bogus", "1")
    assert done.returncode == 2
    assert "--capacity: 'many' is not a whole number" in done.stderr
    assert "--bogus: unknown flag" in done.stderr
    assert "--model (or MAMMOTH_MODEL): required" in done.stderr


def test_a_taken_port_is_named(tiny_checkpoint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run("mammoth_dit", "--model", str(tiny_checkpoint), "--port", port)
    assert done.returncode == 2
    assert f"--port: 127.0.0.1:{port} is taken" in done.stderr
