"""What `runs` and `report` print: the list of runs, and one run told again from its store.

Does not find and read (`record/folders.py`, `record/archive.py`). Text from a store passes through
`cells.clean`: it may steer a terminal. A run or a folder that cannot be read, and a run that left
nothing behind, is an `ArchiveError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from orchestrator.cli.printing import Part
from orchestrator.config.duration import format_duration
from orchestrator.core.slot import HeadState
from orchestrator.record.archive import StoredRun, missed_of, read_run
from orchestrator.record.events import StoredEvent, read_events
from orchestrator.record.folders import Listed, go_on_command, run_object
from orchestrator.record.history import courses, sampled_between, state_spans
from orchestrator.record.jobs import QUEUE_NAME
from orchestrator.record.output import last_lines, slots_with_output
from orchestrator.record.summary import summary_dict
from orchestrator.view.advice import SAMPLED, advice_lines
from orchestrator.view.cells import clean, clock, moment, share_pct
from orchestrator.view.document import OUTCOME_TONES, event_line
from orchestrator.view.jobs import current, jobs_table
from orchestrator.view.live import health_lines
from orchestrator.view.look import Watch
from orchestrator.view.phrases import fault_lines, section
from orchestrator.view.tables import Column, Table, TableRow, Tone, row_of
from orchestrator.view.terminal import plain_text, table_lines

_FALLEN = frozenset({HeadState.RESTARTING, HeadState.QUARANTINED, HeadState.LOST})
_TOLD = ("state", "node_left", "node_joined", "workload_error")

#: Into so many parts the time of a run is divided for its advice.
_PARTS = 120


_COLUMNS: Final = (
    Column("run_id", "run"),
    Column("started_at_unix_s", "started", priority=2),
    Column("mode", "mode", priority=9),
    Column("outcome", "outcome"),
    Column("exit_code", "exit", numeric=True, priority=3),
    Column("elapsed_s", "worked", numeric=True, priority=1),
    Column("workers", "workers", numeric=True, priority=8),
    Column("steps_ok", "steps ok", numeric=True, priority=4),
    Column("success_rate", "good %", numeric=True, priority=5),
    Column("oom_count", "OOM", numeric=True, priority=6),
    Column("restart_count", "restarts", numeric=True, priority=7),
)
"""Their keys are those of a run in JSON."""


def runs_parts(listed: Sequence[Listed], runs_dir: Path) -> Iterator[Part]:
    """Yield a line for each run, the newest first, and how to resume the newest one if it has time
    left.
    """
    if not listed:
        yield clean(f"there is no run in {runs_dir}; `python -m orchestrator run` makes one")
        return
    yield Table(name="runs", columns=_COLUMNS, rows=tuple(map(_run_row, listed)))
    newest = listed[0]
    if newest.run is not None and newest.run.is_resumable:
        yield from ("", _resume_line(newest.folder))


def _run_row(one: Listed) -> TableRow:
    told = run_object(one)
    started_s, workers = told["started_at_unix_s"], told["workers"]
    # A queue ends when it is empty.
    spans = ("elapsed_s", "duration_s")[: 1 if (one.folder / QUEUE_NAME).exists() else 2]
    texts = {
        "started_at_unix_s": None if started_s is None else moment(started_s),
        "elapsed_s": None if workers is None else "/".join(clock(told[span]) for span in spans),
        "success_rate": share_pct(told["success_rate"]),
    }
    tones = {"outcome": OUTCOME_TONES.get(one.outcome, Tone.PLAIN)}
    return row_of(_COLUMNS, one.run_id, {**told, **texts}, tones)


def table_text(folder: Path, width: int) -> str:
    """Return the header and the health table of a run as it is now."""
    return plain_text(health_lines(Watch(folder).look().frame.snapshot, width))


def report_text(folder: Path, width: int) -> str:
    """Return one run in words: how it ended, its health table within `width` cells, and what
    happened to it.
    """
    frame = Watch(folder).look().frame
    run, queue, events = frame.run, frame.queue, read_events(folder, _TOLD)
    missed = frame.missed if run.outcome == "degraded" else ()
    lines = [*_header(run), "", plain_text(health_lines(frame.snapshot, width))]
    if queue is not None:
        lines += ["", "jobs", plain_text(table_lines(jobs_table(queue, current(queue)), width))]
    lines += section("what fell short", missed)
    told = [
        one
        for one in events
        if one.event in {"node_left", "node_joined"}
        or (one.event == "state" and one.details.get("to_state") in _FALLEN)
    ]
    lines += section("what happened", map(_event_line, told))
    lines += section("why the cards were not busy", _advice(run))
    errors = (one for one in events if one.event == "workload_error")
    lines += section("errors of the workload", map(_event_line, errors))
    printed = (
        f"{slot}  {line}"
        for slot in slots_with_output(folder)
        for line in last_lines(folder, slot, 1)
    )
    lines += section("printed last; more: `logs SLOT`", printed)
    lines += section("injected faults", fault_lines(run.faults))
    return "\n".join(line.rstrip() for line in lines)


def report_json(folder: Path) -> str:
    """Return the summary of a run, made from its store.

    `exit_code` is `null` where the run never ended by itself.
    """
    run, missed = read_run(folder), missed_of(read_events(folder, ("run_ended",)))
    snapshot, iso = run.snapshot(), ""
    with suppress(ValueError, OverflowError, OSError):  # no calendar goes that far
        began = datetime.fromtimestamp(run.facts.started_at_unix_s, tz=UTC)
        iso = began.isoformat(timespec="milliseconds")
    notices = tuple(dict.fromkeys((*snapshot.notices, *missed)))
    told = replace(snapshot, notices=notices)
    made = summary_dict(told, run.outcome, run.exit_code or 0, iso, run.error, faults=run.faults)
    return json.dumps({**made, "exit_code": run.exit_code, "started_at": iso or None}, indent=2)


def _header(run: StoredRun) -> Iterator[str]:
    facts = run.facts
    yield clean(f"run {facts.run_id}, {facts.mode}, started {moment(facts.started_at_unix_s)}")
    worked = f"worked {format_duration(run.elapsed_s)}"
    if not (run.folder / QUEUE_NAME).exists():  # a queue ends when it is empty
        worked += f" of {format_duration(facts.duration_s)}"
    yield clean(worked + (f", by {facts.heads} heads in turn" if facts.heads > 1 else ""))
    yield clean(_outcome_words(run))
    if run.is_resumable:
        yield _resume_line(run.folder)
    if facts.chaos is not None:
        yield clean(f"faults asked for: {facts.chaos}")
    if run.incomplete:
        yield "the record has gaps: at times it could not be written"


def _resume_line(folder: Path) -> str:
    """Return the command that resumes a run; the run's name is that of its folder."""
    # Between single spaces: those of a folder's name must stay as many as they are.
    return " ".join(clean(word) for word in f"resume: {go_on_command(folder)}".split(" "))


def _outcome_words(run: StoredRun) -> str:
    if run.outcome == "running":
        return f"outcome: running (process {run.facts.head_pid}); the state now"
    if run.was_killed:
        return (
            "outcome: interrupted; its head was killed, or the machine went down. The last state:"
        )
    said = f"outcome: {run.outcome}, exit code {run.exit_code}"
    return f"{said} ({run.error})" if run.error else said


def _event_line(event: StoredEvent) -> str:
    """Return one event as `top` and the page show it."""
    told = event_line(event)
    words = ": ".join(filter(None, (told["words"], told["text"])))
    return "  ".join(filter(None, (told["time"], told["slot"], words)))


def _advice(run: StoredRun) -> Iterator[str]:
    """Yield why the cards of a run were not busy; nothing of a queue, whose jobs have own keys."""
    between = sampled_between(run.folder)
    if between is None or (run.folder / QUEUE_NAME).exists():
        return
    courses_of = courses(run.folder, SAMPLED, between[0], between[1] + 0.001, _PARTS)
    spans, ends_unix_s = state_spans(run.folder), run.updated_at_unix_s or between[1]
    yield from advice_lines(run.snapshot().rows, courses_of, spans, ends_unix_s)
