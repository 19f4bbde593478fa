"""The event log: every line is JSON, whatever the event, and a full disk is a reported problem and
not a crash.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.record.events import TEXT_LIMIT_BYTES, EventLog, read_events
from workers.messages import WorkerState


def lines(path: Path) -> list[dict[str, Any]]:
    content = path.read_text(encoding="utf-8")
    assert content.endswith("\n")
    return [json.loads(line) for line in content.splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


@pytest.fixture
def log(path: Path) -> Iterator[EventLog]:
    """Open a log and close it after the test."""
    opened = EventLog(path)
    yield opened
    opened.close()


def test_an_event_is_a_line_at_once(path: Path) -> None:
    log = EventLog(path, lambda: 1_700_000_000.1234)
    log.write("state_changed", slot="pc1/3", state=WorkerState.BACKOFF, size=5734, path=Path("x"))
    log.write("run_started")

    assert lines(path) == [
        {
            "at": "2023-11-14T22:13:20.123Z",
            "event": "state_changed",
            "slot": "pc1/3",
            "state": "BACKOFF",
            "size": 5734,
            "path": "x",
        },
        {"at": "2023-11-14T22:13:20.123Z", "event": "run_started", "slot": None},
    ]
    assert log.problem is None
    log.close()


def test_a_megabyte_of_traceback_keeps_its_beginning_and_its_end(path: Path, log: EventLog) -> None:
    log.write("error", error="Traceback" + "é" * 2**20 + "ValueError: this one")

    ((read),) = lines(path)
    assert TEXT_LIMIT_BYTES <= len(read["error"].encode()) < TEXT_LIMIT_BYTES + 100
    assert read["error"].startswith("Traceback")
    assert read["error"].endswith("ValueError: this one")
    assert "bytes cut" in read["error"]


def test_values_that_json_does_not_know(path: Path, log: EventLog) -> None:
    deep: list[object] = []
    for _ in range(1000):
        deep = [deep]
    log.write(
        "odd",
        numbers=[math.nan, math.inf, 1.5],
        huge=10**5000,
        deep=deep,
        inner={"a": {1: (2, None)}},
    )

    ((read),) = lines(path)
    assert read["numbers"] == [None, None, 1.5]
    assert read["inner"] == {"a": {"1": [2, None]}}
    assert read["huge"].startswith("0x")


@given(
    st.dictionaries(
        st.text(st.characters(), max_size=8).filter(lambda key: key != "slot")
        | st.sampled_from(["event", "self", "at", "method_name", "fields"]),
        st.one_of(st.text(st.characters()), st.floats(), st.integers(), st.none(), st.binary()),
    )
)
def test_any_details_make_one_line_of_json(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, object]
) -> None:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    log = EventLog(path)
    log.write("any", **fields)
    log.close()

    ((read),) = lines(path)
    assert read["event"] == "any"
    assert len(path.read_bytes().splitlines()) == 1


def test_a_full_disk_is_a_problem_not_a_crash() -> None:
    log = EventLog(Path("/dev/full"))
    log.write("one")
    assert log.incomplete
    assert "No space left" in str(log.problem)
    for _ in range(2_000):
        log.write("more", text="x" * 8_000)

    assert "lost so far" in str(log.problem)
    log.close()


def test_events_are_asked_for_by_name_slot_and_number(path: Path, log: EventLog) -> None:
    for number in range(3):
        log.write("state", slot=f"pc1/{number}", inner={"event": "other", "slot": "pc1/9"})
    log.write("other")
    path.write_text(path.read_text() + 'no event\n{"at": 1}\n')
    told = read_events(path.parent)
    assert [event.event for event in told] == ["state", "state", "state", "other"]
    assert read_events(path.parent, ("other",)) == told[3:]
    assert read_events(path.parent, ("state",), slot="pc1/1", after=told[0].number) == told[1:2]
    assert read_events(path.parent, ("state",), limit=2) == told[1:3]
    assert read_events(path.parent, slot="pc1/9") == ()
    assert read_events(path.parent / "nowhere") == ()
