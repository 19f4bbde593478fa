"""A clock and a running head for the tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.scene import ROOT


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def begun_head(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a head that works in this folder until it is killed, and wait until it has begun."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.watch.head", str(folder)], cwd=ROOT, stdout=subprocess.PIPE
    ) as head:
        assert head.stdout is not None
        assert head.stdout.readline() == b"0\n"
        yield head
        head.kill()
