"""Folders of runs, written by the product's own store: a card with some workers, and what a test says is different."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator.core.slot import SlotState
from orchestrator.record.model import Row
from orchestrator.record.store import STORE_NAME, RunStore
from tests.factories import FACTS, make_row, make_snapshot, record
from workers.messages import Progress, WorkerState

SECONDS = 120
GIB = 2**30

#: A worker that has the card for itself and keeps it busy; nothing is wrong.
BUSY: Mapping[str, Any] = {
    "duty_requested": 1.0,
    "duty_measured": 0.98,
    "baseline_pct": 99.0,
    "utilisation_pct": 97.0,
    "throttle_pct": 0.0,
    "sm_clock_mhz": 1800,
    "temperature_c": 65.0,
    "device_used_bytes": 3 * GIB,
    "progress": Progress(train_step=40, data_wait_pct=1.0, copies_pct=1.5, optimizer_pct=4.0),
}


def make_run(
    runs_dir: Path,
    *workers: Callable[[int], Mapping[str, Any]] | Mapping[str, Any],
    config: str = "train: {loader_workers: 0}",
    seconds: int = SECONDS,
    events: Iterable[Mapping[str, object]] = (),
) -> Path:
    """Make the folder of a run on one card.

    A worker is what differs from `BUSY`, maybe by second.
    """
    folder = runs_dir / FACTS.run_id
    folder.mkdir(parents=True)
    store = RunStore(folder / STORE_NAME)
    store.begin(replace(FACTS, run_id=folder.name, config_yaml=config, duration_s=float(seconds)))
    states: dict[str, SlotState | None] = {}
    for event in events:
        store.event(event)
    for second in range(seconds):
        rows = [_row(f"pc1/{index}", worker, second) for index, worker in enumerate(workers)]
        for row in rows:
            if states.get(row.slot) != row.state:
                store.event(_change(row, states.get(row.slot), second))
                states[row.slot] = row.state
        _write(store, rows, second)
    store.end("good", 0, None, ())
    return folder


def _row(
    slot: str, worker: Callable[[int], Mapping[str, Any]] | Mapping[str, Any], second: int
) -> Row:
    return make_row(
        slot=slot, **{**BUSY, **(worker if isinstance(worker, Mapping) else worker(second))}
    )


def _write(store: RunStore, rows: Iterable[Row], second: int) -> None:
    rows = tuple(rows)
    store.slots(
        record(row.slot, state=row.state.value, reason=row.reason, row=row.to_dict())
        for row in rows
    )
    store.update(make_snapshot(*rows, elapsed_s=float(second)))


def _change(row: Row, before: SlotState | None, second: int) -> dict[str, object]:
    at = datetime.fromtimestamp(FACTS.started_at_unix_s + second, tz=UTC).isoformat(
        timespec="milliseconds"
    )
    from_state = None if before is None else before.value
    return {
        "at": at.replace("+00:00", "Z"),
        "event": "state",
        "slot": row.slot,
        "from_state": from_state,
        "to_state": row.state.value,
        "cause": row.reason,
    }


def hot(second: int) -> Mapping[str, Any]:
    """Return a worker that pauses for a minute of every two, and does less before."""
    if second % 120 < 60:
        return {
            "state": WorkerState.THROTTLED,
            "duty_measured": 0.6,
            "temperature_c": 81.0,
            "throttle_pct": 20.0,
        }
    return {
        "state": WorkerState.PAUSED,
        "duty_measured": 0.0,
        "temperature_c": 84.0,
        "utilisation_pct": 0.0,
    }
