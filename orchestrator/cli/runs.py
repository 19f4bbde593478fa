"""The verbs `runs`, `report`, `top --once` and `export`.

`runs` lists the runs, and `report` describes one run from its store. `export` writes the model of
one training, in a child process that loads torch. Does not find or read run folders
(`record/folders.py`, `record/archive.py`), nor know the content of a checkpoint. Text from a store
is untrusted and passes through `cells.clean`. `ArchiveError`: a run or a folder cannot be read, or
a run has stored nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from orchestrator.cli.printing import Part
from orchestrator.config.duration import format_duration
from orchestrator.core.slot import HeadState
from orchestrator.errors import OrchestratorError, UsageError, one_line
from orchestrator.record.archive import StoredRun, read_run
from orchestrator.record.events import StoredEvent, read_events
from orchestrator.record.folders import ListedRun, go_on_command, run_object
from orchestrator.record.history import courses, sampled_between, time_in_states
from orchestrator.record.jobs import QUEUE_NAME
from orchestrator.record.output import last_lines, slots_with_output
from orchestrator.record.summary import summary_dict
from orchestrator.run.earlier import BEST, LAST, checkpoints_of, spec_of
from orchestrator.run.job_files import ask_export
from orchestrator.view.advice import SAMPLED, advice_lines
from orchestrator.view.cells import clean, clock, moment, share_pct
from orchestrator.view.document import OUTCOME_TONES, event_line, mark
from orchestrator.view.jobs import current, jobs_table
from orchestrator.view.live import health_lines
from orchestrator.view.look import Watch
from orchestrator.view.phrases import fault_lines, section
from orchestrator.view.tables import Column, Table, TableRow, Tone, row_of
from orchestrator.view.terminal import plain_text, table_lines
from workers.units import MIB

_FALLEN = frozenset({HeadState.RESTARTING, HeadState.QUARANTINED, HeadState.LOST})
_REPORTED = ("state", "node_left", "node_joined", "workload_error")

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
"""The keys are those of a run in JSON."""


def runs_parts(listed: Sequence[ListedRun], runs_dir: Path) -> Iterator[Part]:
    """Yield a table with a row for each run, the newest first, and the command that resumes the
    newest one if it has time left.
    """
    if not listed:
        yield clean(f"there is no run in {runs_dir}; `python -m orchestrator run` makes one")
        return
    yield Table(name="runs", columns=_COLUMNS, rows=tuple(map(_run_row, listed)))
    newest = listed[0]
    if newest.run is not None and newest.run.is_resumable:
        yield from ("", _resume_line(newest.folder))


def _run_row(one: ListedRun) -> TableRow:
    data = run_object(one)
    started_s, workers = data["started_at_unix_s"], data["workers"]
    # A queue has no duration: it ends when it is empty.
    spans = ("elapsed_s", "duration_s")[: 1 if (one.folder / QUEUE_NAME).exists() else 2]
    texts = {
        "started_at_unix_s": None if started_s is None else moment(started_s),
        "elapsed_s": None if workers is None else "/".join(clock(data[span]) for span in spans),
        "success_rate": share_pct(data["success_rate"]),
    }
    tones = {"outcome": OUTCOME_TONES.get(one.outcome, Tone.PLAIN)}
    return row_of(_COLUMNS, one.run_id, {**data, **texts}, tones)


def table_text(folder: Path, width: int) -> str:
    """Return the present header and health table of a run, and how current they are."""
    frame = Watch(folder).read()
    table = plain_text(health_lines(frame.snapshot, width))
    return f"{table}\nrun {folder.name}: {mark(frame)[0]}"


def report_text(folder: Path, width: int) -> str:
    """Return one run as text: outcome, health table within `width` cells, events and more."""
    frame = Watch(folder).read()
    run, queue, events = frame.run, frame.queue, read_events(folder, _REPORTED)
    missed = frame.missed if run.outcome == "degraded" else ()
    lines = [*_header(run), "", plain_text(health_lines(frame.snapshot, width))]
    if queue is not None:
        lines += ["", "jobs", plain_text(table_lines(jobs_table(queue, current(queue)), width))]
    lines += section("what fell short", missed)
    changes = [
        one
        for one in events
        if one.event in {"node_left", "node_joined"}
        or (one.event == "state" and one.details.get("to_state") in _FALLEN)
    ]
    lines += section("what happened", map(_event_line, changes))
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
    """Return the summary of a run from its store; `exit_code` is `null` if it has not ended."""
    frame, iso = Watch(folder).read(), ""
    run, snapshot = frame.run, frame.snapshot
    with suppress(ValueError, OverflowError, OSError):  # outside the range of the calendar
        began = datetime.fromtimestamp(run.facts.started_at_unix_s, tz=UTC)
        iso = began.isoformat(timespec="milliseconds")
    notices = tuple(dict.fromkeys((*snapshot.notices, *frame.missed)))
    last = replace(snapshot, notices=notices)
    summary = summary_dict(last, run.outcome, run.exit_code or 0, iso, run.error, faults=run.faults)
    return json.dumps({**summary, "exit_code": run.exit_code, "started_at": iso or None}, indent=2)


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
    """Return a line with the command that resumes the run in a folder."""
    # Split at single spaces: the number of spaces in a folder's name must not change.
    return " ".join(clean(word) for word in f"resume: {go_on_command(folder)}".split(" "))


def _outcome_words(run: StoredRun) -> str:
    if run.outcome == "running":
        return f"outcome: running (process {run.facts.head_pid}); the state now"
    if run.was_killed:
        return (
            "outcome: interrupted; its head was killed, or the machine went down. The last state:"
        )
    text = f"outcome: {run.outcome}, exit code {run.exit_code}"
    return f"{text} ({run.error})" if run.error else text


def _event_line(event: StoredEvent) -> str:
    """Return one event with the words of `top` and the page."""
    line = event_line(event)
    words = ": ".join(filter(None, (line["words"], line["text"])))
    return "  ".join(filter(None, (line["time"], line["slot"], words)))


def _advice(run: StoredRun) -> Iterator[str]:
    """Yield why the cards of a run were not busy; nothing for a queue: its jobs have own keys."""
    between = sampled_between(run.folder)
    if between is None or (run.folder / QUEUE_NAME).exists():
        return
    found = courses(run.folder, SAMPLED, *between, 1)
    means = {slot: {key: it.mean[0] for key, it in of.items()} for slot, of in found.items()}
    states_s = time_in_states(run.folder, run.updated_at_unix_s or between[1])
    yield from advice_lines(run.snapshot().rows, means, states_s)


def export(
    folder: Path, slot: str, to: Path, form: str | None, *, average: bool, best: bool
) -> Iterator[str]:
    """Write the model that a slot or a job has trained into a new folder; yield lines for the user.

    `form`: `adapter`, or `None`, which merges adapters if there are any. `average`: the averaged
    weights. `best`: the checkpoint with the lowest validation loss instead of the last one.
    `UsageError`: there is nothing to write, or `to` exists; `NoClusterError`: the PC with the
    checkpoints does not answer; `OrchestratorError`: the writing process has ended early.
    """
    to = to.expanduser().absolute()
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise UsageError(f"{to} exists already; name a new folder, or remove that one")
    stored = read_run(folder)
    spec = spec_of(stored, slot)
    with ExitStack() as until_written:
        names = BEST if best else LAST
        paths = checkpoints_of(stored, slot, spec.node, names, to.parent, until_written)
        answer = ask_export(spec, paths, to, form=form, average=average)
    if isinstance(answer, str):
        raise OrchestratorError(one_line(answer))
    if "refused" in answer:
        raise UsageError(one_line(answer["refused"]))
    yield from answer["told"]
    saved = next((it.row.progress.saved_step for it in stored.slots if it.slot == slot), None)
    if not best and answer["step"] < (saved or 0):
        yield f"the run has saved step {saved}, but its checkpoint is not here"
    size_mib, form = answer["bytes"] / MIB, answer["form"]
    yield f"{to}: step {answer['step']} of {slot}, {form}, {size_mib:.1f} MiB"
