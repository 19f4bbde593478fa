"""A run with a user's failing workload, from arguments to exit code, in one process without Ray."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.runs import report_text
from orchestrator.record.archive import read_run
from tests.fleet.in_process import CONFIG
from tests.fork_server import ForkServer
from tests.scene import ROOT, events_in

WORKLOADS = """
import sys
import torch
from workers.workloads.base import StepResult, Workload

class Fine(Workload):
    def step(self, size, batch):
        torch.ones(64, 64) @ torch.ones(64, 64)
        return StepResult(flop=2.0 * 64**3)

    def release(self):
        pass

class Faulty(Fine):
    def step(self, size, batch):
        raise ValueError("no such column")

class Hungry(Fine):
    def step(self, size, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

class Unbuildable(Fine):
    def __init__(self, context):
        raise KeyError("no such file")

class Exiting(Fine):
    def __init__(self, context):
        sys.exit("no data here")
"""

FIND_BOTH = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = ["", sys.argv.pop(1)]
"""

#: The command of a user, with a fleet in this process.
COMMAND = """
from tests.fleet.in_process import in_place_of_a_cluster, main
in_place_of_a_cluster()
main()
"""

#: The same run started from code, with a defective view.
WITH_A_DEFECT = """
from orchestrator.config.load import load_config
from orchestrator.run.environment import on_cluster
from orchestrator.run.runner import Options, run
from orchestrator.view.live import PlainLines
from tests.fleet.in_process import in_place_of_a_cluster

def update(self, snapshot):
    if snapshot.rows[0].counts.steps_ok > 20:
        raise RuntimeError("a bug of ours")

PlainLines.update, PlainLines.close = update, lambda *_: None
config, runs = sys.argv[1:]
overrides = [f"run.dir={runs}", "run.duration=60s", "run.poll_s=0.2", "workload.name=mine:Fine"]
options = Options(json=False, plain=True, wait_for_nodes=False)
in_place_of_a_cluster()
run(on_cluster(load_config(config, overrides)), options)
"""


class UserFolder:
    """A working folder with a user's module, and commands in it."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self._server = server
        (folder / "mine.py").write_text(WORKLOADS, encoding="utf-8")
        (folder / "cluster.yaml").write_text(CONFIG, encoding="utf-8")

    def type(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `orchestrator run …`."""
        return self.run(COMMAND, "run", "--run-dir", str(self.runs), *arguments)

    def run(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run code that finds the user's module and the product."""
        return self._server.run(
            FIND_BOTH + code, str(ROOT), *arguments, cwd=self.folder, environment=dict(os.environ)
        )

    @property
    def run_dir(self) -> Path:
        (path,) = self.runs.iterdir()
        return path

    def summary(self) -> dict[str, Any]:
        """Return the summary of the only run."""
        return dict(json.loads((self.run_dir / "summary.json").read_text(encoding="utf-8")))

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events with this name."""
        return events_in(self.run_dir, name)


@pytest.fixture
def user(tmp_path: Path, fork_server: ForkServer) -> UserFolder:
    return UserFolder(tmp_path, fork_server)


def test_a_failing_workload_is_quarantined_with_a_traceback(user: UserFolder) -> None:
    done = user.type("--duration", "1h", "--workload", "mine:Faulty")
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = user.summary()["workers"]
    assert row["state"] == "QUARANTINED"
    assert "no such column" in row["reason"]
    assert any("raise ValueError" in event["traceback"] for event in user.events("workload_error"))
    assert user.summary()["outcome"] == "degraded"
    last = (
        done.stderr.partition("\nlast error of the workload\n")[2].partition("\n\n")[0].splitlines()
    )
    assert any("mine.py" in line and "in step" in line for line in last), (
        "the line of the user's file is shown"
    )
    assert last[-1] == "  ValueError: no such column"


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ("mine:Unbuildable", "KeyError: 'no such file'"),
        ("mine:Exiting", "SystemExit: no data here, at "),
        ("nowhere:Nothing", "nowhere"),
    ],
)
def test_a_workload_that_cannot_be_made_ends_the_run(
    user: UserFolder, workload: str, words: str
) -> None:
    done = user.type("--duration", "1h", "--workload", workload)
    assert done.returncode == 3, done.stdout + done.stderr
    sentence = done.stderr.strip().splitlines()[-1]
    assert words in sentence
    assert "Traceback" not in done.stdout + done.stderr
    summary = user.summary()
    assert (summary["outcome"], summary["exit_code"]) == ("failed", 3)
    assert summary["error"] in sentence


def test_a_defect_of_the_head_is_recorded(user: UserFolder) -> None:
    done = user.run(WITH_A_DEFECT, "cluster.yaml", str(user.runs))
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "RuntimeError: a bug of ours"
    summary, left = user.summary(), read_run(user.run_dir)
    assert (summary["outcome"], summary["error"]) == ("failed", "a bug of ours")
    assert (left.outcome, left.exit_code, left.error) == ("failed", 1, "a bug of ours")
    assert summary["workers"][0]["steps_ok"] == left.slots[0].row.counts.steps_ok > 20
    assert left.remaining_s > 50


def test_the_last_lines_and_the_report_say_what_fell_short(user: UserFolder) -> None:
    done = user.type("--duration", "1s", "--workload", "mine:Hungry")
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stderr.splitlines()
    for lines in (last, report_text(user.run_dir, 100).splitlines()):
        told = lines[lines.index("what fell short") + 1 :]
        assert any("ended in EMERGENCY" in line and "no good step" in line for line in told), told
    assert last[-2].startswith("Outcome: degraded.")
    how = f"See what happened: python -m orchestrator report {user.run_dir.name}"
    assert last[-1].startswith(how)
    notices = set(user.summary()["notices"])
    assert {line.strip() for line in last} >= notices
    assert any("ended in EMERGENCY" in notice for notice in notices)
