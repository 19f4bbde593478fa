"""The JSON document of a run at one moment: head, tables, alerts, last events.

Pure. The page receives a document once a second; a report contains one. Texts, units and tones are
made here and in the tables, so that the page formats nothing. Does not read the run folder, and has
no values over time (`charts.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from orchestrator.record.events import StoredEvent
from orchestrator.record.summary import SCHEMA
from orchestrator.view.alerts import Frame, Freshness
from orchestrator.view.cells import clean, clock, moment, shorten
from orchestrator.view.jobs import current, jobs_table
from orchestrator.view.phrases import event_words, totals
from orchestrator.view.slots import STATE_TONES, cards_table, headline, slots_table
from orchestrator.view.tables import Tone

Json: TypeAlias = dict[str, Any]

_TEXT_CELLS: Final = 400

OUTCOME_TONES: Final[Mapping[str, Tone]] = {
    "good": Tone.GOOD,
    "degraded": Tone.WARN,
    "interrupted": Tone.WARN,
    "failed": Tone.BAD,
}
_TONE_OF_STATE: Final = {state.value: tone for state, tone in STATE_TONES.items()}


def document(frame: Frame) -> Json:
    """Return the document of a frame."""
    tables = [slots_table(frame.snapshot), cards_table(frame.snapshot)]
    if frame.queue is not None:
        tables.append(jobs_table(frame.queue, current(frame.queue)))
    return {
        "schema": SCHEMA,
        "head": _head(frame),
        "tables": {table.name: table.to_json() for table in tables},
        "alerts": [alert.to_json() for alert in frame.alerts],
        "events": [event_line(event) for event in frame.events],
    }


def event_line(event: StoredEvent) -> Json:
    """Return one event as a line of a table."""
    name, text = event_words(event)
    at_unix_s = event.at_unix_s
    tone = _TONE_OF_STATE.get(str(event.details.get("to_state")), Tone.PLAIN)
    return {
        "number": event.number,
        "at_unix_s": at_unix_s,
        "time": clean(event.at) if at_unix_s is None else moment(at_unix_s, "%H:%M:%S"),
        "slot": None if event.slot is None else clean(event.slot),
        "event": clean(event.event),
        "words": clean(name),
        "text": shorten(clean(text), _TEXT_CELLS),
        "tone": Tone.BAD if event.event == "workload_error" else tone,
    }


def _head(frame: Frame) -> Json:
    run, snapshot = frame.run, frame.snapshot
    return {
        "run": clean(snapshot.run_id),
        "mode": clean(run.facts.mode),
        "mark": mark(frame),
        "headline": [(cell.text, cell.tone) for cell in headline(snapshot)],
        "sums": totals(snapshot),
        "notices": [clean(text) for text in (*snapshot.notices, run.error) if text],
        "missed": [clean(text) for text in frame.missed],
    }


def mark(frame: Frame) -> tuple[str, Tone]:
    """Return words for how current a frame is, with their tone."""
    late_s = frame.late_s
    if frame.freshness is Freshness.ENDED:
        outcome = clean(frame.run.outcome)
        return f"ended: {outcome}", OUTCOME_TONES.get(outcome, Tone.DIM)
    if frame.freshness is Freshness.LATE:
        return f"late {clock(late_s) if late_s >= 60 else f'{late_s:.0f} s'}", Tone.WARN
    is_live = frame.freshness is Freshness.LIVE
    return frame.freshness.value, Tone.GOOD if is_live else Tone.BAD
