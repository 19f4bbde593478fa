"""Real runs of the real command, and the proof that they leave nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
_PR_SET_CHILD_SUBREAPER = 36

#: Three workers on two nodes: everything a cluster has, in a third of the time.
SMALL = ("--set", "nodes.pc1.workers=2", "--set", "nodes.pc2.workers=1")


@dataclass
class Head:
    """A running `python -m orchestrator …`."""

    process: subprocess.Popen[str]
    runs: Path

    def folder(self, within_s: float = 60.0) -> Path:
        """The run folder, once there is one."""
        return wait_for(lambda: next(iter(self.runs.glob("*/head.json")), None), within_s, "a run folder").parent

    def events(self) -> list[dict[str, Any]]:
        """What the event log says so far."""
        return read_events(self.folder())

    def wait_until_running(self, workers: int, within_s: float = 120.0) -> None:
        """Wait until this many slots have been RUNNING."""

        def enough() -> bool:
            assert self.process.poll() is None, f"the run ended early: {self.process.communicate()[1]}"
            running = {e["slot"] for e in self.events() if e["event"] == "state" and e["to_state"] == "RUNNING"}
            return len(running) >= workers

        wait_for(enough, within_s, f"{workers} running workers")

    def finish(self, within_s: float = 120.0) -> tuple[int, str, str]:
        """Wait for the end; return exit code, standard output and standard error."""
        out, err = self.process.communicate(timeout=within_s)
        return self.process.returncode, out, err

    def summary(self) -> dict[str, Any]:
        """The summary in the run folder."""
        return dict(json.loads((self.folder() / "summary.json").read_text(encoding="utf-8")))


def read_events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(ask: Callable[[], Any], within_s: float, what: str) -> Any:  # noqa: ANN401 - whatever was asked
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        answer = ask()
        if answer:
            return answer
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {within_s} s")


@pytest.fixture(scope="session", autouse=True)
def _adopt_orphans() -> None:
    """Whatever a run leaves behind becomes a child of this process, and cannot hide."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """Live processes below this one; the dead are reaped on the way."""
    for child in psutil.Process().children():
        if child.status() == psutil.STATUS_ZOMBIE:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail if a process, a file in /dev/shm or a temporary folder of ours is left 10 s after the test."""
    before = {process.pid for process in descendants()}
    shared = set(Path("/dev/shm").iterdir())
    yield
    try:
        wait_for(lambda: not [p for p in descendants() if p.pid not in before], 10.0, "end of the processes we started")
    finally:
        for process in descendants():
            if process.pid not in before:
                process.kill()
    assert set(Path("/dev/shm").iterdir()) <= shared


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder with a path short enough for Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


Starter = Callable[..., Head]


@pytest.fixture
def start(nothing_left: None, short_tmp: Path) -> Iterator[Starter]:
    """Start `python -m orchestrator run` in a folder of its own, with the shipped cluster.yaml."""
    heads: list[Head] = []

    def starter(*arguments: str, environment: dict[str, str] | None = None, cwd: Path = ROOT) -> Head:
        runs = short_tmp / f"runs{len(heads)}"
        command = [sys.executable, "-m", "orchestrator", "run", "--config", str(ROOT / "cluster.yaml")]
        process = subprocess.Popen(
            [*command, "--run-dir", str(runs), *arguments],
            cwd=cwd,
            env={**os.environ, "TMPDIR": str(short_tmp), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        heads.append(Head(process=process, runs=runs))
        return heads[-1]

    yield starter
    for head in heads:
        if head.process.poll() is None:
            head.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.process.wait(20)
            head.process.kill()
        for stream in (head.process.stdout, head.process.stderr):
            if stream is not None:
                stream.close()
    # What a run leaves in its temporary folder besides the runs themselves is litter.
    assert [path.name for path in short_tmp.iterdir() if path.name.startswith("orch-")] == []
