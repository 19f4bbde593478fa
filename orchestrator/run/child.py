"""Asks modules of `workers` that need torch, which the head never imports. A child process answers,
and ends with this process. Does not interpret the questions.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

#: Runs a module as `-m` does. The kernel ends it with the thread that waits, also after SIGKILL.
_BEGIN: Final = """
import runpy, signal, sys
from workers.keeper.processes import PR_SET_PDEATHSIG, prctl
prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""

#: Seconds between two checks whether the user has interrupted the question.
_CHECK_EVERY_S: Final = 0.2


def never() -> bool:
    """Say that the user has not interrupted."""
    return False


def ask_child(
    module: str,
    question: Mapping[str, Any],
    timeout_s: float = math.inf,
    interrupted: Callable[[], bool] = never,
) -> dict[str, Any] | str:
    """Run a module of `workers` that needs torch in a child process, and return its answer.

    Question and answer are JSON. The answer is the last line of the output: the user's task, which
    is imported from the current folder, may print other lines. A text says why there is no answer.
    """
    until_s = time.monotonic() + timeout_s
    with subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-c", _BEGIN, module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as child:
        sent: str | None = json.dumps(question)
        output: tuple[str, str] | None = None
        try:
            while output is None:
                if interrupted():
                    return "it was interrupted"
                if time.monotonic() > until_s:
                    return f"it took longer than {timeout_s:.0f} s"
                try:
                    output = child.communicate(sent, timeout=_CHECK_EVERY_S)
                except subprocess.TimeoutExpired:
                    sent = None  # communicate sends it only once
        finally:
            child.kill()
    out, err = output
    try:
        answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        last = [line.strip()[:300] for line in err.splitlines() if line.strip()][-1:]
        return ": ".join(
            [f"the process that computes it ended with status {child.returncode}", *last]
        )
    return answer
