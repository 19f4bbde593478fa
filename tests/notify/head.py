"""A head with nothing but its store, as a process of its own: `python -m tests.notify.head FOLDER`.

Each line of its input is a JSON object: `states` of slots (those that are not named work), `gone`
nodes, records that are `incomplete`, or an `end` with what was `missed`. It says `ok` when that is
stored.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.core.slot import slot_state
from orchestrator.record.store import STORE_NAME, RunStore
from tests.factories import FACTS, event, make_row, make_snapshot, record
from tests.scene import ROOT
from workers.host.processes import start_time

RUN_ID = "20261123-101500-0b76"
NODES = {"pc1": 7, "pc2": 3}


class Head:
    """What a test tells the process to store."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def store(self, **told: object) -> None:
        """Have this stored."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n"


@contextmanager
def head_of(folder: Path) -> Iterator[Head]:
    """Start a head whose slots all work; it is killed at the end if it has not ended."""
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.notify.head", str(folder)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    ) as process:
        head = Head(process)
        try:
            head.store()
            yield head
        finally:
            process.kill()


def main(folder: Path) -> None:
    """Store what is asked for."""
    pid, started_unix_s = os.getpid(), time.time()
    (folder / "head.json").write_text(json.dumps({"pid": pid}))
    store = RunStore(folder / STORE_NAME)
    here = {"head_pid": pid, "head_started": start_time(pid), "host": socket.gethostname()}
    store.begin(replace(FACTS, run_id=folder.name, started_at_unix_s=started_unix_s, **here))
    for line in sys.stdin:
        told: dict[str, Any] = json.loads(line)
        rows = [
            make_row(
                slot=slot, node=node, gpu_uuid=f"GPU-{node}", **told.get("states", {}).get(slot, {})
            )
            for node, slots in NODES.items()
            for slot in (f"{node}/{number}" for number in range(slots))
        ]
        rows = [replace(row, state=slot_state(row.state)) for row in rows]
        seen = tuple(node for node in NODES if node not in told.get("gone", ()))
        elapsed_s = time.time() - started_unix_s
        snapshot = make_snapshot(
            *rows,
            run_id=folder.name,
            nodes_seen=seen,
            started_at=started_unix_s,
            elapsed_s=elapsed_s,
            now_unix_s=time.time(),
        )
        store.slots(
            record(row.slot, state=row.state.value, reason=row.reason, row=row.to_dict())
            for row in rows
        )
        store.incomplete = told.get("incomplete", False)
        store.update(snapshot)
        store.commit()
        if "end" in told:
            store.event(event(name="run_ended", missed=told["missed"]))
            store.end(told["end"], told["code"], None, [])
        assert store.problem is None, store.problem
        print("ok", flush=True)  # noqa: T201 - to the test


if __name__ == "__main__":
    main(Path(sys.argv[1]))
