"""What `runs` and `report` print: the list of runs, and one run told again from its store.

Covers wording and layout. Does not cover finding and reading (`watch/folders.py`, `watch/archive.py`), nor the health
table, which is that of a live run. Text from a store passes through `Glyphs.clean`: it may steer a terminal.
"""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator.config.duration import format_duration
from orchestrator.config.schema import RunConfig
from orchestrator.core.slot import HeadState
from orchestrator.errors import NothingStoredError
from orchestrator.watch.archive import StoredEvent, StoredRun, read_events, read_run
from orchestrator.watch.cells import UNICODE, Glyphs, aligned, clock, share_pct, whole
from orchestrator.watch.folders import Listed, list_runs, summary_of
from orchestrator.watch.model import Snapshot
from orchestrator.watch.phrases import closing_lines, counted, fault_lines
from orchestrator.watch.records import STORE_NAME
from orchestrator.watch.summary import SCHEMA, snapshot_from_summary, summary_dict, summary_text
from orchestrator.watch.table import health_table

_LINES_MOST = 30
"""Of each kind. A run with many errors has thousands; the last ones show how it ended."""

_FALLEN = frozenset({HeadState.RESTARTING, HeadState.QUARANTINED, HeadState.LOST})
_TOLD = ("state", "node_left", "node_joined", "workload_error")

_TITLES = ("run", "started", "mode", "outcome", "exit", "worked", "workers", "steps ok", "good %", "OOM", "restarts")
_DEFAULT_RUNS_DIR = Path(RunConfig.model_fields["dir"].default)
_LEFT = frozenset({"run", "started", "mode", "outcome"})


def runs_text(runs_dir: Path, glyphs: Glyphs = UNICODE) -> str:
    """Return a line for each run, the newest first, and how to resume the newest one if it has time left.

    Raises:
        ArchiveError: The folder cannot be read.
    """
    listed = list_runs(runs_dir)
    if not listed:
        return glyphs.clean(f"there is no run in {runs_dir}; `python -m orchestrator run` makes one")
    lines = list(aligned([_TITLES, *(_run_cells(one, glyphs) for one in listed)], _LEFT))
    newest = listed[0]
    if (run := newest.run) is not None and run.is_resumable:
        lines += ["", _resume_line(newest.folder, glyphs)]
    return "\n".join(lines)


def runs_json(runs_dir: Path) -> str:
    """Return the same as one JSON object: `schema` and `runs`; `null` is unknown.

    Raises:
        ArchiveError: The folder cannot be read.
    """
    return summary_text({"schema": SCHEMA, "runs": [_run_object(one) for one in list_runs(runs_dir)]})


def report_text(folder: Path, width: int, glyphs: Glyphs = UNICODE) -> str:
    """Return one run in words: how it ended, its health table, and what happened to it.

    Args:
        folder: Of the run.
        width: Cells of a line of the terminal.
        glyphs: `glyphs_for(stream.encoding)` of the stream it will be printed to.

    Raises:
        ArchiveError: It left nothing behind, or nothing that can be read.
    """
    try:
        run = read_run(folder)
    except NothingStoredError:
        return _text_of_summary(folder, width, glyphs)
    snapshot = run.snapshot()
    events = read_events(run.folder, _TOLD)
    lines = [*_header(run, glyphs), "", *_table(snapshot, width, glyphs), "", *closing_lines(snapshot, glyphs)]
    if (lost := snapshot.steps_lost_upper_bound) is not None:
        lines.append(f"{counted(snapshot.counts.steps_ok, 'good step')} counted, at most {whole(lost)} lost")
    lines += _section("what happened", _happenings(events), glyphs)
    lines += _section("errors of the workload", _errors(events), glyphs)
    lines += _section("injected faults", iter(fault_lines(run.faults)), glyphs)
    return "\n".join(line.rstrip() for line in lines)


def report_json(folder: Path) -> str:
    """Return the summary of a run: the one it wrote itself, else the same object made from its store.

    `exit_code` is `null` where the run never ended by itself.

    Raises:
        ArchiveError: It left nothing behind, or nothing that can be read.
    """
    written = summary_of(folder)
    if written is not None:
        return json.dumps(written, indent=2)
    run = read_run(folder)
    began = datetime.fromtimestamp(run.facts.started_at_unix_s, UTC).isoformat(timespec="milliseconds")
    made = summary_dict(run.snapshot(), run.outcome, run.exit_code or 0, began, run.error, faults=run.faults)
    return json.dumps({**made, "exit_code": run.exit_code}, indent=2)


def _text_of_summary(folder: Path, width: int, glyphs: Glyphs) -> str:
    """Report a run that has no store, from its summary."""
    summary = summary_of(folder)
    if summary is None:
        raise NothingStoredError(folder, STORE_NAME)
    lines = [glyphs.clean(f"run {folder.name}"), glyphs.clean(_verdict(summary))]
    try:
        snapshot = snapshot_from_summary(summary)
    except ValueError as failure:
        return "\n".join([*lines, glyphs.clean(f"the rest of summary.json cannot be read: {failure}")])
    if snapshot.rows:
        lines += ["", *_table(snapshot, width, glyphs), "", *closing_lines(snapshot, glyphs)]
    return "\n".join(line.rstrip() for line in lines)


def _run_cells(one: Listed, glyphs: Glyphs) -> tuple[str, ...]:
    started = one.started_at_unix_s
    cells: list[str | None] = [one.run_id, None if started is None else _local(started)]
    run = one.run
    exit_code = None if one.exit_code is None else str(one.exit_code)
    if run is None:
        cells += [None, glyphs.clean(one.outcome), exit_code, *[None] * 6]
    else:
        snapshot = run.snapshot()
        counts = snapshot.counts
        cells += [
            glyphs.clean(run.facts.mode),
            glyphs.clean(one.outcome),
            exit_code,
            f"{clock(run.elapsed_s)}/{clock(run.facts.duration_s)}",
            str(len(run.slots)),
            whole(counts.steps_ok),
            share_pct(counts.success_rate),
            whole(counts.oom_count),
            whole(snapshot.restart_count),
        ]
    return tuple(cell or glyphs.missing for cell in cells)


def _run_object(one: Listed) -> dict[str, Any]:
    run = one.run
    snapshot = None if run is None else run.snapshot()
    counts = None if snapshot is None else snapshot.counts
    return {
        "run_id": one.run_id,
        "started_at_unix_s": one.started_at_unix_s,
        "mode": None if run is None else run.facts.mode,
        "outcome": one.outcome,
        "exit_code": one.exit_code,
        "elapsed_s": None if run is None else run.elapsed_s,
        "duration_s": None if run is None else run.facts.duration_s,
        "remaining_s": None if run is None else run.remaining_s,
        "heads": None if run is None else run.heads,
        "workers": None if run is None else len(run.slots),
        "steps_ok": None if counts is None else counts.steps_ok,
        "steps_lost_upper_bound": None if snapshot is None else snapshot.steps_lost_upper_bound,
        "success_rate": None if counts is None else counts.success_rate,
        "oom_count": None if counts is None else counts.oom_count,
        "restart_count": None if snapshot is None else snapshot.restart_count,
        "incomplete": None if run is None else run.incomplete,
        "error": one.error,
    }


def _header(run: StoredRun, glyphs: Glyphs) -> Iterator[str]:
    facts = run.facts
    yield glyphs.clean(f"run {facts.run_id}, {facts.mode}, started {_local(facts.started_at_unix_s)}")
    worked = f"worked {format_duration(run.elapsed_s)} of {format_duration(facts.duration_s)}"
    yield glyphs.clean(worked + (f", by {run.heads} heads one after the other" if run.heads > 1 else ""))
    yield glyphs.clean(_outcome_words(run))
    if run.is_resumable:
        yield _resume_line(run.folder, glyphs)
    if facts.chaos is not None:
        yield glyphs.clean(f"faults asked for: {facts.chaos}")
    if run.incomplete:
        yield "the record has gaps: at times it could not be written"


def _resume_line(folder: Path, glyphs: Glyphs) -> str:
    """Return the command that resumes a run; the run's name is that of its folder."""
    command = ["python", "-m", "orchestrator", "run", "--resume", folder.name]
    if folder.parent != _DEFAULT_RUNS_DIR:
        command += ["--run-dir", str(folder.parent)]
    # Between single spaces: those of a folder's name must stay as many as they are.
    return " ".join(glyphs.clean(word) for word in f"resume: {shlex.join(command)}".split(" "))


def _outcome_words(run: StoredRun) -> str:
    if run.outcome == "running":
        return f"outcome: running (process {run.facts.head_pid}); the state now"
    if run.was_killed:
        return (
            "outcome: interrupted; its head ended without a summary (killed, or the machine went down). The last state:"
        )
    return _verdict({"outcome": run.outcome, "exit_code": run.exit_code, "error": run.error})


def _verdict(ended: Mapping[str, Any]) -> str:
    """Say how a run ended that said so itself."""
    words = {
        "good": "it ran to its end and every worker did its work",
        "degraded": "it ran to its end, but not every worker did its work well",
        "interrupted": "it was ended before its time",
        "failed": "an error ended it",
    }
    meaning, error = words.get(str(ended.get("outcome"))), ended.get("error")
    said = f"outcome: {ended.get('outcome')}, exit code {ended.get('exit_code')}"
    return said + (f": {meaning}" if meaning else "") + (f" ({error})" if error else "")


def _table(snapshot: Snapshot, width: int, glyphs: Glyphs) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(health_table(snapshot, width, None, glyphs))
    return stream.getvalue().splitlines()


def _happenings(events: Sequence[StoredEvent]) -> Iterator[str]:
    for event in events:
        when, details = _local_of(event.at), event.details
        if event.event == "state" and details.get("to_state") in _FALLEN:
            yield f"{when}  {event.slot}  {details.get('to_state')}: {details.get('cause')}"
        elif event.event in {"node_left", "node_joined"}:
            yield f"{when}  {details.get('node')}  {'has left' if event.event == 'node_left' else 'joined'}"


def _errors(events: Sequence[StoredEvent]) -> Iterator[str]:
    for event in events:
        if event.event == "workload_error":
            yield f"{_local_of(event.at)}  {event.slot}  {_last_words(str(event.details.get('traceback')))}"


def _last_words(traceback: str) -> str:
    """Return the line of a traceback that names the exception: the first one behind the frames."""
    lines = traceback.strip().splitlines()
    inside = [index for index, line in enumerate(lines) if line.startswith((" ", "Traceback"))]
    behind = lines[inside[-1] + 1 :] if inside else lines
    return behind[0] if behind else "an error without words"


def _section(title: str, said: Iterator[str], glyphs: Glyphs) -> list[str]:
    lines = [f"  {glyphs.clean(line)}" for line in said]
    if not lines:
        return []
    hidden = len(lines) - _LINES_MOST
    more = [f"  {glyphs.ellipsis} {hidden} before these, in events.jsonl"] if hidden > 0 else []
    return ["", title, *more, *lines[-_LINES_MOST:]]


def _local(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s, tz=UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"at second {unix_s:.0f}"  # no calendar goes that far


def _local_of(at: str) -> str:
    try:
        return datetime.fromisoformat(at).astimezone().strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return at
