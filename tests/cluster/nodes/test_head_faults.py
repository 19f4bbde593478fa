"""A head whose disk is read-only or locked, and a head whose cluster ends."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess

import psutil
import pytest

from orchestrator.record.archive import StoredRun, read_run
from orchestrator.record.store import STORE_NAME
from tests.cluster.conftest import ONE_EACH, RESTING, Head, Starter

pytestmark = pytest.mark.ray

#: A mount namespace in which this user may mount, visible to the command alone.
UNSHARED = ("unshare", "--map-root-user", "--mount")

needs_mounts = pytest.mark.skipif(
    subprocess.run([*UNSHARED, "true"], capture_output=True, check=False).returncode != 0,
    reason="mounting in a namespace of one's own (`unshare -rm`) is not permitted here",
)


def stored_when(head: Head, elapsed_s: float) -> StoredRun:
    """Return the content of the store after `elapsed_s` of the run."""
    head.wait_until_running(2)
    head.wait(lambda: read_run(head.folder()).elapsed_s >= elapsed_s, f"{elapsed_s} s of the run")
    return read_run(head.folder())


@needs_mounts
def test_a_read_only_run_folder_is_told_and_ends_no_run(start: Starter) -> None:
    head = start("--rehearse", "--duration", "15s", "--plain", *ONE_EACH, *RESTING, before=UNSHARED)
    known = stored_when(head, 1.0)
    folder = head.folder()
    inside = (
        "nsenter",
        f"--target={head.process.pid}",
        "--user",
        "--mount",
        "--preserve-credentials",
    )
    read_only = f"mount --bind {head.runs} {head.runs} && mount -o remount,bind,ro {head.runs}"
    subprocess.run([*inside, "sh", "-c", read_only], check=True, capture_output=True)
    # Open files stay writable, and opening a file fails. A lock makes the store open its file
    # again.
    with contextlib.closing(sqlite3.connect(folder / STORE_NAME, isolation_level=None)) as store:
        store.execute("BEGIN EXCLUSIVE")
        assert head.process.stdout is not None
        while "! the record of the run cannot be written to" not in head.process.stdout.readline():
            assert head.process.poll() is None, "it ended without a word of the lock"
        store.execute("ROLLBACK")
    code, out, err = head.finish()
    assert code == 1, out + err
    assert "Outcome: degraded. Summary: not written" in err
    assert "Read-only file system" in err
    assert "Traceback" not in out + err
    left = read_run(folder)
    assert known.elapsed_s <= left.elapsed_s < 15.0
    assert left.outcome == "interrupted", "as far as anybody can know who was not there"


def test_a_cluster_whose_head_ends_ends_the_run(start: Starter) -> None:
    """Ray itself would be silent for 60 s, and then end the process with all unstored reports."""
    head = start("--rehearse", "--duration", "10", *ONE_EACH, *RESTING)
    stored_when(head, 1.0)
    children = psutil.Process(head.process.pid).children(recursive=True)
    (store,) = (child for child in children if child.name() == "gcs_server")
    store.kill()
    code, _, err = head.finish()
    assert code == 3
    ended = "has ended, and the cluster with it; what was reported until then is in the run folder"
    assert ended in err
    summary = json.loads((head.folder() / "summary.json").read_text(encoding="utf-8"))
    assert (summary["outcome"], summary["exit_code"]) == ("failed", 3)
    assert summary["steps_ok"] > 0
