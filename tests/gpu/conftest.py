"""A fresh process for each scenario: a cap stays with its process, and a poisoned context too."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workers.host.cuda_environment import DETERMINISTIC_WORKSPACE, set_for_cuda

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import importlib, os, pathlib, pickle, sys
sys.path[:0] = sys.argv[1:3]
arguments = pickle.loads(pathlib.Path(sys.argv[5]).read_bytes())
result = getattr(importlib.import_module(sys.argv[3]), sys.argv[4])(*arguments)
pathlib.Path(sys.argv[6]).write_bytes(pickle.dumps(result))
sys.stderr.flush()
os._exit(0)  # a poisoned context aborts the process when it is taken down
"""


@pytest.fixture(scope="module")
def in_child(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Run a function of a test module in a fresh process and return what it returns."""
    environment = {**os.environ, "PYTHONWARNINGS": ""}
    set_for_cuda(environment, DETERMINISTIC_WORKSPACE)  # as a worker's actor does

    def run(function: Callable[..., Any], *arguments: object) -> Any:
        folder = tmp_path_factory.mktemp("child")
        given, wanted = folder / "given", folder / "wanted"
        given.write_bytes(pickle.dumps(arguments))
        here = Path(function.__code__.co_filename)
        command = [
            sys.executable,
            "-c",
            CHILD,
            str(ROOT),
            str(here.parent),
            here.stem,
            function.__name__,
        ]
        done = subprocess.run(
            [*command, str(given), str(wanted)],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=environment,
        )
        assert done.returncode == 0, (
            f"{function.__name__} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        )
        return pickle.loads(wanted.read_bytes())  # noqa: S301 - written by our own child

    return run
