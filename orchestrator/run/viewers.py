"""Starts what watches a run from outside: verbs of this program in processes of their own, which outlive the head.

The run never waits for one and ends none: each ends by itself after the run. If one fails, the run goes on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from orchestrator.config.notify_urls import URLS_VARIABLE


def addresses_taken() -> dict[str, str]:
    """Take the addresses of notifications out of the environment, so that no worker gets them."""
    typed = os.environ.pop(URLS_VARIABLE, None)
    return {} if typed is None else {URLS_VARIABLE: typed}


def start(
    verb: str, folder: Path, tell: Callable[[str], None], environment: dict[str, str]
) -> subprocess.Popen[bytes] | None:
    """Start a verb on a run folder, with the configuration and the log in it; `None` if that fails."""
    command = [
        *(sys.executable, "-m", "orchestrator", verb, folder.name),
        *("--config", str(folder / "config.yaml"), "--run-dir", str(folder.parent)),
    ]
    try:
        with (folder / f"{verb}.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - this very program
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,  # a Ctrl-C in the terminal is for the run
            )
    except OSError as failure:
        tell(f"`{verb}` cannot be started: {failure}")
        return None
