"""Texts as people read them: lines of a terminal's width, events with units and times of day."""

from __future__ import annotations

from datetime import datetime

import pytest

from orchestrator.record.events import StoredEvent
from orchestrator.view.cells import wrapped
from orchestrator.view.document import event_line
from orchestrator.view.phrases import event_words
from orchestrator.view.slots import headline
from tests.factories import make_snapshot


def stored(name: str, **details: object) -> StoredEvent:
    return StoredEvent(
        number=1, at="2026-11-22T12:07:34.677Z", event=name, slot=None, details=details
    )


def test_lines_are_broken_between_words_and_commands_are_not() -> None:
    command = "python -m orchestrator report 20261123-101500-aaaa --run-dir /data/runs"
    text = f"  no run goes on in /data/runs; type this to see the newest one: {command}; it says more\nshort\n"
    lines = wrapped(text, 60).splitlines()
    assert " ".join(line.strip() for line in lines) == " ".join(text.split())
    assert lines[0] == "  no run goes on in /data/runs; type this to see the newest"
    assert any(command in line for line in lines)
    assert all(len(line) <= 60 or command in line for line in lines)
    assert wrapped(text, None) == text


@pytest.mark.parametrize(
    ("event", "details", "words"),
    [
        ("oom", {"size": 512, "needed_bytes": 6 * 2**20, "recovery_s": 0.014, "text": "no"},
         ("oom", "size 512, needed 6 MiB, recovery 0.014 s, text no")),
        ("grew", {"from_size": 512, "size": 640, "from_batch": 8, "batch": 8}, ("grew", "size 512 to 640, batch 8")),
        ("state", {"from_state": "RUNNING", "to_state": "LOST", "cause": "gone", "incarnation": 2},
         ("state", "RUNNING to LOST: gone")),
        ("leased", {"lease_bytes": 5}, ("leased", "lease 5 bytes")),
        ("run_ended", {"missed": ["one", "two"], "exit_code": 1}, ("run ended", "missed one; two, exit code 1")),
    ],
)  # fmt: skip
def test_events_are_told_in_words_with_units(
    event: str, details: dict[str, object], words: tuple[str, str]
) -> None:
    assert event_words(stored(event, worker_at_unix_s=1795349254.58, **details)) == words


def test_moments_are_times_of_day() -> None:
    at_unix_s = 1795349254.0
    here = datetime.fromtimestamp(at_unix_s).astimezone().strftime("%H:%M:%S")
    told = event_line(stored("x", due_unix_s=at_unix_s))
    assert (told["time"], told["text"]) == (here, f"due {here}")


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        (None, ["starting for 00:03, then 05:00 of work"]),
        ("1 queued", ["starting for 00:03", "jobs: 1 queued"]),
    ],
)
def test_a_queue_has_no_length(jobs: str | None, words: list[str]) -> None:
    starting = make_snapshot(starting_s=3.0, duration_s=300.0, elapsed_s=0.0, jobs=jobs)
    assert [cell.text for cell in headline(starting)][2:] == words
