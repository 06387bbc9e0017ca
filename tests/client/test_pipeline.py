"""Children as owned by `pipeline` and `mammoth serve`. The stages are stand-ins found first on PYTHONPATH: programs of the
same names and flags that write their ports and answer as the fake server does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mammoth_client import Client, EngineFailed, InvalidRequest
from mammoth_client.pipeline import pipeline, stage_flags
from mammoth_client.process import Child

STAND_IN = """
    import json, pathlib, signal, sys, threading
    from mammoth_client.testing import fake_server
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    if "--exit" in flags:
        print("no such model")
        sys.exit(int(flags["--exit"]))
    if "--ignore-sigterm" in flags:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with fake_server(serving="--never-serve" not in flags) as server:
        port = int(server.address.split(":")[1])
        ports = dict.fromkeys(["port", "control_port", "health_port", "metrics_port"], port)
        path = pathlib.Path(flags["--ports-file"])
        path.with_suffix(".flags").write_text(json.dumps(flags))
        path.write_text(json.dumps(ports))
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
        program = "import signal, sys\n" + drain + block + textwrap.dedent(STAND_IN)
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
        pytest.param("ar", {"device": "cpu"}, ["--device", "cpu"], id="both-get-it"),
        pytest.param("dit", {"max_num_seqs": 4}, ["--max-num-seqs", "4"], id="underscores-become-dashes"),
        pytest.param("dit", {"dit_batching": "step"}, ["--batching", "step"], id="mine"),
        pytest.param("ar", {"dit_batching": "step"}, [], id="the-others"),
        pytest.param("ar", {"ar_max_context": 512, "dit_capacity": 2}, ["--max-context", "512"], id="one-each"),
        pytest.param("ar", {"drain_seconds": 1.5}, ["--drain-seconds", "1.5"], id="a-name-that-only-looks-alike"),
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


@pytest.mark.parametrize(
    ("code", "error"),
    [
        pytest.param(1, EngineFailed, id="it-broke"),
        pytest.param(2, InvalidRequest, id="it-refused-its-settings"),
    ],
)
def test_a_stage_that_exits_early_tells_why(code, error):
    expected = pytest.raises(error, match=rf"dit-0: exited with code {code}; its last lines:\n  no such model")
    with expected, pipeline("some/model", dit_exit=code):
        pass


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


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_serve_runs_until_it_is_told_to_stop(sent, stand_ins):
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


@pytest.mark.parametrize(("code", "exit_code"), [(1, 5), (2, 2)], ids=["it-broke", "it-refused-its-settings"])
def test_serve_ends_with_the_words_of_a_stage_that_cannot_start(code, exit_code):
    command = [sys.executable, "-m", "mammoth_client", "serve", "--model", "some/model", "--port", "0"]
    done = subprocess.run([*command, "--dit", f"exit={code}"], capture_output=True, text=True, check=False)
    assert done.returncode == exit_code
    assert done.stderr == f"mammoth: dit-0: exited with code {code}; its last lines:\n  no such model\n"


def _connect(address: str) -> None:
    host, port = address.rsplit(":", 1)
    socket.create_connection((host, int(port)), timeout=1).close()
