"""Advice about an idle card: the right cause first, with its key; the section of `report`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.runs import report_text
from orchestrator.view.advice import SAMPLED, advice_lines
from tests.factories import FACTS, add_event, begun_run, event, make_row, make_snapshot, record
from workers.messages import Progress, WorkerState

GIB = 2**30

#: A healthy worker that is alone on its card and keeps it busy.
BUSY: Mapping[str, Any] = {
    "device": "cuda",
    "budget_bytes": 3 * GIB,
    "duty_requested": 1.0,
    "duty_measured": 0.98,
    "baseline_pct": 99.0,
    "utilisation_pct": 97.0,
    "device_used_bytes": 3 * GIB,
    "progress": Progress(train_step=40, data_wait_pct=1.0, copies_pct=1.5),
}
States = Mapping[str, float]
STEADY: States = {WorkerState.RUNNING: 120.0}
#: Seconds of a worker that heat throttles for one minute and pauses for one minute.
HOT: States = {WorkerState.THROTTLED: 60.0, WorkerState.PAUSED: 60.0}


def advised(*workers: Mapping[str, Any], states: States = STEADY) -> list[str]:
    """Return the advice on one card; `workers` are the differences of its workers from `BUSY`."""
    told = {f"pc1/{index}": {**BUSY, **changes} for index, changes in enumerate(workers)}
    rows = [make_row(slot=slot, **values) for slot, values in told.items()]
    means = {slot: {key: values[key] for key in SAMPLED} for slot, values in told.items()}
    states_s = dict.fromkeys(told, states)
    return list(advice_lines(rows, means, states_s))


def trains(**changed: float) -> dict[str, Any]:
    """Return the progress of a busy training, with changes."""
    usual = {"train_step": 40, "data_wait_pct": 1.0, "copies_pct": 1.5}
    return {"progress": Progress(**{**usual, **changed})}  # type: ignore[arg-type]  # numbers


@pytest.mark.parametrize(
    ("workers", "states", "said", "remedy"),
    [
        ([{**trains(data_wait_pct=55.0), "utilisation_pct": 42.0}], STEADY,
         "55% data: it waited for data; prepare them in processes of their own", "(train.loader_workers)"),
        ([trains(copies_pct=38.0)], STEADY, "38% copies: ", "(train.pin)"),
        ([{"duty_measured": 0.3, "utilisation_pct": 48.5}], HOT, "70% heat: ", "nodes.pc1.power_limit_w"),
        ([{"baseline_pct": 45.0, "utilisation_pct": 100.0, "device_used_bytes": 11 * GIB}], STEADY, "53% neighbour: ",
         "nvidia-smi"),
        ([{"duty_requested": 0.6, "duty_measured": 0.59, "utilisation_pct": 60.0}], STEADY, "40% duty: ",
         "nodes.pc1.gpu_share"),
        ([{"utilisation_pct": 50.0}], STEADY, "47% gaps: ", "(train.compile)"),
        ([{"duty_measured": 0.0, "utilisation_pct": 0.0}] * 3, {WorkerState.EMERGENCY: 120.0}, "100% memory: ",
         "nodes.pc1.vram_per_worker_gib"),
    ],
    ids=["data", "copies", "heat", "neighbour", "duty", "gaps", "memory"],
)  # fmt: skip
def test_the_right_cause_of_an_idle_card_comes_first(
    workers: list[Mapping[str, Any]], states: States, said: str, remedy: str
) -> None:
    card, first, *_ = advised(*workers, states=states)
    assert card.startswith("pc1, ")
    assert said in first
    assert remedy in first


def test_a_busy_card_needs_no_advice() -> None:
    rests = {"duty_requested": 0.6, "duty_measured": 0.58, "device_used_bytes": 18 * GIB}
    assert advised(BUSY) == []
    assert advised(*[rests] * 7) == [], "while one rests, another has the card"
    assert advised({"duty_measured": 0.0}, states={WorkerState.PAUSED: 9.0}) == [], "too short"


def test_the_report_names_the_right_cause_first(tmp_path: Path) -> None:
    folder = tmp_path / FACTS.run_id
    store = begun_run(folder)
    row = make_row(**{**BUSY, **trains(data_wait_pct=55.0), "utilisation_pct": 42.0})
    begun = event(name="state", from_state=None, to_state=row.state.value, cause="")
    add_event(store, {**begun, "slot": row.slot, "at": "2023-11-14T22:13:20.000Z"})
    store.slots([record(row=row)])
    for second in (0.0, 20.0):
        store.update(make_snapshot(row, elapsed_s=second))
    store.end("good", 0, None, ())
    _, _, section = report_text(folder, 120).partition("why the cards were not busy\n")
    assert section.startswith("  pc1, ")
    assert section.splitlines()[1].startswith("  55% data: it waited for data; ")
