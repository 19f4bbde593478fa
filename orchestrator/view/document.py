"""All that a run shows at one moment, as one JSON document: head, tables, alerts, last events.

Pure. The page gets it once a second, and a report holds one that stays as it is. Texts, units and
tones are made here and in the tables, so that the page formats nothing. Does not read the run
folder, and has no values over time (`charts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, TypeAlias

from orchestrator.record.archive import Frame, Freshness
from orchestrator.record.events import StoredEvent
from orchestrator.record.summary import SCHEMA
from orchestrator.view.alerts import Alert
from orchestrator.view.cells import clean, clock, shorten
from orchestrator.view.jobs import jobs_table, with_jobs
from orchestrator.view.phrases import event_words, time_of_day, totals
from orchestrator.view.runs import OUTCOME_TONES
from orchestrator.view.slots import STATE_TONES, cards_table, headline, slots_table
from orchestrator.view.tables import Table, Tone

Json: TypeAlias = dict[str, Any]

EVENTS_MOST: Final = 100
"""Events in a document, the last ones."""
_TEXT_CELLS: Final = 400

_TONE_OF_STATE: Final = {state.value: tone for state, tone in STATE_TONES.items()}


def document(frame: Frame, alerts: Sequence[Alert] = (), runs: Table | None = None) -> Json:
    """Return the document of a run at the moment of a frame.

    Args:
        frame: The run. The last of its events are told.
        alerts: What is wrong with it.
        runs: The runs of the same folder, for a page that can show another one.
    """
    tables = [slots_table(frame.snapshot), cards_table(frame.snapshot)]
    if frame.queue is not None:
        tables.append(jobs_table(frame.queue))
    if runs is not None:
        tables.append(runs)
    return {
        "schema": SCHEMA,
        "head": _head(frame),
        "tables": {table.name: table.to_json() for table in tables},
        "alerts": [alert.to_json() for alert in alerts],
        "events": [event_line(event) for event in frame.events[-EVENTS_MOST:]],
    }


def event_line(event: StoredEvent) -> Json:
    """Return one event as a line of a table."""
    name, text = event_words(event)
    tone = state_tone(str(event.details.get("to_state")))
    return {
        "number": event.number,
        "at_unix_s": event.at_unix_s,
        "time": clean(time_of_day(event.at)),
        "slot": None if event.slot is None else clean(event.slot),
        "event": clean(event.event),
        "words": clean(name),
        "text": shorten(clean(text), _TEXT_CELLS),
        "tone": Tone.BAD if event.event == "workload_error" else tone,
    }


def state_tone(word: str) -> Tone:
    """Return what the colour of a state says, by its word in an event."""
    return _TONE_OF_STATE.get(word, Tone.PLAIN)


def _head(frame: Frame) -> Json:
    run, snapshot = frame.run, with_jobs(frame.snapshot, frame.queue)
    return {
        "run": clean(snapshot.run_id),
        "mode": clean(run.facts.mode),
        "outcome": clean(run.outcome),
        "exit_code": run.exit_code,
        "freshness": frame.freshness.value,
        "mark": mark(frame),
        "headline": [(cell.text, cell.tone, cell.value) for cell in headline(snapshot)],
        "sums": totals(snapshot),
        "notices": [clean(text) for text in (*snapshot.notices, run.error) if text],
        "missed": [clean(text) for text in frame.missed],
        "at_unix_s": snapshot.now_unix_s,
        "utc_offset_s": _utc_offset_s(snapshot.now_unix_s),
    }


def mark(frame: Frame) -> tuple[str, Tone]:
    """Return in a word how far what is shown of a run can be believed, with its tone."""
    late_s = frame.late_s
    if frame.freshness is Freshness.ENDED:
        outcome = clean(frame.run.outcome)
        return f"ended: {outcome}", OUTCOME_TONES.get(outcome, Tone.DIM)
    if frame.freshness is Freshness.LATE:
        return f"late {clock(late_s) if late_s >= 60 else f'{late_s:.0f} s'}", Tone.WARN
    is_live = frame.freshness is Freshness.LIVE
    return frame.freshness.value, Tone.GOOD if is_live else Tone.BAD


def _utc_offset_s(at_unix_s: float) -> float:
    """Return how far the clock of this machine's time zone is ahead of UTC."""
    offset = datetime.fromtimestamp(at_unix_s).astimezone().utcoffset()
    return 0.0 if offset is None else offset.total_seconds()
