"""Reads all that the frozen page shows of a run, as one value for JSON; its shape is in `web/page/source.js`.

The courses of values are thinned out until they fit: of few slots in 300 parts each, of a thousand in 16. Does not
write the file (`page.py`).
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Final

from orchestrator.watch import history
from orchestrator.watch.archive import StoredEvent, StoredRun
from orchestrator.watch.catalogue import FIELDS
from orchestrator.watch.follow import Follower
from orchestrator.watch.history import Buckets
from orchestrator.watch.model import Row
from orchestrator.web import page_data
from orchestrator.web.page_data import Json

_PARTS_MOST: Final = 300
_PARTS_LEAST: Final = 16
#: Of all courses together: about 2.5 MiB of text.
_NUMBERS_MOST: Final = 400_000
_EVENTS_MOST: Final = 2_000
_EVENTS_OF_SLOT: Final = 30

_OF_TRAINING: Final = ("loss", "samples_per_s", "tokens_per_s", "data_wait_pct")
_COURSES: Final = ("size", *page_data.CHARTED, "reserved_bytes", *_OF_TRAINING)


def frozen(folder: Path) -> Json:
    """Return the run in a run folder, with its last picture and the course of its values.

    Raises:
        NothingStoredError: Nothing is stored in it yet.
        ArchiveError: It cannot be read.
    """
    frame = Follower(folder).look()
    rows = frame.snapshot.rows
    events = history.events(folder, limit=_EVENTS_MOST)
    by_slot: defaultdict[str, list[StoredEvent]] = defaultdict(list)
    for event in events:
        if event.slot is not None:
            by_slot[event.slot].append(event)
    told_of = {row.slot: tuple(key for key in _COURSES if FIELDS[key].value(row) is not None) for row in rows}
    parts = parts_for(sum(map(len, told_of.values())))
    courses = {row.slot: _courses(folder, row, told_of[row.slot], frame.run, parts) for row in rows}
    told_courses = {
        slot: {key: page_data.history_of(key, found) for key, found in course.items()}
        for slot, course in courses.items()
    }
    sampled = history.sampled_between(folder)
    slots = {}
    for row in rows:
        spans = history.state_spans(folder, row.slot)
        told = page_data.slot_of(frame, row.slot, spans, by_slot[row.slot][-_EVENTS_OF_SLOT:])
        if told is not None:
            drawn = courses[row.slot]
            fields = [(key, label) for key, label in told["fields"] if key in drawn] or told["fields"]
            charts = [key for key in told["charts"] if key in drawn]
            del told["row"]  # for programs, which have `report --json`
            slots[row.slot] = {**told, "sampled": sampled, "fields": fields, "charts": charts}
    return {
        **page_data.frozen_table(frame),
        "slots": slots,
        "times": next((drawn["t"] for course in told_courses.values() for drawn in course.values()), []),
        "history": {
            slot: {key: {name: value for name, value in drawn.items() if name != "t"} for key, drawn in course.items()}
            for slot, course in told_courses.items()
        },
        "events": [page_data.event_of(event) for event in events],
        "cards": page_data.cards_of(frame),
    }


def parts_for(courses: int) -> int:
    """Return into how many parts of time each of so many courses is divided."""
    return max(_PARTS_LEAST, min(_PARTS_MOST, _NUMBERS_MOST // max(1, 3 * courses)))


def _courses(folder: Path, row: Row, keys: tuple[str, ...], run: StoredRun, parts: int) -> dict[str, Buckets]:
    begins = run.facts.started_at_unix_s
    ends = run.updated_at_unix_s
    if not keys or ends is None or ends <= begins:
        return {}
    found = history.buckets(folder, row.slot, keys, begins, ends + 0.001, parts)
    return {key: course for key, course in found.items() if any(value is not None for value in course.mean)}
