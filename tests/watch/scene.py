"""Rows, snapshots and records for the tests of this folder: a healthy worker, and whatever a test says is different."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.record.model import Row, Snapshot
from orchestrator.record.store import COUNTERS, RunFacts, SlotRecord
from tests.counting import with_counts
from workers.messages import WorkerState

GIB = 2**30
ROOT = Path(__file__).parents[2]
STARTED_UNIX_S = 1_700_000_000.0

_HEALTHY: dict[str, Any] = {
    "slot": "pc1/0",
    "node": "pc1",
    "gpu_name": "NVIDIA GeForce RTX 3090",
    "gpu_uuid": "GPU-0",
    "device": "cuda",
    "state": WorkerState.RUNNING,
    "reason": "steady",
    "policy": "adaptive",
    "size": 8192,
    "batch": 128,
    "dtype": "fp16",
    "tflops": 9.61,
    "baseline_pct": 97.2,
    "allocated_bytes": int(1.9 * GIB),
    "reserved_bytes": int(2.4 * GIB),
    "claim_bytes": int(2.5 * GIB),
    "cap_bytes": int(2.63 * GIB),
    "budget_bytes": int(3.3 * GIB),
    "device_used_bytes": 21 * GIB,
    "device_total_bytes": 24 * GIB,
    "steps_ok": 400,
    "duty_requested": 0.6,
    "duty_measured": 0.587,
    "peak_pct": 62.4,
    "temperature_c": 71.0,
    "temperature_of": "card",
    "margin_c": 24.0,
    "power_w": 281.4,
    "power_limit_w": 350.0,
    "throttle_pct": 3.0,
    "verify_checks": 412,
    "heartbeat_age_s": 0.8,
}

FACTS = RunFacts(
    run_id="20261120-051500-0b76",
    started_at_unix_s=STARTED_UNIX_S,
    duration_s=30.0,
    min_success_rate=0.95,
    mode="rehearse",
    device=None,
    one_machine=True,
    config_yaml="run: {duration: 30s}\n# \U0001f600\n",
    chaos=None,
    nodes_planned=("pc1", "pc2"),
    head_pid=os.getpid(),
    head_started=None,
    host="pc1",
)

_RECORD = SlotRecord(
    slot="pc1/0",
    node="pc1",
    state="RUNNING",
    reason="steady",
    incarnation=2,
    next_sequence=3,
    steps_at_risk=12,
    counters={**dict.fromkeys(COUNTERS, 0), "steps_ok": 400, "work_flop": 1e18},
    resume={"policy": "classic", "size": 8192, "learned": None, "ok": True},
    row={"steps_ok": 400},
)


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_row(**changed: object) -> Row:
    """Make a healthy row with some fields changed."""
    return Row(**with_counts({**_HEALTHY, **changed}))


def make_snapshot(*rows: Row, **changed: object) -> Snapshot:
    """Make a snapshot of rows, ten seconds into a run of thirty."""
    usual: dict[str, Any] = {
        "run_id": "run-1",
        "started_at": STARTED_UNIX_S,
        "elapsed_s": 10.0,
        "duration_s": 30.0,
        "nodes_planned": ("pc1", "pc2"),
        "nodes_seen": ("pc1", "pc2"),
        "rows": rows,
    }
    given = {**usual, **changed}
    given.setdefault("now_unix_s", given["started_at"] + given["elapsed_s"])
    return Snapshot(**given)


def record(slot: str = "pc1/0", **changed: Any) -> SlotRecord:
    """Return what a store keeps of a slot."""
    row = changed.get("row", {})
    counters = {name: row.get(name, count) for name, count in _RECORD.counters.items()}
    own = {"slot": slot, "node": slot.partition("/")[0], "counters": counters}
    return replace(_RECORD, **{**own, **changed})


def event(
    number: int | None = None, *, name: str = "numbered", **details: object
) -> dict[str, object]:
    """Return an event as the diary tells it."""
    return {
        "at": "2023-11-14T22:13:20.123Z",
        "event": name,
        "slot": None,
        "number": number,
        **details,
    }


def head_process(folder: Path) -> subprocess.Popen[bytes]:
    """Start a head that works on this folder until it is killed."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.watch.head", str(folder)], cwd=ROOT, stdout=subprocess.PIPE
    )
