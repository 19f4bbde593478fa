"""A request to a child process that loads torch, which a user may interrupt."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from orchestrator.run.child import ask_child


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that never answers."""
    (tmp_path / "slow.py").write_text("import sys, time\nsys.stdin.read()\ntime.sleep(3600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "slow"


def test_an_interrupt_ends_the_process_that_is_asked(slow: str) -> None:
    children: set[psutil.Process] = set()

    def interrupted() -> bool:
        before = set(children)
        for child in psutil.Process().children():
            with suppress(psutil.Error):  # another child has ended just now
                children.update({child} if "slow" in child.cmdline() else ())
        return bool(before)

    assert ask_child(slow, {"of": "x" * 100_000}, interrupted=interrupted) == "it was interrupted"
    assert children
    assert not any(child.is_running() for child in children)
