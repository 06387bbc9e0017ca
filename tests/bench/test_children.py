"""Children of ours share the cores of a machine."""

from __future__ import annotations

import pytest

from mammoth_client.process import Child, sharing_cores


@pytest.mark.parametrize(
    ("environ", "num_processes", "num_cores", "threads"),
    [
        pytest.param({}, 2, 16, "8", id="half-each"),
        pytest.param({}, 3, 16, "5", id="two-dits"),
        pytest.param({}, 2, 1, "1", id="one-core-for-two"),
        pytest.param({"OMP_NUM_THREADS": "3"}, 2, 16, "3", id="the-user-knows-better"),
    ],
)
def test_cores_are_shared_evenly_unless_the_user_says_otherwise(environ, num_processes, num_cores, threads):
    shared = sharing_cores({"PATH": "/bin", **environ}, num_processes=num_processes, num_cores=num_cores)
    assert shared == {"PATH": "/bin", "OMP_NUM_THREADS": threads}


def test_a_child_runs_in_the_environment_that_it_is_given(tmp_path):
    program = "import os, signal; print(sorted(os.environ), flush=True); signal.pause()"
    with Child(
        "child", ["-c", program], tmp_path, grace_s=5.0, environ={"LC_CTYPE": "C.UTF-8", "ONLY": "this"}
    ) as child:
        while "ONLY" not in child.log_path.read_text():
            child.check()
    assert child.log_path.read_text() == "['LC_CTYPE', 'ONLY']\n"
