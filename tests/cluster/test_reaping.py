"""Processes that keepers leave to a rehearsal's head are reaped, and processes that the head leaves
are ended; no others.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from orchestrator.cluster import orphan_reaper
from orchestrator.cluster.orphan_reaper import MARK
from tests.scene import ran

#: Adopts the server of keepers as the head of a rehearsal does, and starts another child.
HEAD = """
import ctypes, os, subprocess, sys, time
import psutil
from orchestrator.cluster.raylets import reap_adopted
from workers.keeper import processes
from workers.keeper.kept import Kept
from workers.keeper.task import Task

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
task = Task(argv=["true"], env={}, cwd="/", place=sys.argv[1], log_bytes=1000, grace_s=0.1)
kept = Kept(task, (os.getpid(), processes.start_time(os.getpid())))
while not kept.is_over:
    kept.listen(1.0)
me = psutil.Process()
(server,) = me.children()
while server.children():  # its keeper ends
    time.sleep(0.01)
server.kill()
while server.status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
print(server.name())
reap_adopted()
print(len(me.children()))

own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
while me.children()[0].status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
reap_adopted()
print(own.wait())
reap_adopted()
"""

#: Makes a semaphore, and prints the name of its file in /dev/shm.
WITH_SEMAPHORE = """
import multiprocessing, time
lock = multiprocessing.get_context("spawn").Lock()
print("sem." + lock._semlock.name.strip("/"), flush=True)
time.sleep(600)
"""


def test_only_keepers_are_reaped(tmp_path: Path) -> None:
    done = ran([sys.executable, "-c", HEAD, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["keeper-server", "0", "3"]


def test_what_has_the_mark_of_a_rehearsal_ends_after_its_head(tmp_path: Path) -> None:
    """A process of another rehearsal stays, although its folder begins with the same letters."""
    folder, other = tmp_path / "orch-a", tmp_path / "orch-ab"
    (folder / "ray").mkdir(parents=True)
    sleepers = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env={**os.environ, MARK: str(place)},
            start_new_session=True,
        )
        for place in (folder, other)
    ]
    try:
        # Its standard input ends without data, as after the kill of a head.
        done = ran([sys.executable, "-I", orphan_reaper.__file__, str(folder)], input="")
        assert (done.returncode, done.stderr) == (0, "")
        assert sleepers[0].wait() == -9
        assert not folder.exists()
        assert sleepers[1].poll() is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_what_tidies_up_after_a_killed_training_is_not_killed(tmp_path: Path) -> None:
    """Python's resource tracker removes semaphores that would otherwise stay in /dev/shm."""
    folder = tmp_path / "orch-a"
    with subprocess.Popen(
        [sys.executable, "-c", WITH_SEMAPHORE],
        env={**os.environ, MARK: str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    ) as training:
        assert training.stdout is not None
        semaphore = Path("/dev/shm", training.stdout.readline().strip())
        assert semaphore.exists()
        done = ran([sys.executable, "-I", orphan_reaper.__file__, str(folder)], input="")
        assert (done.returncode, done.stderr) == (0, "")
    assert training.returncode == -9
    assert not semaphore.exists()
