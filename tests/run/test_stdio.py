"""Where output of a run and its children goes, with real file descriptors in a real process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.scene import ROOT, ended, ran

#: The beginning of every script in these tests; `LOG` is its only argument.
PREAMBLE = """
import os, subprocess, sys
from pathlib import Path
from orchestrator.run.terminal import own_screen
LOG = Path(sys.argv[1])
"""


def run(script: str, log: Path) -> subprocess.CompletedProcess[str]:
    """Run `script` in a fresh process; return its exit code and output."""
    return ran([sys.executable, "-c", PREAMBLE + script, str(log)])


@pytest.mark.parametrize(
    ("script", "out", "err", "logged"),
    [
        pytest.param(
            """
with own_screen(LOG) as screen:
    print("ours out", file=screen.out)
    print("ours err", file=screen.err)
    print("library print")
    print("library stderr", file=sys.stderr)
    os.write(1, b"raw out\\n")
    os.write(2, b"raw err\\n")
    subprocess.run(["/bin/sh", "-c", "echo child out; echo child err >&2"], check=True)
""",
            "ours out\n",
            "ours err\n",
            ["child err", "child out", "library print", "library stderr", "raw err", "raw out"],
            id="ours to the user, all else to the log",
        ),
        pytest.param(
            """
try:
    with own_screen(LOG):
        raise RuntimeError("boom")
except RuntimeError as error:
    print("caught", error)
    subprocess.run(["/bin/sh", "-c", "echo child >&2"], check=True)
""",
            "caught boom\n",
            "child\n",
            [],
            id="both restored after an exception",
        ),
    ],
)
def test_whose_words_go_where(
    tmp_path: Path, script: str, out: str, err: str, logged: list[str]
) -> None:
    log = tmp_path / "log"
    done = run(script, log)
    assert (done.returncode, done.stdout, done.stderr) == (0, out, err)
    assert sorted(log.read_text().splitlines()) == logged
    assert log.stat().st_mode & 0o777 == 0o600, "for this user alone"


def test_no_file_descriptor_is_left_open_or_handed_to_children(tmp_path: Path) -> None:
    done = run(
        """
LIST = ["/bin/sh", "-c", "ls /proc/$$/fd > " + sys.argv[1] + ".children"]
before = sorted(os.listdir("/proc/self/fd"))
try:
    with own_screen(LOG / "no folder" / "log"):
        print("never")
except FileNotFoundError:
    pass
for _ in range(3):
    with own_screen(LOG):
        subprocess.run(LIST, check=True)
print(sorted(os.listdir("/proc/self/fd")) == before)
""",
        tmp_path / "log",
    )
    assert done.stdout == "True\n", done.stderr
    # The shell opens at most one descriptor for its redirection; ours would be above 3.
    assert set((tmp_path / "log.children").read_text().split()) <= {"0", "1", "2", "3", "10"}


def test_what_was_ignored_when_it_began_stays_ignored(tmp_path: Path) -> None:
    done = run(
        """
import signal
from orchestrator.run.terminal import Interrupts
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
interrupts = Interrupts()
interrupts.install()
for number in (signal.SIGHUP, signal.SIGTERM):
    os.kill(os.getpid(), number)
    print(interrupts.asked)
""",
        tmp_path / "log",
    )
    assert done.stdout == "False\nTrue\n", done.stderr


_STORM = """
import sys, time
from orchestrator.run.terminal import Interrupts
interrupts = Interrupts()
interrupts.install()
print("ready", flush=True)
try:
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    interrupts.restore()
print("ending", flush=True)
sys.stdin.readline()  # until the storm has met what a command does last
sys.exit(130)
"""


def test_a_storm_of_signals_changes_no_exit_code() -> None:
    command = [sys.executable, "-c", _STORM]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) * 50:
            process.send_signal(number)
            time.sleep(0.001)
        assert process.stdout.readline() == "ending\n"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) * 50:
            process.send_signal(number)
        ended(process, "\n")
        assert process.returncode == 130
