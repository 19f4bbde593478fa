"""Ends what a rehearsal leaves, whether its head ends it or was killed. Runs as a process of its
own; standard library only.

The kernel ends raylets and GCS with the head, and workers end with their raylet, unless they hang
or were started while the head was ending. When the head's pipe closes, this process kills all
processes with the rehearsal's mark in their environment, and removes its folder.

    python orphan_reaper.py FOLDER    standard input: `bye` from a head that has ended its raylets
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path

#: The variable, in all processes of a rehearsal, that holds its private folder.
MARK = "ORCHESTRATOR_REHEARSAL"

#: Raylets die with a killed head at once; a worker that one was just starting appears within about
#: a second.
_QUIET_S = 2.0
_PATIENCE_S = 60.0
_LOOK_EVERY_S = 0.05

#: Processes that clean up after others may do so for this time.
_TIDY_S = 5.0


def main(folder: str) -> None:
    """Wait until the head's pipe closes, and clean up."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from workers.keeper import processes  # noqa: PLC0415 - needs that path

    quiet_s = 0.0 if "bye" in sys.stdin.read() else _QUIET_S
    began_s = quiet_since_s = time.monotonic()
    while (now_s := time.monotonic()) - began_s < _PATIENCE_S:
        left, is_late = processes.marked(MARK, folder), now_s - began_s > _TIDY_S
        processes.send((it for it in left if is_late or not processes.tidies(it)), signal.SIGKILL)
        quiet_since_s = now_s if left else quiet_since_s
        # Repeated, since a process that is being ended may still write.
        shutil.rmtree(folder, ignore_errors=True)
        if not left and not Path(folder).exists() and now_s - quiet_since_s >= quiet_s:
            return
        time.sleep(_LOOK_EVERY_S)


if __name__ == "__main__":
    main(sys.argv[1])
