"""A forked child is as good as a fresh process: nothing of its server's or of the tests' shows in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.fork_server import ForkServer
from tests.scene import PATIENCE_S

LOOK = """
import json, os, resource, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "mine": dict(os.environ), "path": sys.path[:2], "main": __name__,
    "stdin": sys.stdin.read(), "threads": threading.active_count(),
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:4],
    "tests": [name for name in sys.modules if name.split(".")[0] in ("tests", "pytest", "_pytest", "hypothesis")],
    "data": resource.getrlimit(resource.RLIMIT_DATA), "interrupt": signal.getsignal(signal.SIGINT).__name__,
}))
print("to people", file=sys.stderr)
"""


def test_it_has_its_own_folder_environment_arguments_and_streams(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    os.environ["ONLY_IN_THE_TESTS"] = "1"
    try:
        done = fork_server.run(
            LOOK, "a", "b c", cwd=tmp_path, environment={"PYTHONPATH": "/nowhere", "MINE": "2"}
        )
    finally:
        del os.environ["ONLY_IN_THE_TESTS"]
    assert (done.returncode, done.stderr) == (0, "to people\n")
    seen = json.loads(done.stdout)
    assert seen["argv"] == ["-c", "a", "b c"]
    assert (seen["cwd"], seen["mine"]) == (str(tmp_path), {"PYTHONPATH": "/nowhere", "MINE": "2"})
    assert seen["path"] == ["", "/nowhere"]
    assert (seen["main"], seen["stdin"], seen["threads"], seen["tests"]) == ("__main__", "", 1, [])
    assert seen["files"] == [0, 1, 2, 3], "the last is the folder that is being listed"
    assert seen["interrupt"] == "default_int_handler"


@pytest.mark.parametrize(
    ("code", "status", "told"),
    [
        ("import atexit, sys; atexit.register(print, 'the end', file=sys.stderr)", 0, "the end"),
        ("raise ValueError('no such column')", 1, "ValueError: no such column"),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, "Segmentation fault"),
    ],
)
def test_its_end_is_reported(fork_server: ForkServer, code: str, status: int, told: str) -> None:
    done = fork_server.run(code)
    assert done.returncode == status
    assert told in done.stderr


def test_a_child_that_takes_too_long_is_ended_with_what_it_started(fork_server: ForkServer) -> None:
    code = "import subprocess; child = subprocess.Popen(['sleep', '1000']); print(child.pid, flush=True); child.wait()"
    with pytest.raises(subprocess.TimeoutExpired) as late:
        fork_server.run(code, timeout_s=2)
    await_end(int(late.value.output))


def await_end(pid: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_children_end_with_their_server() -> None:
    server = ForkServer()
    child = server.start("import time; time.sleep(1000)")
    server.close()
    with pytest.raises(AssertionError, match="the fork server ended"):
        child.wait(PATIENCE_S)
    await_end(child.pid)
    child.close()
