"""A test session that ends on the spot leaves no process, no shared memory and no folder behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.scene import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]

#: Ends as pytest-timeout ends a session: without any cleaning up. One of its children ignores what
#: it is asked.
SESSION = """
import json, os, subprocess, sys
from pathlib import Path
from tests.reaper import reaper
HOLDS = '''
import mmap, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "wb+") as file:
    file.write(bytes(4096))
    file.flush()
    shared = mmap.mmap(file.fileno(), 4096)
print("holds", flush=True)
time.sleep(1000)
'''
folder, shared = map(Path, sys.argv[1:])
with reaper(patience_s=0.5) as session:
    session.remove_at_the_end(folder)
    asked = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    stubborn = subprocess.Popen([sys.executable, "-c", HOLDS, str(shared)], stdout=subprocess.PIPE)
    stubborn.stdout.readline()
    print(json.dumps([asked.pid, stubborn.pid]), flush=True)
    os._exit(1)
"""


def test_what_a_session_leaves_is_ended_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "of the session"
    folder.mkdir()
    shared = Path("/dev/shm") / f"orch-test-{tmp_path.name}"
    done = subprocess.run(
        [sys.executable, "-c", SESSION, str(folder), str(shared)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    pids = json.loads(done.stdout)
    deadline_s = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not folder.exists()
    assert not shared.exists()
    assert [
        pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"
    ] == []
