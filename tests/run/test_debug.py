"""`run --debug`: a breakpoint in the user's workload stops at the user's terminal, and the run goes on from there."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.run.scene import events_in
from tests.scene import COMMAND, ROOT, only_object

#: Stops once, in the third step.
WORKLOAD = """
import torch
from workers.workloads.base import StepResult, Workload

class Mine(Workload):
    steps = 0

    def step(self, size, batch):
        Mine.steps += 1
        answer = f"answer {40 + Mine.steps}"
        if Mine.steps == 3:
            breakpoint()
        torch.ones(64, 64) @ torch.ones(64, 64)
        return StepResult(flop=2.0 * 64**3)

    def release(self):
        pass
"""


class Terminal:
    """A user at a terminal: types a command and reads what it shows."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.runs = folder / "runs"
        self.shown = ""
        self._seen = 0
        """How much of it was waited for."""
        self._end, theirs = pty.openpty()
        # Import of Ray or of its parts would be seen as a module that cannot be found.
        (folder / "ray.py").write_text(
            "raise ImportError('--debug works without Ray')\n", encoding="utf-8"
        )
        config = ("--config", str(ROOT / "cluster.yaml"), "--run-dir", str(self.runs))
        self.process = subprocess.Popen(
            [*COMMAND, "run", *config, *arguments],
            cwd=folder,
            env={
                # Ray sets it in a process that has connected, as another test's may have.
                **{key: text for key, text in os.environ.items() if key != "PYTHONBREAKPOINT"},
                "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
                "TERM": "dumb",
            },
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)

    def read_until(self, text: str, within_s: float = 120.0) -> None:
        """Wait until `text` was shown after all that was waited for before."""
        deadline_s = time.monotonic() + within_s
        while (found := self.shown.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline_s, f"no {text!r} in:\n{self.shown}"
            assert self._read(), f"it ended without {text!r}:\n{self.shown}"
        self._seen = found + len(text)

    def type(self, line: str) -> None:
        """Type a line."""
        os.write(self._end, f"{line}\n".encode())

    def wait(self, within_s: float = 120.0) -> int:
        """Read to the end; return the exit code."""
        while self._read():
            pass
        return self.process.wait(within_s)

    def summary(self) -> dict[str, Any]:
        """The summary of the only run."""
        (path,) = self.runs.glob("*/summary.json")
        return only_object(path.read_text(encoding="utf-8"))

    def close(self) -> None:
        """End the command if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._end)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._end], [], [], 1.0)
        if not ready:
            return True
        with contextlib.suppress(OSError):  # on Linux, what says that the other end is closed
            data = os.read(self._end, 65536)
            self.shown += data.decode(errors="replace")
            return bool(data)
        return False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the user's workload."""
    (tmp_path / "mine.py").write_text(WORKLOAD, encoding="utf-8")
    return tmp_path


@pytest.fixture
def stopped(folder: Path) -> Iterator[Terminal]:
    """A run that has stopped at the breakpoint."""
    impatient = (
        "--set",
        "run.hang_timeout_s=1",
        "--set",
        "run.stale_after_s=0.5",
        "--set",
        "run.slice_s=0.5",
    )
    terminal = Terminal(
        folder,
        "--debug",
        "--workload",
        "mine:Mine",
        "--duration",
        "4s",
        "--set",
        "compute_share_mode=duty",
        *impatient,
    )
    try:
        terminal.read_until("(Pdb)")
        yield terminal
    finally:
        terminal.close()


@pytest.mark.torch
def test_a_breakpoint_in_a_workload_stops_and_goes_on(stopped: Terminal) -> None:
    assert "mine.py" in stopped.shown, "it stops in the user's own file"
    assert "One worker in this process" in stopped.shown
    stopped.type("p answer")
    stopped.read_until("answer 43")
    stopped.read_until("(Pdb)")
    time.sleep(
        2
    )  # longer than a worker may be silent: at a prompt, it is this process that stands still
    stopped.type("c")
    assert stopped.wait() == 0, stopped.shown
    assert "local/0 RUNNING" in stopped.shown
    assert "Outcome: good" in stopped.shown
    assert "Warning" not in stopped.shown, "a library talks on the user's terminal"
    summary = stopped.summary()
    assert summary["outcome"] == "good"
    (row,) = summary["workers"]
    assert row["slot"] == "local/0"
    assert row["state"] == "RUNNING"
    assert row["steps_error"] == 0
    assert row["restarts"] == 0
    assert row["steps_ok"] > 3
    assert row["duty_requested"] is None, (
        "the worker does not rest for the time that was spent at the prompt"
    )
    (folder,) = stopped.runs.iterdir()
    for event in ("run_started", "node_joined", "device_opened", "counting", "run_ended"):
        assert len(events_in(folder, event)) == 1


@pytest.mark.torch
def test_the_debuggers_quit_is_an_interrupt_and_can_resume(stopped: Terminal, folder: Path) -> None:
    stopped.type("q")
    assert stopped.wait() == 130, stopped.shown
    assert stopped.summary()["outcome"] == "interrupted"
    assert "Traceback" not in stopped.shown
    again = Terminal(folder, "--resume", "latest")
    try:
        again.read_until("(Pdb)")
        again.type("c")
        assert again.wait() == 0, again.shown
        assert again.summary()["outcome"] == "good"
    finally:
        again.close()
