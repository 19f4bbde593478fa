"""Texts as people read them: lines of a terminal's width, events with units and times of day."""

from __future__ import annotations

import pytest

from orchestrator.record.events import StoredEvent
from orchestrator.view.phrases import event_words


def stored(name: str, **details: object) -> StoredEvent:
    return StoredEvent(
        number=1, at="2026-11-22T12:07:34.677Z", event=name, slot=None, details=details
    )


@pytest.mark.parametrize(
    ("event", "details", "words"),
    [
        ("oom", {"size": 512, "needed_bytes": 6 * 2**20, "recovery_s": 0.014, "text": "no"},
         ("oom", "size 512, needed 6 MiB, recovery 0.014 s, text no")),
        ("grew", {"from_size": 512, "size": 640, "from_batch": 8, "batch": 8}, ("grew", "size 512 to 640, batch 8")),
        ("state", {"from_state": "RUNNING", "to_state": "LOST", "cause": "gone", "incarnation": 2},
         ("state", "RUNNING to LOST: gone")),
        ("speed", {"steps_per_s": 10.418}, ("speed", "steps 10.418 per s")),
        ("leased", {"lease_bytes": 5}, ("leased", "lease 5 bytes")),
        ("run_ended", {"missed": ["one", "two"], "exit_code": 1}, ("run ended", "missed one; two, exit code 1")),
    ],
)  # fmt: skip
def test_events_are_told_in_words_with_units(
    event: str, details: dict[str, object], words: tuple[str, str]
) -> None:
    assert event_words(stored(event, worker_at_unix_s=1795349254.58, **details)) == words
