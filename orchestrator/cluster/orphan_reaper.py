"""Ends what a rehearsal leaves, whether its head ends it or was killed. Runs as a process of its
own; standard library only.

The kernel ends raylets and GCS with the head, and workers end with their raylet, unless they hang
or were started while the head was ending. So when the head's pipe closes, this process ends all
that has the mark of the rehearsal in its environment, and removes its folder.

    python orphan_reaper.py FOLDER    standard input: `bye` from a head that has ended its raylets
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path

#: Of the environment of all processes of a rehearsal: its private folder.
MARK = "ORCHESTRATOR_REHEARSAL"

#: Raylets die with a killed head at once; a worker that one of them was just starting shows within
#: a second or so.
_QUIET_S = 2.0
_PATIENCE_S = 60.0
_LOOK_EVERY_S = 0.05

#: What only tidies up after others has so long for it.
_TIDY_S = 5.0


def main(folder: str) -> None:
    """Wait for the head to let go, and clean up."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from workers.keeper import processes  # noqa: PLC0415 - found there alone

    quiet_s = 0.0 if "bye" in sys.stdin.read() else _QUIET_S
    began_s = quiet_since_s = time.monotonic()
    while (now_s := time.monotonic()) - began_s < _PATIENCE_S:
        left, is_late = processes.marked(MARK, folder), now_s - began_s > _TIDY_S
        processes.send((it for it in left if is_late or not processes.tidies(it)), signal.SIGKILL)
        quiet_since_s = now_s if left else quiet_since_s
        # Again and again: a process that is being ended may still write.
        shutil.rmtree(folder, ignore_errors=True)
        if not left and not Path(folder).exists() and now_s - quiet_since_s >= quiet_s:
            return
        time.sleep(_LOOK_EVERY_S)


if __name__ == "__main__":
    main(sys.argv[1])
