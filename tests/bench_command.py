"""Runs one verb of `scripts/bench.py` as a person would; does not judge its figures."""

from __future__ import annotations

import subprocess
from typing import Any

from tests.scene import PATIENCE_S, ROOT, only_object, python

#: A bench waits for several things in turn, each of which may be late on a busy machine.
_BENCH_S = 2 * PATIENCE_S


def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("scripts/bench.py", *arguments, cwd=ROOT, timeout_s=_BENCH_S)


def bench(*arguments: str) -> dict[str, Any]:
    done = typed(*arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.strip(), "people get a table"
    result = only_object(done.stdout)
    assert (result["schema"], result["bench"], result["broken"]) == (1, arguments[0], [])
    return result
