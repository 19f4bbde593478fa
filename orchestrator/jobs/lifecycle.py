"""The lifecycle of a job as a table: (record type, state) -> how the record changes its standing.

    WAITING ──SettingsChosen──> WAITING (a member of a sweep of method optuna)
    WAITING ──StateChanged──> QUEUED, PREEMPTED ──AttemptBegun──> RUNNING

    RUNNING ──AttemptEnded, work done──> SAVING ──StateChanged──> DONE, FAILED
    RUNNING ──AttemptEnded, else──> FAILED, QUEUED, PARKED
    RUNNING ──AttemptRecalled──> RUNNING, or MOVING where it goes on elsewhere
    RUNNING, MOVING ──AttemptEnded, at rest──> QUEUED, PARKED, PAUSED, PREEMPTED, HELD, CANCELLED

    PARKED, PAUSED ──StateChanged, UserOrder──> QUEUED      HELD ──UserOrder──> where it was
    any that has not ended ──UserOrder──> CANCELLED
    SKIPPED ──StateChanged──> WAITING, once what it was skipped for begins again

Rules:

1. A record of an attempt other than the present one is illegal: a late result changes nothing.
2. What an attempt that ended leads to is decided by its cause (`causes.py`), here and nowhere else.
3. An attempt that is recalled and fails while it saves is not counted; it goes where it was sent.
4. An order of the user about a job on a card says where its attempt goes, however that ends.

Each pair is in the table: handled, ignored for a reason, or illegal. Pure. Does not decide which
record comes next (`queue.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from orchestrator.jobs import causes
from orchestrator.jobs.causes import Retry, retry_of
from orchestrator.jobs.model import (
    ENDED,
    IN_LINE,
    ON_CARD,
    AttemptBegun,
    AttemptEnded,
    AttemptRecalled,
    Cause,
    Job,
    JobOrder,
    JobState,
    MilestoneReached,
    Record,
    SettingsChosen,
    SpeedMeasured,
    Standing,
    StateChanged,
    Submitted,
    UserOrder,
)

#: A program that kills itself looks like one that is killed. After so many attempts in a row, each
#: ended within so long and no step further, it has failed. The pauses between them take 51 min.
_MOST_IN_VAIN, _SOON_S = 12, 600.0
#: Wait before an attempt that is not counted is made again; doubled each time in a row.
_BACK_OFF_S, _LONGEST_BACK_OFF_S, _LONG_RUN_S = 5.0, 600.0, 600.0
#: The same for a training that had no room on the largest card.
_NO_ROOM_BACK_OFF_S = 60.0
#: A job that found its card taken by other programs lets those go first that may need less.
TAKEN_S = 600
_FATAL = frozenset({Cause.KILLED, Cause.HOST_MEMORY, Cause.DRIVER})

#: Fields of a standing and their new values.
Changes: TypeAlias = dict[str, Any]


class IllegalRecordError(RuntimeError):
    """A record that no rule allows for its job as it stands: a defect, or a user's mistake."""

    def __init__(self, standing: Standing | None, record: Record, why: str) -> None:
        name = "the queue" if standing is None else standing.job.name
        super().__init__(f"{name}: {type(record).__name__} cannot be: {why}")


def standing_of(record: Submitted, number: int) -> Standing:
    """Return how a job stands that has just come in, as that of this number."""
    state, reason = _beginning(record.job)
    return Standing(
        job=record.job,
        number=number,
        state=state,
        reason=reason,
        since_s=record.at_s,
        least_room_bytes=record.least_bytes,
    )


def _beginning(job: Job) -> tuple[JobState, str]:
    """Return the state in which a job begins, and why."""
    if job.after:
        return JobState.WAITING, f"waits for {', '.join(job.after)}"
    if job.awaits_settings:
        return JobState.WAITING, "its settings are chosen once a place is free"
    return JobState.QUEUED, "in line"


def _settings_chosen(standing: Standing, record: SettingsChosen) -> Changes:
    if not standing.job.awaits_settings:
        raise IllegalRecordError(standing, record, "it has its settings")
    job = standing.job.with_settings(record.settings)
    return {"job": job, "least_room_bytes": record.least_bytes}


def changes_of(standing: Standing, record: Record) -> Changes:
    """Return what `record` changes in the standing.

    Raises:
        IllegalRecordError: It cannot happen in this state, or is of another attempt.
    """
    row = _TABLE.get(type(record))
    handler = None if row is None else row.get(standing.state)
    if handler is None:
        raise IllegalRecordError(standing, record, f"it is {standing.state.value}")
    return {} if isinstance(handler, str) else handler(standing, record)


def _into(standing: Standing, state: JobState, reason: str, at_s: float, **more: object) -> Changes:
    changes: Changes = {"state": state, "reason": reason, "since_s": at_s, **more}
    before = standing.state
    if before in ON_CARD:
        changes["ran_s"] = standing.ran_s + at_s - standing.since_s
    elif before is JobState.PARKED:
        changes["parked_s"] = standing.parked_s + at_s - standing.since_s
    if state not in ON_CARD:
        changes.setdefault("recalled_to", None)
    return changes


def _require_same_attempt(standing: Standing, record: AttemptRecalled | AttemptEnded) -> None:
    if record.attempt != standing.attempt:
        why = f"it is of attempt {record.attempt}, and {standing.attempt} is the present one"
        raise IllegalRecordError(standing, record, why)


def _assigned(standing: Standing, record: AttemptBegun) -> Changes:
    if record.attempt != standing.attempt + 1:
        why = f"attempt {record.attempt} does not follow {standing.attempt}"
        raise IllegalRecordError(standing, record, why)
    return _into(
        standing,
        JobState.RUNNING,
        f"on {record.card}" + ("" if record.alone else ", which it may share"),
        record.at_s,
        attempt=record.attempt,
        last_card=record.card,
        moves=standing.moves + (standing.last_card not in {None, record.card}),
        budget_bytes=record.budget_bytes,
        alone=record.alone,
    )


def _recalled(standing: Standing, record: AttemptRecalled) -> Changes:
    _require_same_attempt(standing, record)
    changes = _sent_away(standing, record.to, record.reason, record.at_s)
    wait_s = record.wait_s
    if record.least_room_bytes is not None:
        changes["least_room_bytes"] = record.least_room_bytes
        if record.to is JobState.PARKED:
            wait_s = _NO_ROOM_BACK_OFF_S * 2**standing.no_room if standing.alone else 0.0
            changes["no_room"] = standing.no_room + 1
    return changes | {"wake_at_s": record.at_s + wait_s}


def _sent_away(standing: Standing, to: JobState, reason: str, at_s: float) -> Changes:
    """Have the attempt on a card save and end, and say where the job goes when it has."""
    changes: Changes = {"reason": reason, "recalled_to": to}
    state = JobState.MOVING if to is JobState.QUEUED else JobState.RUNNING
    return _into(standing, state, reason, at_s) | changes if state != standing.state else changes


def is_better(standing: Standing, value: float) -> bool:
    """Return whether a value of the job's metric is its best so far."""
    rule, best = standing.job.milestones, standing.best
    if best is None:
        return math.isfinite(value)
    return value < best if rule is None or rule.is_min else value > best


def _valued(standing: Standing, value: float | None, step: int | None) -> Changes:
    if value is None:
        return {}
    if is_better(standing, value):
        return {"value": value, "best": value, "best_step": step}
    return {"value": value}


def _attempt_ended(standing: Standing, record: AttemptEnded) -> Changes:
    _require_same_attempt(standing, record)
    cause, to = record.cause, standing.recalled_to
    more: Changes = {"out_of_memory": standing.out_of_memory + record.out_of_memory}
    if record.step is not None:
        more["step"] = record.step
    if record.peak_bytes is not None:
        more["peak_bytes"] = max(record.peak_bytes, standing.peak_bytes or 0)
    if cause is None:
        reason = standing.reason if to else f"in line again: its place on {standing.card} is gone"
        return _into(standing, to or JobState.QUEUED, reason, record.at_s, **more)
    state, reason, follows = _follows(standing, record, cause)
    more |= follows | _valued(standing, record.value, record.step)
    more |= {"no_room": 0, "exit_code": record.exit_code}
    if state is JobState.PARKED and to is None:
        more |= _back_off(standing, record)
    if cause is Cause.DONE:
        more["sha256"] = record.sha256
    elif cause is not Cause.PARKED:
        more["last_error"] = record.text or cause.value
    return _into(standing, state, reason, record.at_s, **more)


def _back_off(standing: Standing, record: AttemptEnded) -> Changes:
    is_long = record.at_s - standing.since_s > _LONG_RUN_S
    in_row = 1 if is_long else standing.in_row + 1
    first_s = TAKEN_S if record.cause is Cause.CARD_TAKEN else _BACK_OFF_S
    wait_s = min(_LONGEST_BACK_OFF_S, first_s * 2 ** min(in_row - 1, 10))
    return {"in_row": in_row, "wake_at_s": record.at_s + wait_s}


def _follows(
    standing: Standing, record: AttemptEnded, cause: Cause
) -> tuple[JobState, str, Changes]:
    """Return where the end of an attempt leads, why, and what else changes."""
    text, to = record.text or cause.value, standing.recalled_to
    if cause is Cause.DONE:
        return JobState.SAVING, "what it leaves is put into its folder", {}
    retry = retry_of(cause, standing, text, record.step)
    is_command = standing.job.command is not None
    if to is JobState.CANCELLED or (to is not None and (is_command or retry is not Retry.NEVER)):
        return to, standing.reason, _more_room(standing, record) if retry is Retry.LARGER else {}
    if retry is Retry.LARGER:
        more = _more_room(standing, record)
        return JobState.QUEUED, "in line for more room: it ran out of memory", more
    if retry is Retry.AS_IS:
        return _again(standing, record, text)
    failures, allowed = standing.failures + 1, standing.job.retries
    if retry is Retry.NEVER or failures > allowed:
        return JobState.FAILED, text, {"failures": failures}
    reason = f"in line again after failure {failures} of {allowed + 1}: {text}"
    return JobState.QUEUED, reason, {"failures": failures}


def _again(standing: Standing, record: AttemptEnded, text: str) -> tuple[JobState, str, Changes]:
    has_advanced = (record.step or 0) > (standing.step or 0)
    is_soon = record.at_s - standing.since_s <= _SOON_S and not has_advanced
    in_vain = standing.in_vain + 1 if record.cause in _FATAL and is_soon else 0
    if in_vain >= _MOST_IN_VAIN:
        return JobState.FAILED, f"{in_vain} attempts in a row ended soon: {text}", {"in_vain": 0}
    return JobState.PARKED, f"starts again soon: {text}", {"in_vain": in_vain}


def _more_room(standing: Standing, record: AttemptEnded) -> Changes:
    least = causes.least_room_bytes(record.peak_bytes, standing.budget_bytes or 0)
    return {"least_room_bytes": max(least, standing.least_room_bytes or 0)}


def _reached(standing: Standing, record: MilestoneReached) -> Changes:
    reached = (*standing.reached, (record.milestone, record.value, record.at_s))
    valued = _valued(standing, record.value, record.milestone)
    return {"step": record.milestone, "reached": reached, **valued}


def _measured(standing: Standing, record: SpeedMeasured) -> Changes:
    changes: Changes = {"measured_at_s": record.at_s}
    if record.steps_per_s is not None:
        changes["speeds"] = {**standing.speeds, record.card_title: record.steps_per_s}
    if record.best is not None:
        changes |= {"best": record.best, "best_step": record.best_step}
    return changes


def _settled(standing: Standing, record: StateChanged) -> Changes:
    if record.to not in _SETTLES[standing.state]:
        why = f"from {standing.state.value} it cannot become {record.to.value}"
        raise IllegalRecordError(standing, record, why)
    more = {"last_error": record.reason} if record.to is JobState.FAILED else {}
    return _into(standing, record.to, record.reason, record.at_s, **more)


def _sent(standing: Standing, state: JobState, reason: str, at_s: float, **more: object) -> Changes:
    """Send a job without an attempt where a user wants it, and forget for what it waited."""
    return _into(standing, state, reason, at_s, wake_at_s=0.0, no_room=0, in_row=0, **more)


def _said_aside(standing: Standing, record: UserOrder) -> Changes:
    """Obey an order about a job that has not ended and has no attempt."""
    state, to, at_s = standing.state, standing.recalled_to, record.at_s
    if record.order is JobOrder.CANCEL:
        return _sent(standing, JobState.CANCELLED, f"cancelled by {record.by}", at_s)
    if state is JobState.SAVING:
        return {}  # its work is done
    if record.order is JobOrder.HOLD and state is not JobState.HELD:
        back = state if state in _BACK else None
        return _sent(standing, JobState.HELD, f"held by {record.by}", at_s, recalled_to=back)
    if record.order is JobOrder.RELEASE and state is JobState.HELD:
        return _sent(standing, to or JobState.QUEUED, f"released by {record.by}", at_s)
    if record.order is not JobOrder.HOLD and state in {JobState.PARKED, JobState.PAUSED}:
        return _sent(standing, JobState.QUEUED, f"sent on by {record.by}", at_s)
    return {}


def _said_on_card(standing: Standing, record: UserOrder) -> Changes:
    to = standing.recalled_to
    if record.order is JobOrder.CANCEL:
        goal, reason = JobState.CANCELLED, f"cancelled by {record.by}"
    elif record.order is JobOrder.HOLD and to is not JobState.CANCELLED:
        goal, reason = JobState.HELD, f"held by {record.by}"
    elif record.order is JobOrder.RELEASE and to is JobState.HELD:
        goal, reason = JobState.QUEUED, f"released by {record.by}"
    else:
        return {}
    return _sent_away(standing, goal, reason, record.at_s)


def _said_after_end(standing: Standing, record: UserOrder) -> Changes:
    if record.order is not JobOrder.RETRY:
        return {}
    return _sent(
        standing,
        _beginning(standing.job)[0],
        f"once more for {record.by}",
        record.at_s,
        failures=0,
        last_error=None,
        least_room_bytes=None,
        exit_code=None,
    )


#: Where `StateChanged` may lead.
_SETTLES: Mapping[JobState, frozenset[JobState]] = {
    JobState.WAITING: frozenset(
        {JobState.QUEUED, JobState.SKIPPED, JobState.INFEASIBLE, JobState.FAILED}
    ),
    JobState.QUEUED: frozenset({JobState.INFEASIBLE}),
    JobState.PREEMPTED: frozenset({JobState.INFEASIBLE}),
    JobState.PARKED: frozenset({JobState.QUEUED, JobState.INFEASIBLE}),
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.STOPPED}),
    JobState.SAVING: frozenset({JobState.DONE, JobState.FAILED, JobState.SAVING}),
    JobState.SKIPPED: frozenset({JobState.WAITING}),
}

#: A job that was held in one of these goes back into it; from any other it goes into the line.
_BACK = frozenset({JobState.WAITING, JobState.PAUSED})

# The record's type is that of the table's key, which a dict cannot say; a test compares them.
Handler: TypeAlias = Callable[[Standing, Any], Changes]

_ASIDE = frozenset(JobState) - ENDED - ON_CARD

#: What a record does to a job by its state: its handler, or why it changes nothing. What is not
#: here is illegal. Submitted and QueueHeld are the queue's.
_TABLE: Mapping[type[Record], Mapping[JobState, Handler | str]] = {
    SettingsChosen: {JobState.WAITING: _settings_chosen},
    AttemptBegun: dict.fromkeys(IN_LINE, _assigned),
    AttemptRecalled: dict.fromkeys(ON_CARD, _recalled),
    AttemptEnded: dict.fromkeys(ON_CARD, _attempt_ended),
    MilestoneReached: dict.fromkeys(ON_CARD, _reached),
    SpeedMeasured: dict.fromkeys(ON_CARD, _measured),
    StateChanged: dict.fromkeys(_SETTLES, _settled),
    UserOrder: {
        **dict.fromkeys(_ASIDE, _said_aside),
        **dict.fromkeys(ON_CARD, _said_on_card),
        **dict.fromkeys(ENDED, _said_after_end),
        JobState.DONE: "what is done is not done again",
    },
}
