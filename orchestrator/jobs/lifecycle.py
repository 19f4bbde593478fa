"""The lifecycle of a job: (its state, what is seen of it or asked of it) -> how it stands then, and
the event that tells of it.

    WAITING ──> QUEUED ──begun──> RUNNING ──ended, work done──> SAVING ──> DONE, FAILED
                                  RUNNING ──ended, else──> FAILED, QUEUED, PARKED
    RUNNING ──recalled──> RUNNING, or MOVING where it goes on elsewhere
    RUNNING, MOVING ──ended, at rest──> QUEUED, PARKED, PAUSED, PREEMPTED, HELD, CANCELLED
    PARKED, PAUSED ──> QUEUED      HELD ──released──> where it was
    any that has not ended ──cancelled──> CANCELLED
    SKIPPED ──> WAITING, once what it was skipped for begins again

Rules:

1. What is seen of an attempt other than the present one changes nothing (`queue.py`).
2. What an attempt that ended leads to is decided by its cause (`causes.py`), here and nowhere else.
3. An attempt that is recalled and fails while it saves is not counted; it goes where it was sent.
4. An order of the user about a job on a card says where its attempt goes, however that ends.

What is not in `LEGAL` is a defect: it raises `IllegalMoveError`, and nothing has changed. Pure.
Does not decide what happens when (`queue.py`).
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

#: A program that kills itself looks like one that is killed. After so many attempts in a row, each
#: ended within so long and no step further, it has failed. The pauses between them take 51 min.
_MOST_IN_VAIN, _SOON_S = 12, 600.0
#: Wait before an attempt that is not counted is made again; doubled each time in a row.
_BACK_OFF_S, _LONGEST_BACK_OFF_S, _LONG_RUN_S = 5.0, 600.0, 600.0
#: A job that found its card taken by other programs lets those go first that may need less.
TAKEN_S = 600.0
_FATAL = frozenset({Cause.KILLED, Cause.HOST_MEMORY, Cause.DRIVER})

#: Why a job is SAVING, until its folder cannot be filled.
SAVES: Final = "what it leaves is put into its folder"

#: Fields of a standing and their new values.
Changes: TypeAlias = dict[str, Any]

_FROM_CARD: Final = frozenset(
    {
        *(JobState.SAVING, JobState.FAILED, JobState.QUEUED, JobState.PARKED),
        *(JobState.PAUSED, JobState.PREEMPTED, JobState.HELD, JobState.CANCELLED),
    }
)
_FROM_LINE: Final = frozenset({JobState.INFEASIBLE})

#: What may happen to a job by its state, and the states to which that may lead. The name is that of
#: the event which tells of it. What users order is in `_ORDERS`.
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
"""By which what happened to one job is told."""


class IllegalMoveError(RuntimeError):
    """What no rule allows for a job as it stands: a defect."""

    def __init__(self, event: str, standing: Standing, to: JobState) -> None:
        name, state = standing.job.name, standing.state.value
        super().__init__(f"{name}: {event} cannot be from {state} to {to.value}")


class Event(NamedTuple):
    """What is told in the event log."""

    name: str
    job: str | None
    details: Mapping[str, object]


#: How a job stands from now on, and what is told of that.
Transition: TypeAlias = tuple[Standing, Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Where a job is to go, and why."""

    to: JobState
    reason: str
    wait_s: float = 0.0
    """So long it is not in line again, where it leaves a card for a while."""
    least_room_bytes: int | None = None
    """What the next card must have, where not even its smallest step had room."""


def _legal(
    event: str, before: Standing, after: Standing, details: Mapping[str, object]
) -> Transition:
    if after.state not in LEGAL[event].get(before.state, ()):
        raise IllegalMoveError(event, before, after.state)
    return after, Event(event, after.job.name, details)


def submitted(said: Submitted, number: int, now_s: float) -> Transition:
    """Take a job in, as that of this number."""
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
    """Return the state in which a job begins, and why."""
    if job.after:
        return JobState.WAITING, f"waits for {', '.join(job.after)}"
    if job.awaits_settings:
        return JobState.WAITING, "its settings are chosen once a place is free"
    return JobState.QUEUED, "in line"


def with_settings(standing: Standing, settings: Settings, least_bytes: int | None) -> Transition:
    """Give a member of a sweep of method optuna its settings."""
    job = standing.job.with_settings(settings)
    after = replace(standing, job=job, least_room_bytes=least_bytes)
    details = {"settings": settings, "least_bytes": least_bytes}
    return _legal("job_settings_chosen", standing, after, details)


def begun(standing: Standing, place: Place, now_s: float) -> Transition:
    """Begin the next attempt at a job, on a card."""
    told = {
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
        **told,
    )
    return _legal("job_attempt_begun", standing, after, {"card": place.card, **told})


def sent(standing: Standing, goal: Goal, now_s: float) -> Transition:
    """Send a job where it is to go, for a reason that is not a user's: at once, or, where it is on
    a card, once its attempt has saved and ended.
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
    told = {**asdict(goal), "attempt": standing.attempt}
    return _legal("job_attempt_recalled", standing, after, told)


#: What is told of an attempt that has ended.
_TOLD_OF_END: Final = (
    *("attempt", "cause", "text", "exit_code", "step", "value"),
    *("peak_bytes", "out_of_memory", "sha256"),
)


def ended(standing: Standing, seen: AttemptStatus, now_s: float) -> Transition:
    """Follow the end of the present attempt. Without a cause it was asked to, or lost its node."""
    more: Changes = {"out_of_memory": standing.out_of_memory + seen.out_of_memory}
    if seen.step is not None:
        more["step"] = seen.step
    if seen.peak_bytes is not None:
        more["peak_bytes"] = max(seen.peak_bytes, standing.peak_bytes or 0)
    to, reason = standing.recalled_to, standing.reason
    if seen.cause is None:
        to = to or JobState.QUEUED
        if standing.recalled_to is None:
            reason = f"in line again: its place on {standing.card} is gone"
    else:
        to, reason, follows = _follows(standing, seen, seen.cause, now_s)
        more |= valued(standing, seen.value, seen.step) | {"no_room": 0} | follows
        more["exit_code"] = seen.exit_code
        if seen.cause is Cause.DONE:
            more["sha256"] = seen.sha256
            more["last_card"] = seen.cards or standing.last_card
        elif seen.cause is not Cause.PARKED:
            more["last_error"] = seen.text or seen.cause.value
    details = {key: getattr(seen, key) for key in _TOLD_OF_END}
    after = _moved(standing, to, reason, now_s, **more)
    return _legal("job_attempt_ended", standing, after, details)


def _follows(
    standing: Standing, seen: AttemptStatus, cause: Cause, now_s: float
) -> tuple[JobState, str, Changes]:
    """Return where the end of an attempt leads, why, and what else changes."""
    text, to, allowed = seen.text or cause.value, standing.recalled_to, standing.job.retries
    if cause is Cause.DONE:
        return JobState.SAVING, SAVES, {}
    is_final = causes.is_final(cause, standing, text, seen.step)
    more: Changes = {}
    if cause is Cause.OUT_OF_MEMORY:
        least = causes.least_room_bytes(seen.peak_bytes, standing.budget_bytes or 0)
        more = {"least_room_bytes": max(least, standing.least_room_bytes or 0)}
    is_own = standing.job.command is None and is_final  # it would fail again
    if to is JobState.CANCELLED or (to is not None and not is_own):
        return to, standing.reason, more
    if cause is Cause.OUT_OF_MEMORY:
        return JobState.QUEUED, "in line for more room: it ran out of memory", more
    if cause in causes.NOT_COUNTED:
        return _again(standing, seen, text, now_s)
    failures = standing.failures + 1
    if is_final or failures > allowed:
        return JobState.FAILED, text, {"failures": failures}
    reason = f"in line again after failure {failures} of {allowed + 1}: {text}"
    return JobState.QUEUED, reason, {"failures": failures}


def _again(
    standing: Standing, seen: AttemptStatus, text: str, now_s: float
) -> tuple[JobState, str, Changes]:
    """Have a job wait a little for its next attempt: longer each time in a row."""
    ran_s = now_s - standing.since_s
    has_advanced = (seen.step or 0) > (standing.step or 0)
    is_vain = seen.cause in _FATAL and ran_s <= _SOON_S and not has_advanced
    in_vain = standing.in_vain + 1 if is_vain else 0
    if in_vain >= _MOST_IN_VAIN:
        return JobState.FAILED, f"{in_vain} attempts in a row ended soon: {text}", {"in_vain": 0}
    in_row = 1 if ran_s > _LONG_RUN_S else standing.in_row + 1
    first_s = TAKEN_S if seen.cause is Cause.CARD_TAKEN else _BACK_OFF_S
    wait_s = min(_LONGEST_BACK_OFF_S, first_s * 2 ** min(in_row - 1, 10))
    more = {"in_vain": in_vain, "in_row": in_row, "wake_at_s": now_s + wait_s}
    return JobState.PARKED, f"starts again soon: {text}", more


def reached(standing: Standing, milestone: int, value: float, now_s: float) -> Transition:
    """Note that a job has reached a milestone with this value of its metric."""
    after = replace(
        standing,
        step=milestone,
        reached=(*standing.reached, (milestone, value, now_s)),
        **valued(standing, value, milestone),
    )
    told = {"milestone": milestone, "value": value}
    return _legal("job_milestone_reached", standing, after, told)


def measured(
    standing: Standing, card_title: str, speed: float | None, seen: AttemptStatus, now_s: float
) -> Transition:
    """Note the speed of a job on a kind of card, where it is known, and its value."""
    of_metric = valued(standing, seen.value, seen.step)
    changes: Changes = {"measured_at_s": now_s, **of_metric}
    if speed is not None:
        changes["speeds"] = {**standing.speeds, card_title: speed}
    told = {"card_title": card_title, "steps_per_s": speed, **of_metric}
    return _legal("job_speed_measured", standing, replace(standing, **changes), told)


def is_better(standing: Standing, value: float) -> bool:
    """Return whether a value of the job's metric is its best so far."""
    rule, best = standing.job.milestones, standing.best
    if best is None:
        return math.isfinite(value)
    return value < best if rule is None or rule.is_min else value > best


def valued(standing: Standing, value: float | None, step: int | None) -> Changes:
    """Return what changes where a job's metric has this value at a step; nothing for `None`."""
    if value is None:
        return {}
    best = {"best": value, "best_step": step} if is_better(standing, value) else {}
    return {"value": value, **best}


_ASIDE: Final = frozenset(JobState) - ENDED - ON_CARD
_RESTING: Final = frozenset({JobState.PARKED, JobState.PAUSED})
#: A job that was held in one of these goes back into it; from any other it goes into the line.
_BACK: Final = frozenset({JobState.WAITING, JobState.PAUSED})

#: Where an order sends a job, by its state, and in which words; `None`: where it was before, or
#: where it begins. What is not here asks for nothing: what is SAVING has done its work, and what is
#: DONE is not done again.
_ORDERS: Final[Mapping[JobOrder, Mapping[JobState, tuple[JobState | None, str]]]] = {
    JobOrder.CANCEL: dict.fromkeys(_ASIDE | ON_CARD, (JobState.CANCELLED, "cancelled by")),
    JobOrder.HOLD: dict.fromkeys(
        (_ASIDE | ON_CARD) - {JobState.HELD, JobState.SAVING}, (JobState.HELD, "held by")
    ),
    JobOrder.RELEASE: {
        JobState.HELD: (None, "released by"),
        **dict.fromkeys(ON_CARD, (JobState.QUEUED, "released by")),
        **dict.fromkeys(_RESTING, (JobState.QUEUED, "sent on by")),
    },
    JobOrder.RETRY: {
        **dict.fromkeys(_RESTING, (JobState.QUEUED, "sent on by")),
        **dict.fromkeys(ENDED - {JobState.DONE}, (None, "once more for")),
    },
}


def ordered(standing: Standing, said: UserOrder, now_s: float) -> Transition:
    """Obey an order of a user; where it asks for nothing in this state, nothing but the event."""
    state, back = standing.state, standing.recalled_to
    to, words = _ORDERS[said.order].get(state, (state, ""))
    after, reason = standing, f"{words} {said.by}"
    if state in ON_CARD:
        is_overruled = said.order is JobOrder.HOLD and back is JobState.CANCELLED
        is_void = said.order is JobOrder.RELEASE and back is not JobState.HELD
        if to and words and not (is_overruled or is_void):
            after = _sent_away(standing, to, reason, now_s)
    elif words:
        # For what it waited is forgotten.
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
    """Have the attempt on a card save and end, and say where the job goes when it has."""
    state = JobState.MOVING if to is JobState.QUEUED else JobState.RUNNING
    if state is not standing.state:
        standing = _moved(standing, state, reason, now_s)
    return replace(standing, reason=reason, recalled_to=to)


def _moved(standing: Standing, to: JobState, reason: str, now_s: float, **more: object) -> Standing:
    """Return a job in another state, with the time that it spent in the one before."""
    before, spent_s = standing.state, now_s - standing.since_s
    changes: Changes = {"state": to, "reason": reason, "since_s": now_s, **more}
    if before in ON_CARD:
        changes["ran_s"] = standing.ran_s + spent_s
    elif before is JobState.PARKED:
        changes["parked_s"] = standing.parked_s + spent_s
    if to not in ON_CARD:
        changes.setdefault("recalled_to", None)
    return replace(standing, **changes)
