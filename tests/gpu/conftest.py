"""A fresh process for each scenario, because caps and poisoned contexts stay with a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.in_child import CHILD, InChild, runner
from tests.scene import ROOT
from workers.host.cuda_environment import DETERMINISTIC_WORKSPACE, set_for_cuda


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONWARNINGS": "", "PYTHONPATH": path}
    set_for_cuda(environment, DETERMINISTIC_WORKSPACE)  # as a worker's actor does
    # The teardown of a poisoned context aborts the process.
    code = f"{CHILD}\nsys.stderr.flush()\nos._exit(0)"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )


@pytest.fixture(scope="module")
def in_child(tmp_path_factory: pytest.TempPathFactory) -> InChild:
    """Run a function of a test module in a fresh process, and return its result."""
    return runner(tmp_path_factory, _run)
