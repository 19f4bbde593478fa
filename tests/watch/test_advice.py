"""Why a card was not busy, in the text of `report`: the right cause first, with its key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli.runs import report_text
from orchestrator.core.slot import HeadState, SlotState
from orchestrator.record.history import Buckets, Span
from orchestrator.record.model import Row
from orchestrator.record.store import STORE_NAME, RunStore
from orchestrator.view.advice import SAMPLED, Advice, Cause, advice_lines, advice_of
from tests.factories import FACTS, make_row, make_snapshot, record
from workers.messages import Progress, WorkerState

GIB = 2**30

#: A worker that has the card for itself and keeps it busy; nothing is wrong.
BUSY: Mapping[str, Any] = {
    "device": "cuda",
    "budget_bytes": 3 * GIB,
    "duty_requested": 1.0,
    "duty_measured": 0.98,
    "baseline_pct": 99.0,
    "utilisation_pct": 97.0,
    "temperature_c": 65.0,
    "device_used_bytes": 3 * GIB,
    "progress": Progress(train_step=40, data_wait_pct=1.0, copies_pct=1.5, optimizer_pct=4.0),
}

Worker: TypeAlias = Callable[[int], Mapping[str, Any]] | Mapping[str, Any]
"""What differs from `BUSY`, maybe by second."""


def make_run(runs_dir: Path, *workers: Worker, config: str = "{}", seconds: int = 120) -> Path:
    """Make the folder of a run on one card."""
    folder = runs_dir / FACTS.run_id
    folder.mkdir(parents=True)
    store = RunStore(folder / STORE_NAME)
    store.begin(replace(FACTS, config_yaml=config, duration_s=float(seconds)))
    states: dict[str, SlotState] = {}
    for second in range(seconds):
        rows = [_row(f"pc1/{index}", worker, second) for index, worker in enumerate(workers)]
        for row in rows:
            if states.get(row.slot) != row.state:
                store.event(_change(row, second))
                states[row.slot] = row.state
        store.slots(record(row.slot, state=row.state.value, row=row.to_dict()) for row in rows)
        store.update(make_snapshot(*rows, elapsed_s=float(second)))
    store.end("good", 0, None, ())
    return folder


def _row(slot: str, worker: Worker, second: int) -> Row:
    changes = worker if isinstance(worker, Mapping) else worker(second)
    return make_row(slot=slot, **{**BUSY, **changes})


def _change(row: Row, second: int) -> dict[str, object]:
    moment = datetime.fromtimestamp(FACTS.started_at_unix_s + second, tz=UTC)
    at = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    change = {"event": "state", "slot": row.slot, "to_state": row.state.value}
    return {"at": at, "from_state": None, "cause": row.reason, **change}


def hot(second: int) -> Mapping[str, Any]:
    """Return a worker that pauses for a minute of every two, and does less before."""
    if second % 120 < 60:
        return {"state": WorkerState.THROTTLED, "duty_measured": 0.6}
    return {"state": WorkerState.PAUSED, "duty_measured": 0.0, "utilisation_pct": 0.0}


def trains(**changed: float) -> dict[str, Any]:
    """Return the progress of a training that is otherwise busy."""
    usual = {"train_step": 40, "data_wait_pct": 1.0, "copies_pct": 1.5, "optimizer_pct": 4.0}
    return {"progress": Progress(**{**usual, **changed})}  # type: ignore[arg-type]  # numbers


SITUATIONS: dict[str, tuple[list[Worker], str, str]] = {
    "starved loader": (
        [{**trains(data_wait_pct=55.0), "utilisation_pct": 42.0}],
        "55% data: it waited for data; prepare data in processes of their own",
        "--set train.loader_workers=auto",
    ),
    "transfers": (
        [trains(copies_pct=38.0)],
        "38% copies: ",
        "--set train.non_blocking=true",
    ),
    "updates": (
        [trains(optimizer_pct=30.0)],
        "30% optimizer: ",
        "--set train.optimizer=adamw-fused",
    ),
    "heat": ([hot], "70% heat: ", "nodes.pc1.power_limit_w"),
    "a neighbour": (
        [{"baseline_pct": 45.0, "utilisation_pct": 100.0, "device_used_bytes": 11 * GIB}],
        "53% neighbour: ",
        "nvidia-smi",
    ),
    "duty": (
        [{"duty_requested": 0.6, "duty_measured": 0.59, "utilisation_pct": 60.0}],
        "40% duty: ",
        "--set nodes.pc1.gpu_share=1.0",
    ),
    "gaps": ([{"utilisation_pct": 50.0}], "47% gaps: ", "--set train.compile=block"),
    "no memory": (
        [{"state": WorkerState.EMERGENCY, "duty_measured": 0.0, "utilisation_pct": 0.0}] * 3,
        "100% memory: ",
        "--set nodes.pc1.workers=2",
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_report_names_the_right_cause_first(situation: str, tmp_path: Path) -> None:
    workers, said, remedy = SITUATIONS[situation]
    config = "train: {loader_workers: 0, non_blocking: false, optimizer: sgd}"
    text = report_text(make_run(tmp_path, *workers, config=config), 120)
    _, _, section = text.partition("why the cards were not busy\n")
    card, first, *_ = section.splitlines()
    assert card.strip().startswith("pc1, ")
    assert said in first
    assert remedy in first


def test_a_busy_card_needs_no_advice(tmp_path: Path) -> None:
    rests = {"duty_requested": 0.6, "duty_measured": 0.58, "device_used_bytes": 18 * GIB}
    for name, workers in {"one": [BUSY], "seven": [rests] * 7, "short": [hot]}.items():
        folder = make_run(tmp_path / name, *workers, seconds=5 if name == "short" else 60)
        assert "why the cards were not busy" not in report_text(folder, 120)


def test_a_key_that_is_set_already_is_not_advised(tmp_path: Path) -> None:
    config = "train: {loader_workers: auto, ram_cache: false}"
    text = report_text(make_run(tmp_path, trains(data_wait_pct=50.0), config=config), 120)
    assert "try --set train.ram_cache=true" in text
    assert "loader_workers" not in text


def advised(**changes: Any) -> tuple[Advice, ...]:
    """Return the advice on one slot that works for a minute, and differs so from `BUSY`."""
    values = {key: value for key, value in {**BUSY, **changes}.items() if key in SAMPLED}
    row = make_row(**{**BUSY, **changes})
    course = {key: Buckets((30.0,), *((values.get(key),) for _ in range(3))) for key in SAMPLED}
    span = Span(state=row.state.value, from_unix_s=0.0, to_unix_s=None, cause="")
    (card,) = advice_of([row], {row.slot: course}, {row.slot: [span]}, 60.0, {})
    return card.advice


def test_advice_has_its_cause_as_a_value_and_its_key() -> None:
    (first, *_) = advised(**trains(data_wait_pct=50.0))
    assert first.cause is Cause.DATA
    assert first.share == pytest.approx(0.5, abs=0.02)
    assert first.key == "train.loader_workers=auto"


STATES: list[SlotState] = [*WorkerState, *HeadState]
SHARES = st.none() | st.floats(0, 100)


@given(
    states=st.lists(st.tuples(st.sampled_from(STATES), st.floats(0, 1e5)), max_size=4),
    told=st.fixed_dictionaries(
        {"duty_measured": st.none() | st.floats(0, 1), "utilisation_pct": SHARES}
    ),
    waits=st.fixed_dictionaries(
        dict.fromkeys(("data_wait_pct", "copies_pct", "optimizer_pct"), SHARES)
    ),
    workers=st.integers(1, 3),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_every_share_is_a_share(
    states: list[tuple[SlotState, float]],
    told: dict[str, float | None],
    waits: dict[str, float | None],
    workers: int,
    device: str,
) -> None:
    progress = Progress(**waits)  # type: ignore[arg-type]  # numbers
    rows = [
        make_row(slot=f"pc1/{index}", device=device, progress=progress) for index in range(workers)
    ]
    course = {key: Buckets((1.0,), *((told.get(key),) for _ in range(3))) for key in SAMPLED}
    cards = advice_of(
        rows,
        {row.slot: course for row in rows},
        {row.slot: list(_spans(states)) for row in rows},
        4e5,
        {},
    )
    for card in cards:
        assert card.busy is None or 0 <= card.busy <= 1.0
        assert all(0 <= each.share <= 1 + 1e-9 for each in card.advice)
    assert all(line.isprintable() for line in advice_lines(cards))


def _spans(states: Iterable[tuple[SlotState, float]]) -> Iterable[Span]:
    at_s = 0.0
    for state, lasts_s in states:
        yield Span(state=state.value, from_unix_s=at_s, to_unix_s=at_s + lasts_s, cause="")
        at_s += lasts_s
