"""The command line, in this process and as a child."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mammoth_client import (
    AlreadyRunning,
    ArProgress,
    Batched,
    Conditioned,
    ContractMismatch,
    DataLoss,
    DeadlineExceeded,
    DeadlineUnreachable,
    EngineFailed,
    MammothError,
    Overloaded,
    Queued,
    Receipt,
    ShapeTooLarge,
    Step,
)
from mammoth_client.__main__ import app
from mammoth_client.cli.files import check
from mammoth_client.cli.generate import paths
from mammoth_client.cli.progress import Lines
from mammoth_client.testing import Reply, fake_server


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def mammoth(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def test_generate_writes_a_picture_and_its_receipt():
    with fake_server() as server:
        done = mammoth("generate", "a mammoth", "-o", "a.png", "--seed", "7", "--address", server.address)
    assert done.exit_code == 0
    assert done.stdout.startswith("a.png  64x64  seed 7  ")
    receipt = Receipt.from_json(Path("a.png.receipt.json").read_text())
    assert (receipt.prompt, receipt.diffusion.seed) == ("a mammoth", 7)
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


def test_several_pictures_are_numbered():
    with fake_server() as server:
        done = mammoth("generate", "a mammoth", "-o", "a.png", "--num-images", "2", "--address", server.address)
    assert done.exit_code == 0
    assert sorted(path.name for path in Path().iterdir()) == [
        "a-0.png", "a-0.png.receipt.json", "a-1.png", "a-1.png.receipt.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("output", "receipt", "index", "expected"),
    [
        pytest.param("d/a.png", None, None, ("d/a.png", "d/a.png.receipt.json"), id="one"),
        pytest.param("d/a.png", None, 3, ("d/a-3.png", "d/a-3.png.receipt.json"), id="one-of-several"),
        pytest.param("a.b.png", "r/c.json", 0, ("a.b-0.png", "r/c-0.json"), id="receipt-elsewhere"),
        pytest.param("a", "c.json", None, ("a", "c.json"), id="no-suffix"),
        pytest.param("-", None, None, ("-", None), id="standard-output"),
        pytest.param("-", "c.json", None, ("-", "c.json"), id="standard-output-and-a-receipt"),
    ],
)
def test_paths(output, receipt, index, expected):
    assert paths(Path(output), receipt and Path(receipt), index) == tuple(name and Path(name) for name in expected)


def test_every_option_reaches_the_request():
    words = ["--size", "96x64", "--grid", "6x4", "--steps", "3", "--guidance", "0", "--cfg-range", "0.1", "0.9",
             "--seed", "5", "--negative", "blur", "--num-images", "2", "--ar-guidance", "1.5", "--temperature", "0",
             "--top-k", "0", "--top-p", "0.5"]  # fmt: skip
    with fake_server() as server:
        assert mammoth("generate", "a mammoth", *words, "--address", server.address).exit_code == 0
    fields = dict(server.calls[0].fields)
    del fields["request_id"]
    assert fields == {
        "prompt": "a mammoth", "width": 96, "height": 64, "ar_width": 6, "ar_height": 4, "steps": 3, "guidance": 0.0,
        "cfg_range": [0.1, 0.9], "seed": 5, "negative_prompt": "blur", "num_images": 2, "ar_guidance": 1.5,
        "temperature": 0.0, "top_k": 0, "top_p": 0.5,
    }  # fmt: skip


def test_options_left_out_are_left_to_the_server():
    with fake_server() as server:
        assert mammoth("generate", "a mammoth", "--address", server.address).exit_code == 0
    assert set(server.calls[0].fields) == {"request_id", "prompt"}
    assert Path("mammoth.png").exists()


def test_json_tells_what_was_written():
    with fake_server() as server:
        done = mammoth("generate", "a mammoth", "--json", "--receipt", "r.json", "--address", server.address)
    [entry] = json.loads(done.stdout)
    receipt = Receipt.from_json(Path("r.json").read_text())
    assert (entry["file"], entry["receipt"]) == ("mammoth.png", "r.json")
    assert entry["rgb_sha256"] == receipt.rgb_sha256
    assert entry["times"]["batch_size"] == 1


def test_quiet_prints_nothing():
    with fake_server() as server:
        done = mammoth("generate", "a mammoth", "--quiet", "--address", server.address)
    assert (done.exit_code, done.output) == (0, "")


def test_the_environment_says_where_the_server_is(monkeypatch):
    with fake_server() as server:
        Path("token").write_text("secret")
        monkeypatch.setenv("MAMMOTH_ADDRESS", server.address)
        monkeypatch.setenv("MAMMOTH_TOKEN_FILE", "token")
        assert mammoth("generate", "a mammoth").exit_code == 0
    assert server.calls[0].metadata["authorization"] == "Bearer secret"


TIMEOUT = "mammoth: Invalid value for '--timeout': '{}' is not a number of seconds from 0.001 to 3600\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        pytest.param(["--steps", "0"], "mammoth: steps: 0 is not a whole number from 1 to 200\n", id="steps"),
        pytest.param(["--size", "100x64"], "mammoth: width: 100 is not a multiple of 16\n", id="width"),
        pytest.param(["--guidance", "nan"], "mammoth: guidance: nan is not a finite number", id="guidance"),
        pytest.param(["--timeout", "9999"], TIMEOUT.format("9999"), id="timeout"),
        pytest.param(["--timeout", "nan"], TIMEOUT.format("nan"), id="timeout-that-is-no-number"),
        pytest.param(["-o", "/proc/x.png"], "mammoth: output: cannot write /proc/x.png: ", id="unwritable"),
        pytest.param(["-o", f"{'x' * 300}.png"], "mammoth: output: cannot write xxx", id="too-long-a-name"),
        pytest.param(["--receipt", "/proc/r.json"], "mammoth: output: cannot write /proc/r.json: ", id="receipt"),
        pytest.param(
            ["-o", "-", "--num-images", "2"], "mammoth: output: standard output takes one picture", id="two-on-stdout"
        ),
        pytest.param(
            ["--receipt", "-"], "mammoth: receipt: standard output is for the picture", id="receipt-on-stdout"
        ),
        pytest.param(["-o", "no/such.png"], "mammoth: output: there is no folder no\n", id="folder"),
        pytest.param(["--size", "big"], "mammoth: Invalid value for '--size': 'big' is not WIDTHxHEIGHT", id="size"),
        pytest.param(["--steps", "3.7"], "mammoth: Invalid value for '--steps'", id="a-fraction-of-steps"),
        pytest.param(["--colour"], "mammoth: No such option", id="unknown-option"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_sent(words, says):
    with fake_server() as server:
        done = mammoth("generate", "a mammoth", "--address", server.address, *words)
    assert done.exit_code == 2
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1
    assert server.calls == []
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        pytest.param(["serve", "--start-timeout", "nan"], "'--start-timeout': 'nan' is not a number of seconds from 0.001 to 86400", id="start-timeout"),
        pytest.param(["serve", "--grace", "-1"], "'--grace': '-1' is not a number of seconds from 0 to 3600", id="grace"),
        pytest.param(["serve", "--grace", "soon"], "'--grace': 'soon' is not a number of seconds from 0 to 3600", id="a-word"),
        pytest.param(["status", "--timeout", "inf"], "'--timeout': 'inf' is not a number of seconds from 0.001 to 3600", id="status"),
    ],
)  # fmt: skip
def test_seconds_out_of_range_are_refused_with_the_range(words, says):
    done = mammoth(*words)
    assert (done.exit_code, done.stderr) == (2, f"mammoth: Invalid value for {says}\n")


@pytest.mark.parametrize("text", ["soon", "nan", "0"])
def test_a_bad_timeout_of_the_environment_names_its_variable(text, monkeypatch):
    monkeypatch.setenv("MAMMOTH_TIMEOUT_S", text)
    done = mammoth("generate", "a mammoth")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"mammoth: Invalid value for MAMMOTH_TIMEOUT_S: '{text}' is not a number of seconds")


def test_files_are_left_as_they_are_by_the_check():
    Path("old.png").write_bytes(b"old")
    Path("link.png").symlink_to("new.png")
    for name in ("old.png", "new.png", "link.png"):
        check(Path(name))
    assert Path("old.png").read_bytes() == b"old"
    assert sorted(path.name for path in Path().iterdir()) == ["link.png", "old.png"]


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        pytest.param(["make-tiny", "/proc/x"], "folder: cannot write into /proc/x", id="make-tiny"),
        pytest.param(["make-tiny", "/proc", "--force"], "folder: cannot write into /proc", id="make-tiny-forced"),
        pytest.param(
            ["serve", "--model", "m", "--log-dir", "/proc/x"], "log-dir: cannot write into /proc/x", id="serve"
        ),
    ],
)
def test_a_folder_that_cannot_be_written_into_is_bad_input(words, folder):
    done = mammoth(*words)
    assert (done.exit_code, done.stderr) == (2, f"mammoth: {folder}: No such file or directory\n")


def test_any_other_trouble_with_files_is_bad_input_too(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no" / "such"))
    done = mammoth("serve", "--model", "m")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"mammoth: {tmp_path}/no/such/mammoth-")
    assert done.stderr.endswith(": No such file or directory\n")


def test_the_version_is_that_of_the_distribution():
    done = mammoth("--version")
    assert (done.exit_code, done.stdout) == (0, f"mammoth {version('mammoth-serve')}\n")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        pytest.param(
            Overloaded("the queue is full", retry_after_s=2.0), 3, "the queue is full (try again in 2.0 s)", id="full"
        ),
        pytest.param(DeadlineUnreachable("needs 30 s"), 3, "needs 30 s", id="deadline-unreachable"),
        pytest.param(AlreadyRunning("running"), 3, "running", id="already-running"),
        pytest.param(ShapeTooLarge("too large"), 2, "too large", id="shape-too-large"),
        pytest.param(ContractMismatch("two models"), 5, "two models", id="contract"),
        pytest.param(DeadlineExceeded("too late"), 5, "too late", id="deadline"),
        pytest.param(DataLoss("damaged"), 5, "damaged", id="data-loss"),
        pytest.param(EngineFailed("a bug", error_id="12ab"), 5, "a bug (error id 12ab)", id="bug"),
        pytest.param(
            EngineFailed("internal error 12ab", error_id="12ab"), 5, "internal error 12ab", id="id-said-already"
        ),
    ],
)
def test_every_failure_has_a_line_and_a_code(error: MammothError, code, says):
    with fake_server(Reply(error=error)) as server:
        done = mammoth("generate", "a mammoth", "--address", server.address)
    assert (done.exit_code, done.stderr) == (code, f"mammoth: {says}\n")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("words", [["generate", "a mammoth"], ["status"]], ids=["generate", "status"])
def test_nobody_there_is_code_4(words, nowhere):
    done = mammoth(*words, "--address", nowhere)
    assert done.exit_code == 4
    assert done.stderr.startswith("mammoth: ")


def test_a_file_that_cannot_be_written_is_said_before_anything_is_sent():
    Path("dir-1.receipt.json").mkdir()
    with fake_server() as server:
        done = mammoth("generate", "a mammoth", "-o", "dir", "--num-images", "2", "--address", server.address)
    assert (done.exit_code, done.stderr) == (2, "mammoth: output: cannot write dir-1.receipt.json: Is a directory\n")
    assert server.calls == []


def test_status_is_a_table_and_a_code():
    with fake_server() as server:
        done = mammoth("status", "--address", server.address)
    assert done.exit_code == 0
    assert server.address in done.stdout
    assert "mammoth.v1.ImageGeneration" in done.stdout
    assert "SERVING" in done.stdout


def test_status_of_a_server_that_does_not_serve_is_code_3():
    with fake_server(serving=False) as server:
        done = mammoth("status", "--json", "--address", server.address)
    assert done.exit_code == 3
    assert json.loads(done.stdout)["services"][1] == {"service": "mammoth.v1.ImageGeneration", "state": "NOT_SERVING"}


@pytest.fixture
def receipt() -> str:
    """The receipt of the second of two pictures, with every parameter away from its default."""
    words = ["--size", "96x64", "--grid", "3x5", "--steps", "3", "--guidance", "2.5", "--cfg-range", "0.1", "0.9",
             "--negative", "blur", "--num-images", "2", "--ar-guidance", "1.5", "--temperature", "0.7", "--top-k", "9",
             "--top-p", "0.5", "-o", "old.png"]  # fmt: skip
    with fake_server() as server:
        assert mammoth("generate", "a mammoth", *words, "--address", server.address).exit_code == 0
    return "old-1.png.receipt.json"


def test_replay_of_the_same_model_is_the_same(receipt):
    with fake_server() as server:
        done = mammoth("replay", receipt, "-o", "new.png", "--quiet", "--address", server.address)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "same\n", "")
    assert Path("new.png").read_bytes() == Path("old-1.png").read_bytes()


def test_replay_can_write_to_standard_output(receipt):
    with fake_server() as server:
        done = subprocess.run(
            child("replay", receipt, "-o", "-", "--quiet", "--address", server.address), capture_output=True, check=True
        )
    assert (done.stdout, done.stderr) == (Path("old-1.png").read_bytes(), b"same\n")


def test_replay_of_another_model_is_different_and_says_what_changed(receipt):
    with fake_server(model_digest="1" * 64) as server:
        done = mammoth("replay", receipt, "--quiet", "--address", server.address)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[:2] == ["different", f"  model_digest: {'0' * 64} then, {'1' * 64} now"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(None, "Invalid value for 'RECEIPT'", id="missing"),
        pytest.param(b"{", "receipt: is not JSON", id="no-json"),
        pytest.param(b"\xff", "receipt: cannot read", id="no-text"),
        pytest.param(b'{"format": "mammoth-receipt-1", "receipt": {}}', "receipt: holds no rgb_sha256", id="no-digest"),
    ],
)
def test_replay_refuses_what_is_no_receipt(content, says):
    if content is not None:
        Path("r.json").write_bytes(content)
    with fake_server() as server:
        done = mammoth("replay", "r.json", "--address", server.address)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"mammoth: {says}")
    assert server.calls == []


def test_make_tiny_refuses_a_folder_that_is_not_empty():
    Path("full").mkdir()
    Path("full/mine").touch()
    done = mammoth("make-tiny", "full")
    assert (done.exit_code, done.stderr) == (2, "mammoth: folder: full is not empty; --force writes into it\n")


@pytest.mark.parametrize("force", [False, True], ids=["empty", "forced"])
def test_make_tiny_runs_both_stages_programs(force, monkeypatch):
    for stage in ("ar", "dit"):
        folder = Path(f"packages/mammoth_{stage}")
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        program = f"import sys, pathlib; pathlib.Path(sys.argv[1]).mkdir(exist_ok=True); pathlib.Path(sys.argv[1], '{stage}').write_text(repr(sys.argv[2:]))"
        (folder / "tiny.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(Path("packages").resolve()))
    if force:
        Path("out").mkdir()
        Path("out/mine").touch()
    done = mammoth("make-tiny", "out", "--family", "dev", *(["--force"] if force else []))
    assert (done.exit_code, done.stdout) == (0, "out  dev\n")
    assert Path("out/ar").read_text() == "['--family', 'dev']"
    assert Path("out/dit").read_text() == "[]"


def test_make_tiny_tells_why_it_failed(monkeypatch):
    Path("packages/mammoth_ar").mkdir(parents=True)
    Path("packages/mammoth_ar/__init__.py").touch()
    Path("packages/mammoth_ar/tiny.py").write_text("import sys; sys.exit('the disk is full')")
    monkeypatch.setenv("PYTHONPATH", str(Path("packages").resolve()))
    done = mammoth("make-tiny", "out")
    assert done.exit_code == 5
    assert done.stderr == "mammoth: python -m mammoth_ar.tiny exited with code 1; its last lines:\n  the disk is full\n"


@pytest.mark.parametrize(
    ("given", "tokens_done", "steps_done"),
    [
        pytest.param({}, ["25/100", "50/100", "75/100", "100/100"], ["1/4", "2/4", "3/4", "4/4"], id="quarters"),
        pytest.param({"lines_a_phase": 1}, ["100/100"], ["4/4"], id="ends"),
    ],
)
def test_progress_without_a_terminal_is_a_few_lines(given, tokens_done, steps_done):
    said: list[str] = []
    lines = Lines(said.append, **given)
    lines(Queued(0, 2, 12.4))
    lines(Queued(0, 1, 12.4))
    for tokens in range(101):
        lines(ArProgress(0, tokens, 100))
    lines(Conditioned(0))
    lines(Batched(0, 3))
    for step in range(1, 5):
        lines(Step(0, step, 4, None))
    assert said == [
        "picture 0: 2 ahead in the queue, about 12 s to go",
        *(f"picture 0: tokens {count}" for count in tokens_done),
        "picture 0: in a wave of 3",
        *(f"picture 0: steps {count}" for count in steps_done),
    ]


def test_help_lists_the_commands_and_the_exit_codes():
    done = mammoth("--help")
    assert done.exit_code == 0
    assert all(
        name in done.stdout for name in ("generate", "status", "replay", "serve", "make-tiny", "130 interrupted")
    )


def child(*words: str) -> list[str]:
    return [sys.executable, "-m", "mammoth_client", *words]


def test_as_a_child_process_progress_goes_to_stderr():
    with fake_server() as server:
        words = child("generate", "a mammoth", "--json", "--address", server.address)
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[0]["file"] == "mammoth.png"
    assert "picture 0: steps 4/4" in done.stderr


@pytest.mark.parametrize("words", [[], ["--receipt", "r.json", "--json"]], ids=["picture", "picture-and-receipt"])
def test_the_picture_can_go_to_standard_output(words):
    with fake_server() as server:
        running = child("generate", "a mammoth", "-o", "-", *words, "--address", server.address)
        done = subprocess.run(running, capture_output=True, check=True)
        assert mammoth("generate", "a mammoth", "-o", "same.png", "--address", server.address).exit_code == 0
    assert done.stdout == Path("same.png").read_bytes()
    assert b"picture 0: steps 4/4" in done.stderr
    assert Path("r.json").exists() == ("r.json" in words)
    assert (b'"file": "-"' in done.stderr) == ("--json" in words)
    assert not Path("-").exists()


def test_a_reader_that_has_left_is_one_line():
    reader, writer = os.pipe()
    os.close(reader)
    with fake_server() as server:
        running = child("generate", "a mammoth", "-o", "-", "--quiet", "--address", server.address)
        done = subprocess.run(running, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (2, "mammoth: output: cannot write to standard output: Broken pipe\n")


def test_on_a_terminal_there_are_bars():
    screen, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    with fake_server() as server:
        words = child("generate", "a mammoth", "--address", server.address)
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=terminal, env=environment, check=True)
    shown = os.read(screen, 1 << 16).decode()
    os.close(screen)
    os.close(terminal)
    assert done.stdout.startswith(b"mammoth.png  64x64")
    assert "20/20" in shown
    assert "4/4" in shown
    assert "━" in shown


def test_ctrl_c_cancels_the_request_and_is_code_130():
    with fake_server(Reply(num_events=4)) as server:
        words = child("generate", "a mammoth", "--address", server.address)
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as running:
            assert running.stderr is not None
            assert running.stderr.readline().startswith("picture 0: ")
            running.send_signal(signal.SIGINT)
            said = running.communicate(timeout=30)[1]
        assert server.calls[0].outcome() == "cancelled"
    assert running.returncode == 130
    assert said.endswith("mammoth: interrupted\n")
    assert "Traceback" not in said
