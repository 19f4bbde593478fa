"""A head with only a store, as a separate process: `python -m tests.watch.head FOLDER`.

Turn N counts N steps and writes event N, commits, and then prints N.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

from orchestrator.record.store import STORE_NAME, RunStore
from tests.factories import FACTS, add_event, event, make_row, make_snapshot, record
from workers.keeper.processes import start_time

SLOTS = 5


def main(folder: Path) -> None:
    """Work until it is killed."""
    pid = os.getpid()
    folder.mkdir(exist_ok=True)
    (folder / "head.json").write_text(json.dumps({"pid": pid}))
    store = RunStore(folder / STORE_NAME)
    started, here = start_time(pid), socket.gethostname()
    store.begin(
        replace(
            FACTS, run_id=folder.name, head_pid=pid, head_started=started, host=here, duration_s=1e6
        )
    )
    add_event(store, event(name="run_started"))
    store.commit()
    os.write(1, b"0\n")
    for turn in range(1, 10**9):
        rows = [make_row(slot=f"pc1/{index}", steps_ok=turn) for index in range(SLOTS)]
        add_event(store, event(turn, name="turn"))
        store.slots(record(row=row, incarnation=turn) for row in rows)
        if turn % 3 == 0:
            store.update(make_snapshot(*rows, elapsed_s=turn))
        store.commit()
        if store.problem is not None:
            sys.exit(store.problem)
        os.write(1, b"%d\n" % turn)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
