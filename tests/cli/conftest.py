"""A fixture that runs the command line in the process of the tests, as in a child, without the
second that Python needs to start.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import TypeAlias

import pytest

from orchestrator.cli.main import main

Command: TypeAlias = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run a command line to its exit; return its exit code and output."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # `run` adds the current folder

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["orchestrator", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capfd.readouterr()
        return subprocess.CompletedProcess(
            arguments, int(str(ended.value.code)), printed.out, printed.err
        )

    return run
