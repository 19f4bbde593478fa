"""What follows from what is seen of one attempt on a card: its end, a recall, a milestone, a speed.

Pure. Does not look at jobs without an attempt, and does not start any (`queue.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from orchestrator.jobs import milestones, packing, placement
from orchestrator.jobs.index import Aside, Reach
from orchestrator.jobs.lifecycle import is_better
from orchestrator.jobs.model import (
    AttemptEnded,
    Card,
    JobState,
    Kind,
    Measured,
    Milestones,
    Packed,
    Reached,
    Recalled,
    Record,
    Rested,
    Seen,
    Standing,
    World,
)
from workers.units import GIB

#: A speed is recorded again when it differs by so much, a better value of the metric so often.
_SPEED_CHANGE, _BEST_EVERY_S = 0.2, 60.0
#: What a move is assumed to cost: a checkpoint of gpt2-small, 1.5 GB, over 1 GbE, saved in 10 s,
#: sent in 15 s, loaded in 15 s. It must save so many times that.
_MOVE_S, _MOVE_MARGIN = 40.0, 3.0
#: A job that found its card taken by other programs lets those go first that may need less.
TAKEN_S = 600


def seen_of(standing: Standing, world: World) -> Seen | None:
    """Return what is seen of the present attempt of a job."""
    seen = world.seen.get(standing.job.name)
    return seen if seen is not None and seen.attempt == standing.attempt else None


def end_of(seen: Seen, now_s: float) -> AttemptEnded | Rested | None:
    """Return how an attempt ended, if it has: what both have of it is called alike."""
    kind = Rested if seen.cause is None else AttemptEnded
    if kind is Rested and not (seen.is_at_rest or seen.node_lost):
        return None
    names = {each.name for each in fields(kind)} - {"at_s"}
    return kind(at_s=now_s, **{name: getattr(seen, name) for name in names})


def recall_of(standing: Standing, seen: Seen, world: World) -> Recalled | None:
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
    if any(placement.suits(job, each) and each.room_bytes > budget for each in world.cards):
        return recalled(standing, world, JobState.QUEUED, why, least_room_bytes=budget + 1)
    why += ", and no card here has more"
    return recalled(standing, world, JobState.PARKED, why, least_room_bytes=budget)


def recalled(standing: Standing, world: World, to: JobState, reason: str, **more: int) -> Recalled:
    """Return the record that has the present attempt of a job save and end, with `more` of it."""
    job, attempt = standing.job.name, standing.attempt
    return Recalled(at_s=world.now_s, job=job, attempt=attempt, to=to, reason=reason, **more)


def milestone_of(
    standing: Standing, seen: Seen, world: World, last: int, reached: list[Reach]
) -> list[Record]:
    """Return the next milestone of a sweep's member once it is reached, and the decision about it.

    `last` is the one before. `reached` is of the sweep; the new one is added to it.
    """
    job, rule, value = standing.job, standing.job.milestones, seen.value
    milestone = None if rule is None else _milestone(rule, job.steps, seen.step, last)
    if rule is None or milestone is None or value is None:
        return []
    reached.append((job.name, milestone, value))
    record = Reached(at_s=world.now_s, job=job.name, milestone=milestone, value=value)
    if milestones.goes_on(rule, reached, job.name, milestone):
        return [record]
    why = f"{rule.metric} {value:.4g} at step {milestone}: others go first"
    return [record, recalled(standing, world, JobState.PAUSED, why)]


def measured(standing: Standing, aside: Aside, seen: Seen, world: World) -> list[Record]:
    """Return the speed and the best value of an attempt, where they are worth a record."""
    card, speed = _card(world.cards, standing.card), seen.steps_per_s
    if card is None or speed is None or world.now_s < aside.measured_at_s + _BEST_EVERY_S:
        return []
    known = standing.speeds.get(card.title)
    has_better = seen.value is not None and is_better(standing, seen.value)
    is_known = known is not None and abs(speed - known) <= _SPEED_CHANGE * known
    is_due = standing.alone and card.title not in standing.paces
    pace = packing.pace_of(seen.paces) if is_due else None
    if (is_known or not standing.alone) and pace is None and not has_better:
        return []
    return [
        Measured(
            at_s=world.now_s,
            job=standing.job.name,
            card_title=card.title,
            steps_per_s=speed if standing.alone else None,
            pace=pace,
            best=seen.value if has_better else None,
            best_step=seen.step if has_better else None,
        )
    ]


def move_of(
    standing: Standing, speeds: Mapping[str, float], card: Card, world: World
) -> tuple[float, Recalled] | None:
    """Return the move of a training to a free card, with the seconds that it gains, if it pays.

    `speeds` are those of one that is alone, by the title of a card.
    """
    job, seen, source = standing.job, seen_of(standing, world), _card(world.cards, standing.card)
    if seen is None or source is None or seen.eta_s is None or standing.recalled_to is not None:
        return None
    taken = max(standing.least_room_bytes or 0, standing.peak_bytes or 0, seen.peak_bytes or 0)
    if job.kind is not Kind.TRAIN or not placement.suits(job, card) or card.room_bytes < taken:
        return None
    here, there = source.speed, card.speed
    if source.title in speeds and card.title in speeds:
        here, there = speeds[source.title], speeds[card.title]
        if not standing.alone and seen.steps_per_s is not None:
            here = seen.steps_per_s
    gain_s = seen.eta_s * (1 - here / there)
    if gain_s <= _MOVE_MARGIN * _MOVE_S:
        return None
    why = f"moves to {card.name}, where it ends {gain_s / 60:.0f} min earlier"
    return gain_s, recalled(standing, world, JobState.QUEUED, why)


def trial_of(pair: Sequence[Standing], card: Card, alone: float, world: World) -> list[Record]:
    """Return what a trial of two jobs that share a card has shown, and the recall of the second
    where it does not pay.

    `alone` are the steps per second of one of them that has the card for itself.
    """
    seen = [seen_of(standing, world) for standing in pair]
    if len(pair) != 2 or any(standing.recalled_to for standing in pair):
        return []
    found = packing.judged([() if one is None else one.paces for one in seen], alone)
    if found is None:
        return []
    first, second = pair
    told = Packed(
        at_s=world.now_s,
        job=first.job.name,
        beside=second.job.name,
        card_title=card.title,
        gain=found.gain,
        low=found.low,
    )
    if found.pays:
        return [told]
    why = f"two of its kind do {found.gain:.2f} times the steps of one on {card.name}"
    return [told, recalled(second, world, JobState.QUEUED, why)]


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


def _milestone(rule: Milestones, steps: int | None, step: int | None, last: int) -> int | None:
    """Return the first milestone after `last`, if a job has reached it by now."""
    for milestone in milestones.milestones_of(rule):
        if milestone > last and (steps is None or milestone < steps):
            return milestone if step is not None and step >= milestone else None
    return None
