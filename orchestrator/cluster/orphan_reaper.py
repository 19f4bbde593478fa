"""Cleans up after a rehearsal whose head was killed. Runs as a process of its own; standard library
only.

The kernel ends raylets and GCS with the head, and workers end with their raylet, unless they hang
or were started while the head was ending. So when the head's pipe closes without a `bye`, this
process ends all that has the mark of the rehearsal in its environment, and removes its folder.

    python orphan_reaper.py FOLDER        standard input: `bye` from a head that ends well
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from pathlib import Path

#: Of the environment of all processes of a rehearsal: its private folder.
MARK = "ORCHESTRATOR_REHEARSAL"

#: Raylets die with the head at once; a worker that one of them was just starting shows within a
#: second or so.
_QUIET_S = 2.0
_PATIENCE_S = 60.0
_LOOK_EVERY_S = 0.1


def main(folder: str) -> None:
    """Wait for the head to end, and clean up if it did not do so itself."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from workers.keeper import processes  # noqa: PLC0415 - found there alone

    if any(line.strip() == "bye" for line in sys.stdin):
        return
    began_s = quiet_since_s = time.monotonic()
    while time.monotonic() - quiet_since_s < _QUIET_S and time.monotonic() - began_s < _PATIENCE_S:
        if left := processes.marked(MARK, folder):
            quiet_since_s = time.monotonic()
        processes.send(left, signal.SIGKILL)
        # Again and again: a process that is being ended may still write.
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_LOOK_EVERY_S)


if __name__ == "__main__":
    main(sys.argv[1])
