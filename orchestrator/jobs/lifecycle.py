"""The lifecycle of a job: each function takes a standing and an observation or order, and returns
the next standing with the event that logs the change.

    WAITING ──> QUEUED ──begun──> RUNNING ──ended, work done──> SAVING ──> DONE, FAILED
                                  RUNNING ──ended, else──> FAILED, QUEUED, PARKED
    RUNNING ──recalled──> RUNNING, or MOVING if it continues on another card
    RUNNING, MOVING ──ended, at rest──> QUEUED, PARKED, PAUSED, PREEMPTED, HELD, CANCELLED
    PARKED, PAUSED ──> QUEUED      HELD ──released──> WAITING, PAUSED, else QUEUED
    every state that is not an end ──cancelled──> CANCELLED
    SKIPPED ──> WAITING, once the job that it was skipped for begins again

Rules:

1. Observations of an attempt other than the present one change nothing (`queue.py`).
2. The cause of an attempt's end (`causes.py`) decides what follows; only this module decides it.
3. A recalled attempt that fails while it saves is not counted; the job enters `recalled_to`.
4. A user's order for a job on a card sets the state after the attempt, however the attempt ends.

A transition that is not in `LEGAL` is a defect: it raises `IllegalMoveError` and changes nothing.
Pure. Does not decide when a transition happens (`queue.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias

from orchestrator.jobs import causes
from orchestrator.jobs.model import (
    ENDED,
    IN_LINE,
    ON_CARD,
    AttemptStatus,
    Job,
    JobOrder,
    JobState,
    Settings,
    Standing,
    Submitted,
    UserOrder,
)
from orchestrator.jobs.places import Place
from workers.messages import Cause

#: A program that kills itself looks like one that is killed. So a job fails after this number of
#: consecutive attempts that each ended within this time without progress. Their pauses are 51 min.
_MOST_IN_VAIN, _SOON_S = 12, 600.0
#: Pause before a retry that does not count; doubled for each consecutive one up to the longest. An
#: attempt of more than `_LONG_RUN_S` starts the doubling again.
_BACK_OFF_S, _LONGEST_BACK_OFF_S, _LONG_RUN_S = 5.0, 600.0, 600.0
#: Pause of a job whose card other programs have filled: jobs that need less memory go first.
TAKEN_S = 600.0
_FATAL = frozenset({Cause.KILLED, Cause.HOST_MEMORY, Cause.DRIVER})

#: The reason of a SAVING job, unless its files cannot be copied into its folder.
SAVES: Final = "its files are being copied into its folder"

#: New values of fields of a `Standing`.
Changes: TypeAlias = dict[str, Any]

_FROM_CARD: Final = frozenset(
    {
        *(JobState.SAVING, JobState.FAILED, JobState.QUEUED, JobState.PARKED),
        *(JobState.PAUSED, JobState.PREEMPTED, JobState.HELD, JobState.CANCELLED),
    }
)
_FROM_LINE: Final = frozenset({JobState.INFEASIBLE})

#: Legal transitions: event name -> state before -> states after. Orders of users are in `_ORDERS`.
LEGAL: Final[Mapping[str, Mapping[JobState, frozenset[JobState]]]] = {
    "job_settings_chosen": {JobState.WAITING: frozenset({JobState.WAITING})},
    "job_state_changed": {
        JobState.WAITING: _FROM_LINE | {JobState.QUEUED, JobState.SKIPPED, JobState.FAILED},
        **dict.fromkeys(IN_LINE, _FROM_LINE),
        JobState.PARKED: _FROM_LINE | {JobState.QUEUED},
        JobState.PAUSED: frozenset({JobState.QUEUED, JobState.STOPPED}),
        JobState.SAVING: frozenset({JobState.SAVING, JobState.DONE, JobState.FAILED}),
        JobState.SKIPPED: frozenset({JobState.WAITING}),
    },
    "job_attempt_begun": dict.fromkeys(IN_LINE, frozenset({JobState.RUNNING})),
    "job_attempt_recalled": dict.fromkeys(ON_CARD, ON_CARD),
    "job_attempt_ended": dict.fromkeys(ON_CARD, _FROM_CARD),
    "job_milestone_reached": dict.fromkeys(ON_CARD, ON_CARD),
    "job_speed_measured": dict.fromkeys(ON_CARD, ON_CARD),
}


EVENTS: Final = ("job_submitted", "job_user_order", *LEGAL)
"""Names of the events that concern one job."""


class IllegalMoveError(RuntimeError):
    """A transition that `LEGAL` does not allow for the state of the job: a defect."""

    def __init__(self, event: str, standing: Standing, to: JobState) -> None:
        name, state = standing.job.name, standing.state.value
        super().__init__(f"{name}: {event} cannot be from {state} to {to.value}")


class Event(NamedTuple):
    """An entry of the event log."""

    name: str
    job: str | None
    details: Mapping[str, object]


#: The new standing of a job, and the event that logs the change.
Transition: TypeAlias = tuple[Standing, Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The state that a job must enter next, and why."""

    to: JobState
    reason: str
    wait_s: float = 0.0
    """How long a job that leaves its card stays PARKED at least."""
    least_room_bytes: int | None = None
    """Room that the next card must have, if not even the smallest step fitted."""


def _legal(
    event: str, before: Standing, after: Standing, details: Mapping[str, object]
) -> Transition:
    if after.state not in LEGAL[event].get(before.state, ()):
        raise IllegalMoveError(event, before, after.state)
    return after, Event(event, after.job.name, details)


def submitted(said: Submitted, number: int, now_s: float) -> Transition:
    """Add a job to the queue, at position `number` of the order of submission."""
    state, reason = _beginning(said.job)
    standing = Standing(
        job=said.job,
        number=number,
        state=state,
        reason=reason,
        since_s=now_s,
        least_room_bytes=said.least_bytes,
    )
    return standing, Event("job_submitted", said.job.name, {"least_bytes": said.least_bytes})


def _beginning(job: Job) -> tuple[JobState, str]:
    """Return the first state of a job, and why."""
    if job.after:
        return JobState.WAITING, f"waits for {', '.join(job.after)}"
    if job.awaits_settings:
        return JobState.WAITING, "its settings are chosen once a place is free"
    return JobState.QUEUED, "in line"


def with_settings(standing: Standing, settings: Settings, least_bytes: int | None) -> Transition:
    """Set the settings of a member of an optuna sweep."""
    job = standing.job.with_settings(settings)
    after = replace(standing, job=job, least_room_bytes=least_bytes)
    details = {"settings": settings, "least_bytes": least_bytes}
    return _legal("job_settings_chosen", standing, after, details)


def begun(standing: Standing, place: Place, now_s: float) -> Transition:
    """Begin the next attempt of a job, on the card of `place`."""
    details = {
        "attempt": standing.attempt + 1,
        "budget_bytes": place.budget_bytes,
        "alone": place.alone,
    }
    after = _moved(
        standing,
        JobState.RUNNING,
        f"on {place.card}" + ("" if place.alone else ", which it may share"),
        now_s,
        last_card=place.card,
        moves=standing.moves + (standing.last_card not in {None, place.card}),
        **details,
    )
    return _legal("job_attempt_begun", standing, after, {"card": place.card, **details})


def sent(standing: Standing, goal: Goal, now_s: float) -> Transition:
    """Move a job to the state of `goal`, for a reason other than a user's order.

    A job on a card is recalled: it enters that state once its attempt has saved and ended.
    """
    if standing.state not in ON_CARD:
        more = {"last_error": goal.reason} if goal.to is JobState.FAILED else {}
        after = _moved(standing, goal.to, goal.reason, now_s, **more)
        return _legal("job_state_changed", standing, after, {"to": goal.to, "reason": goal.reason})
    after = _sent_away(standing, goal.to, goal.reason, now_s)
    after = replace(after, wake_at_s=now_s + goal.wait_s)
    if goal.least_room_bytes is not None:
        no_room = standing.no_room + (goal.to is JobState.PARKED)
        after = replace(after, least_room_bytes=goal.least_room_bytes, no_room=no_room)
    details = {**asdict(goal), "attempt": standing.attempt}
    return _legal("job_attempt_recalled", standing, after, details)


#: Fields of `AttemptStatus` that the event of an ended attempt contains.
_LOGGED_AT_END: Final = (
    *("attempt", "cause", "text", "exit_code", "step", "value"),
    *("peak_bytes", "out_of_memory", "sha256"),
)


def ended(standing: Standing, status: AttemptStatus, now_s: float) -> Transition:
    """Apply the end of the present attempt. `status.cause` is `None` if it was recalled or its node
    was lost.
    """
    more: Changes = {"out_of_memory": standing.out_of_memory + status.out_of_memory}
    if status.step is not None:
        more["step"] = status.step
    if status.peak_bytes is not None:
        more["peak_bytes"] = max(status.peak_bytes, standing.peak_bytes or 0)
    to, reason = standing.recalled_to, standing.reason
    if status.cause is None:
        to = to or JobState.QUEUED
        if standing.recalled_to is None:
            reason = f"in line again: its place on {standing.card} is gone"
    else:
        to, reason, follows = _follows(standing, status, status.cause, now_s)
        more |= valued(standing, status.value, status.step) | {"no_room": 0} | follows
        more["exit_code"] = status.exit_code
        if status.cause is Cause.DONE:
            more["sha256"] = status.sha256
            more["last_card"] = status.cards or standing.last_card
        elif status.cause is not Cause.PARKED:
            more["last_error"] = status.text or status.cause.value
    details = {key: getattr(status, key) for key in _LOGGED_AT_END}
    after = _moved(standing, to, reason, now_s, **more)
    return _legal("job_attempt_ended", standing, after, details)


def _follows(
    standing: Standing, status: AttemptStatus, cause: Cause, now_s: float
) -> tuple[JobState, str, Changes]:
    """Return the state after the end of an attempt, the reason, and other changes."""
    text, to, allowed = status.text or cause.value, standing.recalled_to, standing.job.retries
    if cause is Cause.DONE:
        return JobState.SAVING, SAVES, {}
    is_final = causes.is_final(cause, standing, text, status.step)
    more: Changes = {}
    if cause is Cause.OUT_OF_MEMORY:
        least = causes.least_room_bytes(status.peak_bytes, standing.budget_bytes or 0)
        more = {"least_room_bytes": max(least, standing.least_room_bytes or 0)}
    is_own = standing.job.command is None and is_final  # the training would fail again
    if to is JobState.CANCELLED or (to is not None and not is_own):
        return to, standing.reason, more
    if cause is Cause.OUT_OF_MEMORY:
        return JobState.QUEUED, "in line for more room: it ran out of memory", more
    if cause in causes.NOT_COUNTED:
        return _again(standing, status, text, now_s)
    failures = standing.failures + 1
    if is_final or failures > allowed:
        return JobState.FAILED, text, {"failures": failures}
    reason = f"in line again after failure {failures} of {allowed + 1}: {text}"
    return JobState.QUEUED, reason, {"failures": failures}


def _again(
    standing: Standing, status: AttemptStatus, text: str, now_s: float
) -> tuple[JobState, str, Changes]:
    """Park a job until its next attempt, twice as long for each consecutive retry."""
    ran_s = now_s - standing.since_s
    has_advanced = (status.step or 0) > (standing.step or 0)
    is_vain = status.cause in _FATAL and ran_s <= _SOON_S and not has_advanced
    in_vain = standing.in_vain + 1 if is_vain else 0
    if in_vain >= _MOST_IN_VAIN:
        return JobState.FAILED, f"{in_vain} attempts in a row ended soon: {text}", {"in_vain": 0}
    in_row = 1 if ran_s > _LONG_RUN_S else standing.in_row + 1
    first_s = TAKEN_S if status.cause is Cause.CARD_TAKEN else _BACK_OFF_S
    wait_s = min(_LONGEST_BACK_OFF_S, first_s * 2 ** min(in_row - 1, 10))
    more = {"in_vain": in_vain, "in_row": in_row, "wake_at_s": now_s + wait_s}
    return JobState.PARKED, f"starts again soon: {text}", more


def reached(standing: Standing, milestone: int, value: float, now_s: float) -> Transition:
    """Record that a job has reached `milestone` with `value` of its metric."""
    after = replace(
        standing,
        step=milestone,
        reached=(*standing.reached, (milestone, value, now_s)),
        **valued(standing, value, milestone),
    )
    details = {"milestone": milestone, "value": value}
    return _legal("job_milestone_reached", standing, after, details)


def measured(
    standing: Standing, card_title: str, speed: float | None, status: AttemptStatus, now_s: float
) -> Transition:
    """Record the metric of a job, and its speed in steps per second on a type of card if known."""
    of_metric = valued(standing, status.value, status.step)
    changes: Changes = {"measured_at_s": now_s, **of_metric}
    if speed is not None:
        changes["speeds"] = {**standing.speeds, card_title: speed}
    details = {"card_title": card_title, "steps_per_s": speed, **of_metric}
    return _legal("job_speed_measured", standing, replace(standing, **changes), details)


def is_better(standing: Standing, value: float) -> bool:
    """Return whether `value` of the job's metric is its best so far."""
    rule, best = standing.job.milestones, standing.best
    if best is None:
        return math.isfinite(value)
    return value < best if rule is None or rule.is_min else value > best


def valued(standing: Standing, value: float | None, step: int | None) -> Changes:
    """Return the changes if the job's metric has `value` at `step`; none if `value` is `None`."""
    if value is None:
        return {}
    best = {"best": value, "best_step": step} if is_better(standing, value) else {}
    return {"value": value, **best}


_OFF_CARD: Final = frozenset(JobState) - ENDED - ON_CARD
_RESTING: Final = frozenset({JobState.PARKED, JobState.PAUSED})
#: A job that was held in one of these states returns to it at RELEASE; others become QUEUED.
_BACK: Final = frozenset({JobState.WAITING, JobState.PAUSED})

#: The effect of an order by state of the job: the next state, and the start of the reason. `None`:
#: after HELD the state before it if that is in `_BACK`, else QUEUED; for an ended job its first state.
#: An order without an entry has no effect, such as HOLD of a SAVING job or RETRY of a DONE one.
_ORDERS: Final[Mapping[JobOrder, Mapping[JobState, tuple[JobState | None, str]]]] = {
    JobOrder.CANCEL: dict.fromkeys(_OFF_CARD | ON_CARD, (JobState.CANCELLED, "cancelled by")),
    JobOrder.HOLD: dict.fromkeys(
        (_OFF_CARD | ON_CARD) - {JobState.HELD, JobState.SAVING}, (JobState.HELD, "held by")
    ),
    JobOrder.RELEASE: {
        JobState.HELD: (None, "released by"),
        **dict.fromkeys(ON_CARD, (JobState.QUEUED, "released by")),
        **dict.fromkeys(_RESTING, (JobState.QUEUED, "continued by")),
    },
    JobOrder.RETRY: {
        **dict.fromkeys(_RESTING, (JobState.QUEUED, "continued by")),
        **dict.fromkeys(ENDED - {JobState.DONE}, (None, "retried by")),
    },
}


def ordered(standing: Standing, said: UserOrder, now_s: float) -> Transition:
    """Obey an order of a user. If it has no effect in this state, only the event is logged."""
    state, back = standing.state, standing.recalled_to
    to, words = _ORDERS[said.order].get(state, (state, ""))
    after, reason = standing, f"{words} {said.by}"
    if state in ON_CARD:
        is_overruled = said.order is JobOrder.HOLD and back is JobState.CANCELLED
        is_void = said.order is JobOrder.RELEASE and back is not JobState.HELD
        if to and words and not (is_overruled or is_void):
            after = _sent_away(standing, to, reason, now_s)
    elif words:
        # The counters of earlier waits begin again.
        more: Changes = {"wake_at_s": 0.0, "no_room": 0, "in_row": 0}
        if to is JobState.HELD:
            more["recalled_to"] = state if state in _BACK else None
        if state in ENDED:
            to, _ = _beginning(standing.job)
            more |= {"failures": 0, "last_error": None, "least_room_bytes": None}
            more["exit_code"] = None
        after = _moved(standing, to or back or JobState.QUEUED, reason, now_s, **more)
    details = {"id": said.id, "order": said.order, "by": said.by}
    return after, Event("job_user_order", said.job, details)


def _sent_away(standing: Standing, to: JobState, reason: str, now_s: float) -> Standing:
    """Recall the attempt on a card; the job enters the state `to` once it has saved and ended."""
    state = JobState.MOVING if to is JobState.QUEUED else JobState.RUNNING
    if state is not standing.state:
        standing = _moved(standing, state, reason, now_s)
    return replace(standing, reason=reason, recalled_to=to)


def _moved(standing: Standing, to: JobState, reason: str, now_s: float, **more: object) -> Standing:
    """Return a job in the state `to`; the time in its last state is added to the counters."""
    before, spent_s = standing.state, now_s - standing.since_s
    changes: Changes = {"state": to, "reason": reason, "since_s": now_s, **more}
    if before in ON_CARD:
        changes["ran_s"] = standing.ran_s + spent_s
    elif before is JobState.PARKED:
        changes["parked_s"] = standing.parked_s + spent_s
    if to not in ON_CARD:
        changes.setdefault("recalled_to", None)
    return replace(standing, **changes)
