"""Children as owned by `pipeline` and `mammoth serve`. The stages are stand-ins found first on PYTHONPATH: programs of the
same names and flags that write their ports and answer as the fake server does.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import mammoth_client
from mammoth_client import Client, EngineFailed, InvalidRequest
from mammoth_client.pipeline import pipeline, stage_flags
from mammoth_client.process import Child, refusals

STAND_IN = """
    import json, os, pathlib, signal, sys, threading
    from mammoth_client.testing import fake_server
    words = [part for word in sys.argv[1:] for part in (word.split("=", 1) if word.startswith("--") else [word])]
    flags = dict(zip(words[::2], words[1::2]))
    path = pathlib.Path(flags["--ports-file"])
    path.with_suffix(".flags").write_text(json.dumps(flags))
    def end(code):
        print('{"message": "a log line"}', flush=True)
        print(PROG + ": --device: no such device", file=sys.stderr)
        sys.exit(code)
    if "--exit" in flags:
        end(int(flags["--exit"]))
    def leave():
        os.read(0, 1)
        os._exit(0)
    if flags["--stop-with-stdin"] == "true":
        threading.Thread(target=leave, daemon=True).start()
    if "--ignore-sigterm" in flags:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with fake_server(serving="--never-serve" not in flags) as server:
        port = int(server.address.split(":")[1])
        ports = dict.fromkeys(["port", "control_port", "health_port", "metrics_port"], port)
        path.write_text(json.dumps(ports))
        if "--exit-later" in flags:
            end(int(flags["--exit-later"]))
        signal.sigwait([signal.SIGTERM]) if "--drain" in flags else threading.Event().wait()
        print("drained", flush=True)
"""


@pytest.fixture(autouse=True)
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-ins where `python -m mammoth_ar` and `python -m mammoth_dit` find them; return a log folder."""
    for name in ("mammoth_ar", "mammoth_dit"):
        package = tmp_path / "packages" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        drain = 'sys.argv += ["--drain", "yes"]\n' if name == "mammoth_ar" else ""
        block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n" if drain else ""
        prog = f'PROG = "{name.replace("_", "-")}"\n'
        program = "import signal, sys\n" + prog + drain + block + textwrap.dedent(STAND_IN)
        (package / "__main__.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    return tmp_path / "logs"


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def flags_of(child: Child) -> dict[str, str]:
    flags: dict[str, str] = json.loads(child.log_path.with_suffix(".ports.flags").read_text())
    return flags


@pytest.mark.parametrize(
    ("stage", "flags", "argv"),
    [
        pytest.param("ar", {}, [], id="none"),
        pytest.param("ar", {"device": "cpu"}, ["--device=cpu"], id="both-get-it"),
        pytest.param("dit", {"max_num_seqs": 4}, ["--max-num-seqs=4"], id="underscores-become-dashes"),
        pytest.param("dit", {"dit_batching": "step"}, ["--batching=step"], id="mine"),
        pytest.param("dit", {"dit_model": "--x"}, ["--model=--x"], id="a-value-that-looks-like-a-flag"),
        pytest.param("ar", {"dit_batching": "step"}, [], id="the-others"),
        pytest.param("ar", {"ar_max_context": 512, "dit_capacity": 2}, ["--max-context=512"], id="one-each"),
        pytest.param("ar", {"drain_seconds": 1.5}, ["--drain-seconds=1.5"], id="a-name-that-only-looks-alike"),
    ],
)
def test_flags_reach_the_stage_they_name(stage, flags, argv):
    assert stage_flags(stage, flags) == argv


def test_a_pipeline_serves_and_leaves_nothing_behind(stand_ins):
    with pipeline("some/model", num_dits=2, log_dir=stand_ins, device="cpu", ar_max_context=512) as stages:
        with Client(stages.address) as client:
            [picture] = client.generate("a mammoth")
        ar, dits = stages.ar, stages.dits
        targets = ",".join(f"127.0.0.1:{dit.ports(time.monotonic())['port']}" for dit in dits)
        assert flags_of(ar)["--dit-target"] == targets
        assert {"--model": "some/model", "--device": "cpu", "--max-context": "512"}.items() <= flags_of(ar).items()
        assert {"--model": "some/model", "--device": "cpu", "--port": "0"}.items() <= flags_of(dits[1]).items()
        assert "--max-context" not in flags_of(dits[0])
    assert picture.verify()
    assert all(gone(child.pid) for child in (ar, *dits))
    assert ar.log_path.read_text() == "drained\n"


def test_an_error_in_the_block_stops_the_stages_too():
    with pytest.raises(LookupError), pipeline("some/model") as stages:
        raise LookupError
    assert all(gone(child.pid) for child in stages.children)
    assert not stages.log_dir.exists()


def test_a_stage_that_does_not_drain_in_time_is_killed():
    with pipeline("some/model", grace_s=0.1, dit_ignore_sigterm="yes") as stages:
        pass
    assert all(gone(child.pid) for child in stages.children)


def test_children_do_not_outlive_a_parent_that_is_killed(stand_ins):
    program = "import sys; from mammoth_client.pipeline import pipeline; logs = sys.argv[1]\n"
    program += "with pipeline('some/model', num_dits=2, log_dir=logs) as stages:\n"
    program += "    print(*(child.pid for child in stages.children), flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(stand_ins)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        watched = [os.pidfd_open(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    ended = [select.select([child], [], [], 15.0)[0] == [child] for child in watched]
    for child, has_ended in zip(watched, ended, strict=True):
        if not has_ended:
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
    assert ended == [True] * 3


BROKE = (
    r'dit-0: exited with code 1; its last lines:\n  {"message": "a log line"}\n  mammoth-dit: --device: no such device$'
)


@pytest.mark.parametrize(
    ("flags", "error", "says"),
    [
        pytest.param({"dit_exit": 1}, EngineFailed, BROKE, id="it-broke"),
        pytest.param({"dit_exit": 2}, InvalidRequest, "^mammoth-dit: --device: no such device$", id="it-refused"),
        pytest.param(
            {"dit_exit_later": 2, "ar_never_serve": True},
            InvalidRequest,
            "^mammoth-dit: --device: no such device$",
            id="it-refused-while-the-other-one-loads",
        ),
    ],
)
def test_a_stage_that_exits_early_tells_why(flags, error, says):
    with pytest.raises(error, match=says), pipeline("some/model", start_timeout_s=60.0, **flags):
        pass


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("", [], id="nothing"),
        pytest.param('{"a": 1}\nTraceback\n  mammoth-ar: x\nmammoth: no stage', [], id="other-lines"),
        pytest.param(
            "mammoth-ar: --port: p\n{}\nmammoth-ar: a: b: c\n",
            [("mammoth-ar", "--port: p"), ("mammoth-ar", "a: b: c")],
            id="two-among-others",
        ),
    ],
)
def test_lines_that_refuse_are_told_from_a_log(text, found):
    assert refusals(text) == found


def test_a_child_that_refuses_without_a_word_shows_the_end_of_its_log(tmp_path):
    argv = ["-c", "import sys; print('who knows'); sys.exit(2)"]
    refused = pytest.raises(InvalidRequest, match=r"^odd: exited with code 2; its last lines:\n  who knows$")
    with refused, Child("odd", argv, tmp_path, grace_s=5.0) as child:
        child.ports(time.monotonic() + 60.0)


def test_a_stage_that_never_serves_is_given_up(tmp_path):
    with Child("dit-0", ["-m", "mammoth_dit", "--never-serve", "yes"], tmp_path, grace_s=5.0) as child:
        child.ports(time.monotonic() + 60.0)
        with pytest.raises(EngineFailed, match=r"dit-0: did not serve in time; its last lines:\n  \(nothing\)"):
            child.wait_serving(time.monotonic())


def test_waiting_notices_a_stage_that_dies():
    with pipeline("some/model") as stages:
        os.kill(stages.dits[0].pid, signal.SIGKILL)
        with pytest.raises(EngineFailed, match="dit-0: exited with code -9"):
            stages.wait(poll_s=0.01)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["ctrl-c", "sigterm", "sighup"])
def test_serve_runs_until_it_is_told_to_stop(sent, stand_ins):
    if signal.getsignal(sent) is signal.SIG_IGN:
        pytest.skip("the tests run under nohup, whose children stay when their terminal goes")
    command = [sys.executable, "-m", "mammoth_client", "serve", "--model", "some/model", "--port", "0"]
    command += ["--log-dir", str(stand_ins), "--dit", "request-batch-max-wait-ms=5", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serve:
        assert serve.stdout is not None
        address = serve.stdout.readline().removeprefix("serving on ").strip()
        with Client(address) as client:
            assert all(service.serving for service in client.status())
        serve.send_signal(sent)
        _, said = serve.communicate(timeout=30)
    assert (serve.returncode, said) == (0, "stopped\n")
    assert json.loads((stand_ins / "dit-0.ports.flags").read_text())["--request-batch-max-wait-ms"] == "5"
    with pytest.raises(OSError, match="refused"):
        _connect(address)


def test_serve_goes_on_when_its_terminal_goes_and_nohup_asks_for_it(stand_ins):
    command = [sys.executable, "-m", "mammoth_client", "serve", "--model", "some/model", "--port", "0"]
    shell = ["sh", "-c", "trap '' HUP; exec \"$@\"", "sh", *command, "--log-dir", str(stand_ins)]
    with subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serve:
        assert serve.stdout is not None
        address = serve.stdout.readline().removeprefix("serving on ").strip()
        serve.send_signal(signal.SIGHUP)
        with Client(address) as client:
            assert all(service.serving for service in client.status())
        serve.terminate()
        assert serve.communicate(timeout=30) == ("", "stopped\n")


BROKEN = 'mammoth: dit-0: exited with code 1; its last lines:\n  {"message": "a log line"}\n  mammoth-dit: --device: no such device\n'


@pytest.mark.parametrize(
    ("code", "exit_code", "says"),
    [
        pytest.param(1, 5, BROKEN, id="it-broke"),
        pytest.param(2, 2, "mammoth-dit: --device: no such device\n", id="it-refused-its-settings"),
    ],
)
def test_serve_ends_with_the_words_of_a_stage_that_cannot_start(code, exit_code, says):
    command = [sys.executable, "-m", "mammoth_client", "serve", "--model", "some/model", "--port", "0"]
    done = subprocess.run([*command, "--dit", f"exit={code}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (exit_code, says)


def serve_a_copy(root: Path, log_dir: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `mammoth serve` without --model from a copy of this package in `root`; the DiT stand-in refuses to start."""
    source, copy = Path(mammoth_client.__file__).parent, root / "mammoth_client"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    paths = os.pathsep.join([str(root), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-m", "mammoth_client", "serve", "--dit", "exit=2", "--log-dir", str(log_dir)]
    environment = {**os.environ, "PYTHONPATH": paths, **environ}
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("named", [None, "other/model"], ids=["the-shipped-one", "MAMMOTH_MODEL"])
def test_serve_without_a_model_takes_the_one_that_is_named_or_ships(named, tmp_path, stand_ins):
    shipped = tmp_path / "checkout/checkpoints/emoji"
    shipped.mkdir(parents=True)
    (shipped / "config.json").touch()
    done = serve_a_copy(tmp_path / "checkout/client", stand_ins, {"MAMMOTH_MODEL": named or ""})
    assert (done.returncode, done.stderr) == (2, "mammoth-dit: --device: no such device\n")
    assert json.loads((stand_ins / "dit-0.ports.flags").read_text())["--model"] == (named or str(shipped))


def test_serve_without_any_model_says_what_to_pass(tmp_path, stand_ins):
    done = serve_a_copy(tmp_path / "lib/site-packages", stand_ins, {"MAMMOTH_MODEL": ""})
    assert done.returncode == 2
    assert done.stderr.startswith("mammoth: model: no checkpoint ships with this installation: pass --model ")
    assert done.stderr.count("\n") == 1


def _connect(address: str) -> None:
    host, port = address.rsplit(":", 1)
    socket.create_connection((host, int(port)), timeout=1).close()
