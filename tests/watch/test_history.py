"""The history of a run, values and states, is read from its store, also during the run."""

from __future__ import annotations

import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.record import history
from orchestrator.record.archive import read_run
from orchestrator.record.events import read_events
from orchestrator.view.alerts import Freshness
from orchestrator.view.look import EVENTS_MOST, LATE_AFTER_S, Watch
from tests.factories import (
    FACTS,
    STARTED_UNIX_S,
    add_event,
    begun_run,
    event,
    make_row,
    make_snapshot,
    record,
)
from tests.scene import wait_for
from tests.watch.scene import Clock, begun_head
from workers.messages import Progress, WorkerState

SLOTS = ("pc1/0", "pc1/1")
SECONDS = 40


def at(second: float) -> float:
    return STARTED_UNIX_S + second


def rows_at(second: int) -> list[object]:
    return [
        make_row(
            slot=slot,
            temperature_c=50.0 + second,
            steps_ok=10 * second,
            state=WorkerState.BACKOFF if second >= 20 else WorkerState.RUNNING,
            progress=Progress(train_step=second, loss=5.0 / (second + 1)),
        )
        for slot in SLOTS
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of two slots with a sample in every second."""
    place = tmp_path_factory.mktemp("runs") / FACTS.run_id
    store = begun_run(place)
    for second in range(SECONDS):
        rows = rows_at(second)
        if second == 20:
            for slot in SLOTS:
                told = {"from_state": "RUNNING", "to_state": "BACKOFF", "cause": "memory ran out"}
                told |= {"at": "2023-11-14T22:13:40.000Z", "slot": slot}
                add_event(store, event(name="state", **told))
        store.slots(record(row=row) for row in rows)  # type: ignore[attr-defined]
        store.update(make_snapshot(*rows, elapsed_s=float(second)))  # type: ignore[arg-type]
    store.update(make_snapshot(*rows_at(SECONDS), elapsed_s=float(SECONDS)))  # type: ignore[arg-type]
    store.end("good", 0, None, ())
    return place


def test_a_value_over_time_has_low_mean_and_high_in_each_part(folder: Path) -> None:
    keys = ("temperature_c", "loss", "fan_pct")
    found = history.courses(folder, keys, at(0), at(80), 8, "pc1/0")["pc1/0"]
    heat = found["temperature_c"]
    assert heat.low[:4] == (50.0, 60.0, 70.0, 80.0)
    assert heat.high[:4] == (59.0, 69.0, 79.0, 89.0)
    assert heat.mean[:2] == (54.5, 64.5)
    assert heat.mean[5:] == (None, None, None)
    assert heat.at_unix_s[0] == at(5)
    assert found["loss"].high[0] == 5.0
    assert found["fan_pct"].mean == (None,) * 8, "no sensor told it"


def test_the_time_in_a_state_is_told_up_to_the_end(folder: Path) -> None:
    assert history.sampled_between(folder) == (at(0), at(SECONDS + 0.001))
    assert history.time_in_states(folder, at(SECONDS))["pc1/1"] == {"BACKOFF": 20.0}


def test_a_run_is_followed_while_its_head_works_and_dies(tmp_path: Path) -> None:
    folder, clock = tmp_path / FACTS.run_id, Clock()
    with begun_head(folder) as head:
        watch = Watch(folder, monotonic_s=clock, unix_s=lambda: 0.0)
        frame = watch.read()
        assert frame.freshness is Freshness.LIVE

        def has_news() -> bool:
            nonlocal frame
            before, frame = frame, watch.read()
            return before.events[-1] != frame.events[-1]

        for _ in range(3):
            clock.now_s += 1.0
            wait_for(has_news, "another event")
            assert frame.freshness is Freshness.LIVE
        head.send_signal(signal.SIGSTOP)
        wait_for(lambda: not has_news(), "the head to stand still")
        assert frame.events == read_events(folder, limit=EVENTS_MOST)
        clock.now_s += LATE_AFTER_S + 7.0
        late = watch.read()
        assert (late.freshness, late.late_s >= LATE_AFTER_S) == (Freshness.LATE, True)
        head.kill()
        wait_for(lambda: watch.read().freshness is Freshness.HEAD_GONE, "its end to be seen")


def test_a_run_of_another_machine_lives_while_its_store_changes(tmp_path: Path) -> None:
    """A process id of another machine means nothing here, and its clock may be wrong by hours."""
    folder = tmp_path / FACTS.run_id
    store = begun_run(folder, replace(FACTS, host=f"not-{socket.gethostname()}"))
    store.update(make_snapshot(make_row()))
    store.commit()
    clock = Clock()
    watch = Watch(folder, monotonic_s=clock)
    assert read_run(folder).outcome == "interrupted", "as far as a single look can tell"
    assert watch.read().freshness is Freshness.LIVE
    clock.now_s = 20.0
    assert watch.read().freshness is Freshness.LATE
    store.update(make_snapshot(make_row(), elapsed_s=20.0))
    store.commit()
    assert watch.read().freshness is Freshness.LIVE
    clock.now_s = 60.0
    assert watch.read().freshness is Freshness.HEAD_GONE
