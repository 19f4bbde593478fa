"""Shows a queue of jobs: the table of jobs, one job in full, its JSON, and a summary line.

Pure. Values come from the queue's store and, for jobs with a process, from the rows of the run;
does not read either. Names, reasons and errors are untrusted: they pass through `cells.clean`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final

from orchestrator.jobs.lifecycle import valued
from orchestrator.jobs.model import ENDED, ON_CARD, JobState, Standing
from orchestrator.record.events import StoredEvent
from orchestrator.record.jobs import QueueSnapshot
from orchestrator.record.model import FIELDS, Row, finite
from orchestrator.view.cells import clean, clock, moment
from orchestrator.view.phrases import event_words, exception_line, fact_words
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
_COLUMNS: Final = (
    Column("job", "job", most_cells=32),
    Column("state", "state"),
    Column("where", "where", priority=3),
    Column("step", "step", numeric=True, priority=1),
    Column("metric", "metric", numeric=True, priority=4),
    Column("best", "best", numeric=True, priority=5),
    Column("time", "time", priority=2),
    Column("settings", "settings", priority=6, most_cells=60),
)

#: Keys of a row of the run that JSON has for each slot of a team.
_OF_TEAM: Final = ("team_state", "team_share_pct", "team_wire_s")

#: Times further away than this are shown with their date.
_SAME_DAY_S: Final = 18 * 3600.0


def current(snapshot: QueueSnapshot) -> tuple[Standing, ...]:
    """Return the standings in the order of `STATE_TONES`, with their processes' last reports."""
    standings = (_with_row(each, snapshot.row_of(each)) for each in snapshot.standings)

    def order(standing: Standing) -> tuple[int, float]:
        start_s = standing.expected_start_s
        return _RANK[standing.state], math.inf if start_s is None else start_s

    return tuple(sorted(standings, key=order))


def _with_row(standing: Standing, row: Row | None) -> Standing:
    if row is None or standing.state not in {*ON_CARD, JobState.PARKED}:
        return standing
    progress, rule = row.progress, standing.job.milestones
    step = standing.step if progress.train_step is None else progress.train_step
    value = progress.loss if rule is None or rule.metric == "loss" else None
    return replace(
        standing,
        reason=(standing.state is JobState.RUNNING and row.reason) or standing.reason,
        step=step,
        **valued(standing, value, step),
        out_of_memory=max(standing.out_of_memory, row.counts.oom_count),
    )


def best_first(snapshot: QueueSnapshot) -> tuple[Standing, ...]:
    """Return the standings as `current` does, grouped by metric, the best value first."""

    def order(standing: Standing) -> tuple[str, float]:
        best = finite(standing.value if standing.best is None else standing.best)
        rule = standing.job.milestones
        sign = -1.0 if rule is not None and not rule.is_min else 1.0
        return _metric(standing) or "~", math.inf if best is None else sign * best

    return tuple(sorted(current(snapshot), key=order))


def summary_line(snapshot: QueueSnapshot) -> str:
    """Return "3 running, 12 queued, 1 failed; ends about 03:40"."""
    counts = Counter(standing.state for standing in snapshot.standings)
    words = (f"{counts[state]} {state.value.lower()}" for state in STATE_TONES if counts[state])
    text = ", ".join(words) or "no jobs yet"
    if snapshot.held is not None:
        return clean(f"{text}; the queue is held: {snapshot.held}")
    ends_s = _ends_at_s(snapshot)
    return text if ends_s is None else f"{text}; ends about {_moment(ends_s, snapshot.now_s)}"


def jobs_table(snapshot: QueueSnapshot, standings: Sequence[Standing]) -> Table:
    """Return the table of jobs in the order of `standings`, from `current` or `best_first`."""
    rows = tuple(_job_row(standing, snapshot) for standing in standings)
    return Table(name="jobs", columns=_COLUMNS, rows=rows)


def _job_row(standing: Standing, snapshot: QueueSnapshot) -> TableRow:
    name, state, row = standing.job.name, standing.state, snapshot.row_of(standing)
    works = state is JobState.RUNNING and (row is None or row.state is WorkerState.RUNNING)
    step, best, at_step = standing.step, standing.best, standing.best_step
    steps = standing.job.steps or (row and row.progress.train_steps)  # a command reports its own
    texts = {
        "job": name,
        "state": state.value,
        "where": _where(standing, snapshot),
        "step": step if step is None or steps is None else f"{step}/{steps}",
        "metric": _figure(standing.value),
        "best": _figure(best) + ("" if best is None or at_step is None else f" at {at_step}"),
        "time": _time(standing, snapshot),
        "settings": fact_words("", standing.job.settings)[1],
    }
    tone = STATE_TONES[state]
    reason = "" if works or state is JobState.DONE else clean(exception_line(standing.reason))
    return row_of(_COLUMNS, name, texts, {"state": tone}, reason, tone)


def _where(standing: Standing, snapshot: QueueSnapshot) -> str | None:
    """Return the card of a job; for a team its cards, each with its share of the samples."""
    shares = {row.slot: finite(row.team_share_pct) for row in snapshot.rows_of(standing)}
    if standing.card is None or not any(shares.values()):
        return standing.card
    cards = standing.places.items()
    return " + ".join(
        card if (share := shares.get(slot)) is None else f"{card} {share:.0f}%"
        for slot, card in cards
    )


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _time(standing: Standing, snapshot: QueueSnapshot) -> str | None:
    """Return when a job ended, how long it still runs or has run, or when it may start."""
    now_s, start_s = snapshot.now_s, standing.expected_start_s
    if standing.state in ENDED:
        return f"ended {_moment(standing.since_s, now_s)}"
    if standing.state in ON_CARD:
        left_s = _left_s(standing, snapshot)
        lasts_s = now_s - standing.since_s
        return f"for {clock(lasts_s)}" if left_s is None else f"{clock(left_s)} left"
    return None if start_s is None else f"about {_moment(start_s, now_s)}"


def _left_s(standing: Standing, snapshot: QueueSnapshot) -> float | None:
    """Return the seconds of work that a job has left; `None` if unknown."""
    row = snapshot.row_of(standing)
    eta_s = None if row is None else finite(row.progress.eta_s)
    if standing.state in ON_CARD and eta_s is not None:
        return eta_s
    steps, speeds = standing.job.steps, [*standing.speeds.values()]
    if steps is None or not speeds or speeds[-1] <= 0:
        return None
    return max(0, steps - (standing.step or 0)) / speeds[-1]


def _ends_at_s(snapshot: QueueSnapshot) -> float | None:
    """Return when the last job may end: the remaining work, divided by the number of running jobs.

    That is not before the last of these jobs ends. A job of unknown length counts as the median of
    the known lengths, or else of the times of DONE jobs. `None` if no length is known, or no job
    runs.
    """
    left = [standing for standing in snapshot.standings if standing.state not in ENDED]
    left_s = {standing.job.name: _left_s(standing, snapshot) for standing in current(snapshot)}
    work_s = [left_s[standing.job.name] for standing in left]
    known_s = [seconds for seconds in work_s if seconds is not None]
    done_s = [one.ran_s for one in snapshot.standings if one.state is JobState.DONE]
    running_s = [left_s[one.job.name] or 0.0 for one in left if one.state in ON_CARD]
    if not running_s or not (known_s or done_s):
        return None
    usual_s = median(known_s or done_s)
    all_s = sum(usual_s if seconds is None else seconds for seconds in work_s)
    return snapshot.now_s + max(*running_s, all_s / len(running_s))


def _moment(unix_s: float, now_s: float) -> str:
    is_near = abs(unix_s - now_s) < _SAME_DAY_S
    return moment(unix_s, "%H:%M" if is_near else "%Y-%m-%d %H:%M")


def job_object(standing: Standing, snapshot: QueueSnapshot) -> dict[str, Any]:
    """Return a job for JSON, with flat keys; `None` is unknown."""
    job, now_s, files = standing.job, snapshot.now_s, snapshot.files
    in_state_s = now_s - standing.since_s
    ran_s = standing.ran_s + (in_state_s if standing.state in ON_CARD else 0.0)
    parked_s = standing.parked_s + (in_state_s if standing.state is JobState.PARKED else 0.0)
    ended_s = standing.since_s if standing.state in ENDED else now_s
    rows = snapshot.rows_of(standing)
    row = rows[0] if rows else None
    redone = None if row is None else row.progress.redone_steps
    held_bytes = row.value("allocated_bytes") if row and standing.state in ON_CARD else None
    return {
        "job_id": job.id,
        "job_name": job.name,
        "job_kind": "train" if job.command is None else "command",
        "job_sweep": job.sweep,
        "job_settings": dict(job.settings),
        "job_state": standing.state.value,
        "job_reason": standing.reason,
        "job_error": standing.last_error,
        "job_priority": job.priority,
        "job_after": list(job.after),
        "job_attempt": standing.attempt,
        "job_node": standing.card and re.sub(r":\d+", "", standing.card),
        "job_card": standing.card,
        "job_slot": job.name if standing.state in ON_CARD and not job.is_team else None,
        "job_team": {each.slot: {key: FIELDS[key].value(each) for key in _OF_TEAM} for each in rows}
        if job.is_team
        else None,
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
        "job_peak_mib": _mib(standing.peak_bytes or held_bytes),
        "job_exit_code": standing.exit_code,
        # A job that has never started has no folder.
        "job_dir": f"{files}/{job.name}" if files and standing.attempt else None,
        "job_sha256": standing.sha256,
    }


def queue_object(snapshot: QueueSnapshot, standings: Sequence[Standing]) -> dict[str, Any]:
    """Return the queue with all its jobs for JSON, in the order of `standings`."""
    ends_s = _ends_at_s(snapshot)
    return {
        "queue_jobs": len(snapshot.standings),
        "queue_done": sum(one.state is JobState.DONE for one in snapshot.standings),
        "queue_eta_s": None if ends_s is None else max(0.0, ends_s - snapshot.now_s),
        "queue_held": snapshot.held,
        "jobs": [job_object(standing, snapshot) for standing in standings],
    }


def _metric(standing: Standing) -> str | None:
    rule, has_value = standing.job.milestones, {standing.value, standing.best} != {None}
    return rule.metric if rule is not None else "loss" if has_value else None


def _mib(size_bytes: int | None) -> int | None:
    return None if size_bytes is None else round(size_bytes / MIB)


#: Keys of a job in JSON that `job_lines` omits: its lines `time`, `job` and `card` imply them.
_OMITTED: Final = frozenset(
    {"id", "name", "node", "slot", "team", "reason", "eta_s", "expected_start_unix_s"}
)


def job_lines(
    standing: Standing, events: Iterable[StoredEvent], snapshot: QueueSnapshot
) -> list[str]:
    """Return one job in full: its specification, its state, and its events (`lifecycle.EVENTS`)."""
    job, command = standing.job, standing.job.command
    flat = {key.removeprefix("job_"): fact for key, fact in job_object(standing, snapshot).items()}
    facts: dict[str, object] = {
        "state": standing.state.value,
        "reason": exception_line(standing.reason),
        "time": _time(standing, snapshot),
        **{key: fact for key, fact in flat.items() if key not in _OMITTED},
        "error": standing.last_error if standing.last_error != standing.reason else None,
        "settings": job.settings or job.overrides,
        "command": shlex.join(command.argv) if command else None,
        "cwd": command.cwd if command else None,
        "after_any": job.after_any,
        "nodes": job.nodes,
        "only_on": job.card,
        "hours": job.hours_text,
        "asked_bytes": job.memory_bytes,
        "steps_a_second": standing.speeds,
        "from": job.origin,
        "code": job.code,
    }
    shown = dict(fact_words(key, fact) for key, fact in facts.items() if fact)
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {clean(fact)}" for name, fact in shown.items()]
    happened = ["", "what happened"]
    for event in events:
        known = {key: fact for key, fact in event.details.items() if fact}
        words = ": ".join(filter(None, event_words(replace(event, details=known))))
        at = _moment(event.at_unix_s or 0.0, snapshot.now_s)
        happened.append(f"  {at}  {clean(words.removeprefix('job '))}")
    return [clean(f"job {job.name}"), *lines, *(happened if len(happened) > 2 else [])]
