"""Rows, snapshots and records for the tests of this folder: a healthy worker, and whatever a test
says is different.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.scene import ROOT


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def head_process(folder: Path) -> subprocess.Popen[bytes]:
    """Start a head that works on this folder until it is killed."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.watch.head", str(folder)], cwd=ROOT, stdout=subprocess.PIPE
    )
