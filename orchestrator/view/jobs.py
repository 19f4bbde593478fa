"""What people see of a queue: the table of jobs, one job in full, results, one line for other
screens.

Pure. Values come from the queue's store, and of jobs with a process from the rows of the run; does
not read either. Names, reasons and errors may be hostile: they pass through `cells.clean`.
"""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any, Final, get_args

from orchestrator.jobs.codec import event_name
from orchestrator.jobs.lifecycle import is_better
from orchestrator.jobs.model import (
    ENDED,
    ON_CARD,
    Assigned,
    JobState,
    Kind,
    Recalled,
    Record,
    Rested,
    Standing,
)
from orchestrator.record.archive import StoredEvent
from orchestrator.record.jobs import QueueSnapshot
from orchestrator.record.model import Row, Snapshot, finite
from orchestrator.view.cells import clean, clock, moment
from orchestrator.view.phrases import exception_line, fact_words
from orchestrator.view.tables import Column, Table, TableRow, Tone, row_of
from workers.messages import WorkerState
from workers.units import MIB

STATE_TONES: Final[Mapping[JobState, Tone]] = {
    JobState.RUNNING: Tone.GOOD,
    JobState.MOVING: Tone.NOTE,
    JobState.SAVING: Tone.NOTE,
    JobState.PREEMPTED: Tone.NOTE,
    JobState.PARKED: Tone.WARN,
    JobState.HELD: Tone.NOTE,
    JobState.PAUSED: Tone.NOTE,
    JobState.QUEUED: Tone.PLAIN,
    JobState.WAITING: Tone.DIM,
    JobState.FAILED: Tone.BAD,
    JobState.INFEASIBLE: Tone.BAD,
    JobState.SKIPPED: Tone.WARN,
    JobState.CANCELLED: Tone.DIM,
    JobState.STOPPED: Tone.DIM,
    JobState.DONE: Tone.GOOD,
}
"""In the order in which jobs are listed."""

_RANK: Final = {state: rank for rank, state in enumerate(STATE_TONES)}
_NAME_CELLS: Final = 32
_COLUMNS: Final = (
    Column(key="job", title="job", most_cells=_NAME_CELLS),
    Column(key="state", title="state"),
    Column(key="where", title="where", priority=3),
    Column(key="step", title="step", numeric=True, priority=1),
    Column(key="metric", title="metric", numeric=True, priority=4),
    Column(key="best", title="best", numeric=True, priority=5),
    Column(key="time", title="time", priority=2),
)

TOLD_OF_JOBS: Final = tuple(map(event_name, get_args(Record)))
"""The events by which the queue tells what it has decided and seen."""
_ASSIGNED, _RECALLED, _RESTED = map(event_name, (Assigned, Recalled, Rested))

#: A moment further away than this is shown with its day.
_SAME_DAY_S: Final = 18 * 3600.0


def current(snapshot: QueueSnapshot) -> tuple[Standing, ...]:
    """Return the standings with what their processes told last, those on a card first."""
    standings = (_with_row(standing, snapshot.rows) for standing in snapshot.standings)
    return tuple(sorted(standings, key=_order))


def _with_row(standing: Standing, rows: Mapping[str, Row]) -> Standing:
    row = rows.get(standing.job.name)
    if row is None or standing.state not in {*ON_CARD, JobState.PARKED}:
        return standing
    told, rule = row.progress, standing.job.milestones
    step = standing.step if told.train_step is None else told.train_step
    value = told.loss if rule is None or rule.metric == "loss" else None
    if value is not None and is_better(standing, value):
        standing = replace(standing, best=value, best_step=step)
    return replace(
        standing,
        reason=(standing.state is JobState.RUNNING and row.reason) or standing.reason,
        step=step,
        value=standing.value if value is None else value,
        out_of_memory=max(standing.out_of_memory, row.counts.oom_count),
    )


def _order(standing: Standing) -> tuple[int, float]:
    start_s = standing.expected_start_s
    return _RANK[standing.state], math.inf if start_s is None else start_s


def summary_line(snapshot: QueueSnapshot) -> str:
    """Return "3 running, 12 queued, 1 failed; ends about 03:40"."""
    counts = Counter(standing.state for standing in snapshot.standings)
    said = ", ".join(
        f"{counts[state]} {state.value.lower()}" for state in STATE_TONES if counts[state]
    )
    said = said or "no jobs yet"
    if snapshot.held is not None:
        return clean(f"{said}; the queue is held: {snapshot.held}")
    ends_s = _ends_at_s(snapshot)
    return said if ends_s is None else f"{said}; ends about {_moment(ends_s, snapshot.now_s)}"


def with_jobs(snapshot: Snapshot, queue: QueueSnapshot | None) -> Snapshot:
    """Return the picture of a run with the line of its queue, where it has one."""
    return snapshot if queue is None else replace(snapshot, jobs=summary_line(queue))


def jobs_table(snapshot: QueueSnapshot) -> Table:
    """Return the table of jobs: those on a card first, what has ended last."""
    rows = tuple(_job_row(standing, snapshot) for standing in current(snapshot))
    return Table(name="jobs", columns=_COLUMNS, rows=rows)


def _job_row(standing: Standing, snapshot: QueueSnapshot) -> TableRow:
    name, state, row = standing.job.name, standing.state, snapshot.rows.get(standing.job.name)
    works = state is JobState.RUNNING and (row is None or row.state is WorkerState.RUNNING)
    time, at_s = _time(standing, snapshot)
    values = {
        "job": name,
        "state": state.value,
        "where": standing.card,
        "step": standing.step,
        "metric": finite(standing.value),
        "best": finite(standing.best),
        "time": at_s,
    }
    texts = {
        "step": _steps(standing, snapshot),
        "metric": _figure(standing.value),
        "best": _best(standing),
        "time": time,
    }
    tone = STATE_TONES[state]
    reason = "" if works or state is JobState.DONE else clean(exception_line(standing.reason))
    return row_of(_COLUMNS, name, values, texts, {"state": tone}, reason, tone)


def _best(standing: Standing) -> str:
    best, step = standing.best, standing.best_step
    return _figure(best) + ("" if best is None or step is None else f" at {step}")


def _steps(standing: Standing, snapshot: QueueSnapshot) -> str | None:
    """Return how far a job is, of how many steps: a command tells them while it runs."""
    step, row = standing.step, snapshot.rows.get(standing.job.name)
    steps = standing.job.steps or (row and row.progress.train_steps)
    return None if step is None else f"{step}" if steps is None else f"{step}/{steps}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _time(standing: Standing, snapshot: QueueSnapshot) -> tuple[str | None, float | None]:
    """Return when a job ended, how long it takes or has taken, or when it may start; and that
    moment, Unix.
    """
    now_s, ended_s, start_s = snapshot.now_s, standing.ended_at_s, standing.expected_start_s
    if standing.state in ENDED:
        return None if ended_s is None else f"ended {_moment(ended_s, now_s)}", ended_s
    if standing.state in ON_CARD:
        left_s = _left_s(standing, snapshot)
        if left_s is None:
            return f"for {clock(now_s - standing.since_s)}", standing.since_s
        return f"{clock(left_s)} left", now_s + left_s
    return None if start_s is None else f"about {_moment(start_s, now_s)}", start_s


def _left_s(standing: Standing, snapshot: QueueSnapshot) -> float | None:
    """Return the seconds of work that a job has left; `None`: not known."""
    name = standing.job.name
    row = snapshot.rows.get(name)
    eta_s = finite(snapshot.etas_s.get(name) if row is None else row.progress.eta_s)
    if standing.state in ON_CARD and eta_s is not None:
        return eta_s
    speeds = [*standing.speeds.values()]
    if standing.job.steps is None or not speeds or speeds[-1] <= 0:
        return None
    return _steps_left(standing) / speeds[-1]


def _steps_left(standing: Standing) -> int:
    return max(0, (standing.job.steps or 0) - (standing.step or 0))


def _ends_at_s(snapshot: QueueSnapshot) -> float | None:
    """Return when the last job may end: all work that is left, shared among the jobs that run now.

    A job of unknown length takes as long for a step as others of its sweep, else as long as the
    median of those of its kind, else of all. `None` where none is known.
    """
    done_s, told_s = defaultdict[Kind, list[float]](list), defaultdict[Kind, list[float]](list)
    left: list[tuple[Standing, float | None]] = []
    step_s: dict[str, float] = {}
    for standing in current(snapshot):
        job, seconds = standing.job, _left_s(standing, snapshot)
        if standing.state is JobState.DONE:
            done_s[job.kind].append(standing.ran_s)
        elif standing.state not in ENDED:
            left.append((standing, seconds))
            if seconds is not None:
                told_s[job.kind].append(seconds)
                step_s[job.sweep or ""] = seconds / max(1, _steps_left(standing))
    everything = [*told_s[Kind.TRAIN], *told_s[Kind.COMMAND], *done_s[Kind.TRAIN]]

    def usual_s(standing: Standing) -> float | None:
        job = standing.job
        if job.steps is not None and job.sweep in step_s:
            return step_s[job.sweep] * _steps_left(standing)
        alike = done_s[job.kind] or told_s[job.kind] or everything
        return median(alike) if alike else None

    work_s = [usual_s(one) if seconds is None else seconds for one, seconds in left]
    running_s = [seconds or 0.0 for one, seconds in left if one.state in ON_CARD]
    known_s = [seconds for seconds in work_s if seconds is not None]
    if not running_s or len(known_s) < len(work_s):
        return None
    return snapshot.now_s + max(*running_s, sum(known_s) / len(running_s))


def _moment(unix_s: float, now_s: float) -> str:
    is_near = abs(unix_s - now_s) < _SAME_DAY_S
    return moment(unix_s, "%H:%M" if is_near else "%Y-%m-%d %H:%M")


def job_object(standing: Standing, snapshot: QueueSnapshot) -> dict[str, Any]:
    """Return a job for JSON, under flat keys; `None` is unknown."""
    job, now_s, files = standing.job, snapshot.now_s, snapshot.files
    here_s = now_s - standing.since_s
    ran_s = standing.ran_s + (here_s if standing.state in ON_CARD else 0.0)
    parked_s = standing.parked_s + (here_s if standing.state is JobState.PARKED else 0.0)
    ended_s = now_s if standing.ended_at_s is None else standing.ended_at_s
    row = snapshot.rows.get(job.name)
    redone = None if row is None else row.progress.redone_steps
    row = row if standing.state in ON_CARD else None
    return {
        "job_id": job.id,
        "job_name": job.name,
        "job_kind": job.kind.value,
        "job_sweep": job.sweep,
        "job_settings": dict(job.settings),
        "job_state": standing.state.value,
        "job_reason": standing.reason,
        "job_error": standing.last_error,
        "job_priority": job.priority,
        "job_after": list(job.after),
        "job_attempt": standing.attempt,
        "job_node": None if standing.card is None else standing.card.partition(":")[0],
        "job_card": standing.card,
        "job_slot": job.name if standing.state in ON_CARD else None,
        "job_step": standing.step,
        "job_steps": job.steps,
        "job_metric_name": _metric(standing),
        "job_metric": finite(standing.value),
        "job_best": finite(standing.best),
        "job_best_step": standing.best_step,
        "job_milestone": standing.milestone or None,
        "job_eta_s": _left_s(standing, snapshot) if standing.state in ON_CARD else None,
        "job_expected_start_unix_s": standing.expected_start_s,
        "job_queued_s": max(0.0, ended_s - job.submitted_at_unix_s - ran_s - parked_s)
        if job.submitted_at_unix_s
        else None,
        "job_ran_s": ran_s,
        "job_parked_s": parked_s,
        "job_redone_s": redone and ran_s * redone / (redone + (standing.step or 0)),
        "job_oom": standing.out_of_memory,
        "job_moves": standing.moves,
        "job_predicted_mib": _mib(standing.least_room_bytes),
        "job_budget_mib": _mib(standing.budget_bytes),
        "job_peak_mib": _mib(standing.peak_bytes or (row.allocated_bytes if row else None)),
        "job_exit_code": standing.exit_code,
        # A job that never began has none.
        "job_dir": f"{files}/{job.name}" if files and standing.attempt else None,
        "job_sha256": standing.sha256,
    }


def queue_object(snapshot: QueueSnapshot) -> dict[str, Any]:
    """Return the queue with all its jobs for JSON."""
    ends_s = _ends_at_s(snapshot)
    return {
        "queue_jobs": len(snapshot.standings),
        "queue_done": sum(one.state is JobState.DONE for one in snapshot.standings),
        "queue_eta_s": None if ends_s is None else max(0.0, ends_s - snapshot.now_s),
        "queue_held": snapshot.held,
        "jobs": [job_object(standing, snapshot) for standing in current(snapshot)],
    }


def _metric(standing: Standing) -> str | None:
    rule = standing.job.milestones
    if rule is not None:
        return rule.metric
    return None if standing.value is None and standing.best is None else "loss"


def _mib(size_bytes: int | None) -> int | None:
    return None if size_bytes is None else round(size_bytes / MIB)


#: Of a job in JSON: what `time` says in its place, or what the name of the job or its card says.
_UNTOLD: Final = frozenset(
    {"id", "name", "node", "slot", "reason", "eta_s", "expected_start_unix_s"}
)


def job_lines(
    standing: Standing, events: Iterable[StoredEvent], snapshot: QueueSnapshot
) -> list[str]:
    """Return one job in full: what it is, how it stands, and what happened to it: its events of
    `TOLD_OF_JOBS`.
    """
    job, command = standing.job, standing.job.command
    told = {key.removeprefix("job_"): fact for key, fact in job_object(standing, snapshot).items()}
    facts: dict[str, object] = {
        "state": standing.state.value,
        "reason": exception_line(standing.reason),
        "time": _time(standing, snapshot)[0],
        **{key: fact for key, fact in told.items() if key not in _UNTOLD},
        "error": standing.last_error if standing.last_error != standing.reason else None,
        "settings": job.settings or job.overrides,
        "command": shlex.join(command.argv) if command else None,
        "cwd": command.cwd if command else None,
        "after_any": job.after_any,
        "nodes": job.nodes,
        "only_on": job.card,
        "hours": job.hours and "-".join(f"{at // 60:02}:{at % 60:02}" for at in job.hours),
        "asked_bytes": job.memory_bytes,
        "steps_a_second": standing.speeds,
        "from": job.origin,
        "code": job.code,
    }
    shown = dict(fact_words(key, fact) for key, fact in facts.items() if fact)
    width = max(map(len, shown))
    happened = [f"  {_moment(at_s, snapshot.now_s)}  {words}" for at_s, words in _happened(events)]
    return [
        clean(f"job {job.name}"),
        *(f"  {title:<{width}}  {clean(fact)}" for title, fact in shown.items()),
        *(["", "what happened"] if happened else []),
        *happened,
    ]


def _happened(events: Iterable[StoredEvent]) -> Iterator[tuple[float, str]]:
    """Yield the events of a job: when they happened, and what they say in words."""
    was_recalled = False
    for event in events:
        kind = event.event
        title = kind.removeprefix("job_").replace("_", " ")
        if kind == _RESTED and not was_recalled:
            title = "its node was lost"
        was_recalled = kind == _RECALLED or (was_recalled and kind != _ASSIGNED)
        facts = (
            (key, exception_line(fact) if isinstance(fact, str) else fact)
            for key, fact in event.details.items()
            if key not in {"at_s", "job", "id"} and fact
        )
        said = ", ".join(" ".join(fact_words(*fact)) for fact in facts)
        at_s = event.details.get("at_s")
        known_s = at_s if isinstance(at_s, int | float) else event.at_unix_s or 0.0
        yield known_s, clean(f"{title}: {said}" if said else title)


def _results(snapshot: QueueSnapshot) -> list[dict[str, Any]]:
    """Return the jobs with their metric, the best of each metric first."""

    def order(standing: Standing) -> tuple[str, float]:
        best = finite(standing.value if standing.best is None else standing.best)
        rule = standing.job.milestones
        sign = -1.0 if rule is not None and not rule.is_min else 1.0
        return _metric(standing) or "~", math.inf if best is None else sign * best

    return [job_object(standing, snapshot) for standing in sorted(current(snapshot), key=order)]


def results_object(snapshot: QueueSnapshot) -> dict[str, Any]:
    """Return the queue for JSON with its jobs in the order of the results."""
    return {**queue_object(snapshot), "jobs": _results(snapshot)}


def results_csv(snapshot: QueueSnapshot) -> str:
    """Return the results as CSV: a column for each setting, and for each key of a job in JSON."""
    jobs = [
        {**job, **job.pop("job_settings"), "job_after": " ".join(job["job_after"])}
        for job in _results(snapshot)
    ]
    keys = dict.fromkeys(("job_name", *(key for job in jobs for key in job)))
    file = io.StringIO()
    writer = csv.DictWriter(file, keys, lineterminator="\n")
    writer.writeheader()
    for job in jobs:
        cells = job.items()
        writer.writerow(
            {key: clean(cell) if isinstance(cell, str) else cell for key, cell in cells}
        )
    return file.getvalue().removesuffix("\n")


_RESULTS: Final = (
    Column(key="job_name", title="job", most_cells=_NAME_CELLS),
    Column(key="job_settings", title="settings", priority=3, most_cells=60),
    Column(key="job_state", title="state"),
    Column(key="job_metric_name", title="metric", priority=2),
    Column(key="job_metric", title="last", numeric=True, priority=4),
    Column(key="job_best", title="best", numeric=True, priority=1),
    Column(key="job_best_step", title="at step", numeric=True, priority=5),
    Column(key="job_ran_s", title="time", numeric=True, priority=6),
    Column(key="job_peak_mib", title="memory", numeric=True, priority=7),
    Column(key="job_moves", title="moves", numeric=True, priority=9),
    Column(key="job_oom", title="OOM", numeric=True, priority=8),
)
"""Their keys are those of a job in JSON."""


def results_table(snapshot: QueueSnapshot) -> Table:
    """Return the results, the best of each metric first; zeros are left out."""
    rows = []
    for job in _results(snapshot):
        known = {column.key: job[column.key] for column in _RESULTS if job[column.key]}
        texts = {key: fact_words(key, fact)[1] for key, fact in known.items()}
        rows.append(row_of(_RESULTS, job["job_name"], {}, texts))
    return Table(name="results", columns=_RESULTS, rows=tuple(rows))
