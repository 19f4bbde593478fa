"""What keepers of commands leave to a rehearsal's head is reaped, and nothing else is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.scene import ran

#: Adopts the guard of a keeper as the head of a rehearsal does, and has a child of its own.
HEAD = """
import ctypes, os, subprocess, sys, time
import psutil
from orchestrator.cluster.raylets import reap_keepers
from workers.command import keeper

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
subprocess.run([sys.executable, "-I", "-S", keeper.__file__], input=sys.argv[1].encode())
me = psutil.Process()
while not (left := me.children()) or left[0].status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
print(left[0].name())
reap_keepers()
print(len(me.children()))

own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
while me.children()[0].status() != psutil.STATUS_ZOMBIE:
    time.sleep(0.01)
reap_keepers()
print(own.wait())
reap_keepers()
"""


def test_only_keepers_are_reaped(tmp_path: Path) -> None:
    task = {
        "argv": ["true"],
        "env": {},
        "cwd": str(tmp_path),
        "log": str(tmp_path / "log"),
        "watch": [],
        "grace_s": 0.1,
        "lease_s": None,
    }
    command = [sys.executable, "-c", HEAD, json.dumps(task) + "\n"]
    done = ran(command)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if not line.startswith("{")] == [
        "job-keeper",
        "0",
        "3",
    ]
