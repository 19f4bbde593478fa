"""What follows from what is seen of one attempt on a card: its end, a recall, a milestone, a speed.

Pure. Does not look at jobs without an attempt, and does not start any (`queue.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from orchestrator.jobs import milestones, places
from orchestrator.jobs.index import Reach
from orchestrator.jobs.lifecycle import TAKEN_S, is_better
from orchestrator.jobs.model import (
    AttemptEnded,
    AttemptRecalled,
    AttemptStatus,
    Card,
    JobState,
    MilestoneReached,
    Record,
    SpeedMeasured,
    Standing,
    World,
)
from workers.units import GIB

#: A speed is recorded again when it differs by so much, a better value of the metric so often.
_SPEED_CHANGE, _BEST_EVERY_S = 0.2, 60.0


def seen_of(standing: Standing, world: World) -> AttemptStatus | None:
    """Return what is seen of the present attempt of a job."""
    seen = world.seen.get(standing.job.name)
    return seen if seen is not None and seen.attempt == standing.attempt else None


def end_of(seen: AttemptStatus, now_s: float) -> AttemptEnded | None:
    """Return how an attempt ended, if it has: what both have of it is called alike."""
    if seen.cause is None and not (seen.is_at_rest or seen.node_lost):
        return None
    names = {each.name for each in fields(AttemptEnded)} - {"at_s"}
    return AttemptEnded(at_s=now_s, **{name: getattr(seen, name) for name in names})


def recall_of(standing: Standing, seen: AttemptStatus, world: World) -> AttemptRecalled | None:
    """Return the recall of an attempt that is not to go on where it is."""
    job, card = standing.job, _card(world.cards, standing.card)
    if not is_in_hours(job.hours, world.minute_of_day):
        return recalled(standing, world, JobState.PARKED, hours_in_words(job.hours))
    if seen.taken is not None:
        return recalled(standing, world, JobState.PARKED, seen.taken, wait_s=TAKEN_S)
    if card is None or card.closed is not None:
        why = f"{standing.card} is not there" if card is None else card.closed
        return recalled(standing, world, JobState.PARKED, why or "")
    if not seen.has_no_room:
        return None
    budget = standing.budget_bytes or 0
    why = f"not even its smallest step fits in {budget / GIB:.1f} GiB of {standing.card}"
    if any(places.suits(job, each) and each.room_bytes > budget for each in world.cards):
        return recalled(standing, world, JobState.QUEUED, why, least_room_bytes=budget + 1)
    why += ", and no card here has more"
    return recalled(standing, world, JobState.PARKED, why, least_room_bytes=budget)


def recalled(
    standing: Standing, world: World, to: JobState, reason: str, **more: int
) -> AttemptRecalled:
    """Return the record that has the present attempt of a job save and end, with `more` of it."""
    job, attempt = standing.job.name, standing.attempt
    return AttemptRecalled(at_s=world.now_s, job=job, attempt=attempt, to=to, reason=reason, **more)


def milestone_of(
    standing: Standing, seen: AttemptStatus, world: World, reached: list[Reach]
) -> list[Record]:
    """Return the next milestone of a sweep's member once it is reached, and the decision about it.

    `reached` is of the sweep; the new one is added to it.
    """
    job, rule, value = standing.job, standing.job.milestones, seen.value
    milestone = _milestone(standing, seen.step)
    if rule is None or milestone is None or value is None:
        return []
    reached.append((job.name, milestone, value))
    record = MilestoneReached(at_s=world.now_s, job=job.name, milestone=milestone, value=value)
    if milestones.goes_on(rule, reached, job.name, milestone):
        return [record]
    why = f"{rule.metric} {value:.4g} at step {milestone}: others go first"
    return [record, recalled(standing, world, JobState.PAUSED, why)]


def measured(standing: Standing, seen: AttemptStatus, world: World) -> list[Record]:
    """Return the speed and the best value of an attempt, where they are worth a record.

    On a card that it may share its speed is that of both.
    """
    card, speed = _card(world.cards, standing.card), seen.steps_per_s
    if card is None or speed is None or world.now_s < standing.measured_at_s + _BEST_EVERY_S:
        return []
    known = standing.speeds.get(card.title)
    is_known = known is not None and abs(speed - known) <= _SPEED_CHANGE * known
    is_news = standing.alone and not is_known
    has_better = seen.value is not None and is_better(standing, seen.value)
    if not is_news and not has_better:
        return []
    return [
        SpeedMeasured(
            at_s=world.now_s,
            job=standing.job.name,
            card_title=card.title,
            steps_per_s=speed if standing.alone else None,
            best=seen.value if has_better else None,
            best_step=seen.step if has_better else None,
        )
    ]


def is_in_hours(hours: tuple[int, int] | None, minute: int) -> bool:
    """Return whether a minute of the day is within hours, which may cross midnight."""
    if hours is None:
        return True
    start, end = hours
    return start <= minute < end if start < end else minute >= start or minute < end


def hours_in_words(hours: tuple[int, int] | None) -> str:
    """Return hours such as `hours 22:00-07:00`."""
    start, end = hours or (0, 0)
    return f"hours {start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}"


def _card(cards: Sequence[Card], name: str | None) -> Card | None:
    return next((card for card in cards if card.name == name), None)


def _milestone(standing: Standing, step: int | None) -> int | None:
    """Return the first milestone that a job has not passed, if it has reached it by now."""
    rule, steps = standing.job.milestones, standing.job.steps
    ahead = milestones.milestones_of(rule, steps) if rule is not None else ()
    next_ = next((each for each in ahead if each > standing.milestone), None)
    return next_ if next_ is not None and step is not None and step >= next_ else None
