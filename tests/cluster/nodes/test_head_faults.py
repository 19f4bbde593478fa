"""A head that is killed, whose disk is full, read-only or locked.

And faults that nobody may ask of it.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from orchestrator.record.archive import StoredRun, read_run
from orchestrator.record.store import STORE_NAME
from tests.cluster.conftest import Head, Starter
from tests.scene import COMMAND, PATIENCE_S, ROOT, ran, wait_for

pytestmark = pytest.mark.ray

ONE_EACH = ("--set", "nodes.pc1.workers=1", "--set", "nodes.pc2.workers=1")

#: A place where this user may mount something, seen by the command alone.
UNSHARED = ("unshare", "--map-root-user", "--mount")

needs_mounts = pytest.mark.skipif(
    subprocess.run([*UNSHARED, "true"], capture_output=True, check=False).returncode != 0,
    reason="mounting in a namespace of one's own (`unshare -rm`) is not permitted here",
)


def ask(*arguments: str, runs: Path) -> tuple[int, str, str]:
    """Ask something about the runs in a folder.

    Return exit code, standard output and standard error.
    """
    command = [*COMMAND, *arguments, "--run-dir", str(runs)]
    done = ran(command, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def stored_when(head: Head, elapsed_s: float) -> StoredRun:
    """What the store knows when the run has counted for so long."""
    head.wait_until_running(2)
    folder = head.folder()
    wait_for(lambda: read_run(folder).elapsed_s >= elapsed_s, f"{elapsed_s} s of the run")
    return read_run(folder)


def test_a_killed_heads_run_is_ended_by_another_head(start: Starter) -> None:
    head = start("--rehearse", "--duration", "16s", "--json", *ONE_EACH)
    stored_when(head, 4.0)
    head.process.kill()
    head.process.wait()
    # Nothing of the head is left to clean up, and yet its cluster is gone.
    wait_for(lambda: not list(head.runs.parent.glob("orch-*")), "removal of the rehearsal's folder")
    folder, runs = head.folder(), head.runs
    left = read_run(folder)
    assert 4.0 <= left.elapsed_s < 16.0

    code, out, err = ask("runs", "--json", runs=runs)
    assert code == 0, err
    (listed,) = json.loads(out)["runs"]
    assert listed["run_id"] == folder.name
    assert listed["outcome"] == "interrupted"
    assert listed["exit_code"] is None
    code, out, err = ask("report", "--text", runs=runs)
    assert code == 0, err
    assert folder.name in out
    assert "interrupted" in out
    assert f"run --resume {folder.name}" in ask("runs", runs=runs)[1]

    before = len(head.events())
    again = start("--resume", folder.name, "--json", runs=runs)
    again.wait_until_running(2, after=before)
    code, out, err = ask("run", "--resume", folder.name, runs=runs)
    assert code == 2, out + err
    assert "is under way" in err
    code, out, err = again.finish()
    assert code == 0, out + err
    summary = json.loads(out)
    assert summary == again.summary()
    assert (summary["run_id"], summary["outcome"]) == (folder.name, "good")
    assert summary["duration_s"] == pytest.approx(16.0, abs=0.5)
    assert summary["steps_lost_upper_bound"] >= sum(slot.steps_at_risk for slot in left.slots) > 0
    rows = {row["slot"]: row for row in summary["workers"]}
    for slot in left.slots:
        assert rows[slot.slot]["steps_ok"] > slot.counters["steps_ok"] > 0
        assert all(
            rows[slot.slot][name] >= slot.counters[name]
            for name in ("oom_count", "restarts", "steps_oom")
        )
    ended = read_run(folder)
    assert (ended.outcome, ended.exit_code, ended.heads, ended.incomplete) == ("good", 0, 2, False)

    code, out, err = ask("run", "--resume", folder.name, runs=runs)
    assert code == 2
    assert "has worked all of its 16 s" in err
    assert ask("report", "--json", runs=runs)[1].strip() == json.dumps(summary, indent=2)


@needs_mounts
def test_a_read_only_run_folder_is_told_and_ends_no_run(start: Starter) -> None:
    head = start("--rehearse", "--duration", "14s", "--plain", *ONE_EACH, before=UNSHARED)
    known = stored_when(head, 2.0)
    folder = head.folder()
    inside = [
        "nsenter",
        f"--target={head.process.pid}",
        "--user",
        "--mount",
        "--preserve-credentials",
    ]
    read_only = f"mount --bind {head.runs} {head.runs} && mount -o remount,bind,ro {head.runs}"
    subprocess.run(
        [*inside, "sh", "-c", read_only], check=True, capture_output=True, timeout=PATIENCE_S
    )
    # What is open stays writable; whoever must open it again finds out. A lock makes the store open
    # it again.
    with contextlib.closing(sqlite3.connect(folder / STORE_NAME, isolation_level=None)) as store:
        store.execute("BEGIN EXCLUSIVE")
        time.sleep(2)
        store.execute("ROLLBACK")
    code, out, err = head.finish()
    assert code == 1, out + err
    assert "! the record of the run cannot be written to" in out
    assert "Outcome: degraded. Summary: not written" in err
    assert "Read-only file system" in err
    assert "Traceback" not in out + err
    left = read_run(folder)
    assert known.elapsed_s <= left.elapsed_s < 14.0
    assert left.outcome == "interrupted", "as far as anybody can know who was not there"


def test_a_cluster_whose_head_ends_ends_the_run(start: Starter) -> None:
    """Ray itself would be silent for 60 s and then end the process.

    What was reported until then would be lost.
    """
    head = start("--rehearse", "--duration", "10", *ONE_EACH)
    stored_when(head, 1.0)
    stores = [
        child
        for child in psutil.Process(head.process.pid).children(recursive=True)
        if child.name() == "gcs_server"
    ]
    assert len(stores) == 1
    stores[0].kill()
    _, err = head.process.communicate(timeout=PATIENCE_S)
    assert head.process.returncode == 3
    assert (
        "has ended, and the cluster with it; what was reported until then is in the run folder"
        in err
    )
    summary = json.loads((head.folder() / "summary.json").read_text(encoding="utf-8"))
    assert (summary["outcome"], summary["exit_code"]) == ("failed", 3)
    assert summary["steps_ok"] > 0
