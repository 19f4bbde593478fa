"""Questions to modules of `workers` that need torch, which the head never imports: a process of its
own answers, and ends with this one. Knows no question.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

#: Has the process end with the thread that waits for it, also after SIGKILL: as `-m` otherwise.
_BEGIN: Final = """
import runpy, signal, sys
from workers.keeper.processes import PR_SET_PDEATHSIG, prctl
prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def ask_child(
    module: str, question: Mapping[str, Any], timeout_s: float | None = None
) -> dict[str, Any] | str:
    """Return what a module of `workers` that needs torch answers, in a process of its own.

    Question and answer are JSON. The answer is the last line; the user's own task, which is
    imported from the current folder, may print others. A text says why there is no answer.
    """
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-c", _BEGIN, module],
            input=json.dumps(question),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {timeout_s:.0f} s"
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = [line.strip()[:300] for line in done.stderr.splitlines() if line.strip()][-1:]
        return ": ".join(
            [f"the process that computes it ended with status {done.returncode}", *last]
        )
    return answer
