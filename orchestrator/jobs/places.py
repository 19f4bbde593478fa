"""Chooses which job starts on which card, by earliest end, and says why the others wait.

The highest priority is first, then the longest job, then the order of submission. A job of unknown
length counts with the median length. Each job gets the card on which it is expected to end first,
so it may wait for a fast card while a slow one is idle. Two jobs share a card only if both have
`pack`, and jobs of lower priority make room only for a job with `preempt`. A team gets all of its
cards at the same time; until then, one of them goes to a later job only if that job is known to end
before the team begins. Lengths follow from measured speeds of a job and of similar ones. Pure;
starts and ends no job.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from orchestrator.config.duration import format_duration
from orchestrator.jobs.model import JOINT, AttemptStatus, Card, Job, Standing
from workers.units import GIB, MIB

#: Work of a job in seconds at speed 1, if no length is known: then only ratios of cards matter.
_UNKNOWN_S: Final = 3600.0

#: The budget of a job that shares a card is its measured peak plus this share of it, or plus
#: `_RESERVE_BYTES` if that is more: allocators fragment, and a longer sequence needs more memory.
_RESERVE: Final = 0.10
_RESERVE_BYTES: Final = 256 * MIB
#: Expected time that a recalled job needs to save and leave its card.
_SAVE_S: Final = 15.0
#: Most jobs on one card: each further one slows all of them down.
_MOST_ON_CARD: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A job that may start as soon as it has a place."""

    job: Job
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Remaining seconds, keyed by card name; for other cards they follow from the cards' speeds.
    Empty: unknown.
    """
    measured_bytes: int | None = None
    """The highest memory use so far of the job, or else of a similar job."""
    least_room_bytes: int | None = None
    """Cards with less room are not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a job on a card, now or from now on."""

    job: str
    card: str
    """Card names as in `Standing.last_card`."""
    budget_bytes: int
    """Memory for the job; the whole room of the card if the job is alone there."""
    alone: bool = True
    """Whether no other job may join it."""
    ends_at_s: float | None = None
    """Expected end. `None`: unknown. Then the remaining time counts as that of a job of unknown
    length, or as long as the job has run if that is more, so others do not wait for a near end.
    """
    ran_s: float = 0.0
    priority: int = 0
    yields: bool = False
    """Whether the job can save and give its card to a job of higher priority."""
    leaves: bool = False
    """Whether the job has been recalled and is about to leave."""

    @property
    def cards(self) -> list[str]:
        """Names of the cards: several for a team."""
        return self.card.split(JOINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which jobs start now, and when and why the others start later."""

    starts: tuple[Place, ...]
    """Jobs that start now; the end is a guess if the length of a job is unknown."""
    recalls: Mapping[str, str]
    """Keyed by job that must leave its card now: the job that gets the room."""
    reasons: Mapping[str, str]
    """Keyed by waiting candidate: why it waits."""
    expected_start_s: Mapping[str, float]
    """Keyed by waiting candidate that an open card can hold: its expected start."""


@dataclass(slots=True)
class _CardQueue:
    """An open card, the jobs that have it, and the jobs that wait for it."""

    card: Card
    there: list[Place]
    free_s: float
    """Expected time at which all jobs that have the card or wait for it have ended."""
    waiting: int = 0
    kept_from_s: float = math.inf
    """Expected start of the first job that waits."""


@dataclass(frozen=True, slots=True)
class _Option:
    """The open cards that a job would hold: one card, or all cards of a team."""

    card: Card
    queues: tuple[_CardQueue, ...]

    @property
    def there(self) -> list[Place]:
        return list({place.job: place for queue in self.queues for place in queue.there}.values())

    @property
    def free_s(self) -> float:
        return max(queue.free_s for queue in self.queues)

    @property
    def waiting(self) -> int:
        return max(queue.waiting for queue in self.queues)

    @property
    def kept_from_s(self) -> float:
        return min(queue.kept_from_s for queue in self.queues)


def candidates(
    standings: Iterable[Standing], in_line: Iterable[Standing], cards: Sequence[Card]
) -> list[Candidate]:
    """Return the jobs in line with their expected length and memory.

    `standings` are all jobs of the queue in order of submission. The speed of a job on a card is
    its own measurement, or else that of a job with equal `likeness`, or else of its sweep.
    """
    # Steps per second of jobs that were alone, keyed by likeness or sweep and by card title; the
    # earliest submitted job counts. The peak is the highest of all jobs of equal likeness.
    speeds, peaks_bytes = defaultdict[str, dict[str, float]](dict), defaultdict[str, int](int)
    for standing in standings:
        job, peak_bytes = standing.job, standing.peak_bytes or 0
        if not (standing.speeds or peak_bytes):
            continue
        for key in filter(None, (job.likeness, job.sweep)):
            speeds[key] = {**standing.speeds, **speeds[key]}
        if job.likeness is not None:
            peaks_bytes[job.likeness] = max(peak_bytes, peaks_bytes[job.likeness])
    found = []
    for standing in in_line:
        job, alike, seconds = standing.job, standing.job.likeness or "", dict[str, float]()
        if job.steps is not None and speeds:
            known = {**(speeds[alike] or speeds[job.sweep or ""]), **standing.speeds}
            left = max(0, job.steps - (standing.step or 0))
            seconds = {
                card.name: left / speed
                for card in choices(job, cards)
                if (speed := known.get(card.title))
            }
        found.append(
            Candidate(
                job=job,
                seconds=seconds,
                measured_bytes=standing.peak_bytes or peaks_bytes[alike] or None,
                least_room_bytes=standing.least_room_bytes,
            )
        )
    return found


def place_of(standing: Standing, status: AttemptStatus | None, now_s: float) -> Place:
    """Return the place of a job on a card; `status` is the observed status of its attempt."""
    leaves = standing.recalled_to is not None
    eta_s = None if status is None else status.eta_s
    may_save = standing.job.parks or standing.job.command is None
    return Place(
        job=standing.job.name,
        card=standing.card or "",
        budget_bytes=standing.budget_bytes or 0,
        alone=standing.alone,
        ends_at_s=None if eta_s is None else now_s + eta_s,
        ran_s=max(0.0, now_s - standing.since_s),
        priority=standing.job.priority,
        yields=status is not None and may_save and not leaves,
        leaves=leaves,
    )


def plan(
    candidates: Sequence[Candidate],
    cards: Sequence[Card],
    taken: Sequence[Place],
    now_s: float,
) -> Plan:
    """Return which candidates start now, and why and until when the others wait.

    Candidates are in order of submission, which decides ties. `taken` are the places of jobs on
    cards. A candidate of unknown length counts with the median of the known lengths.
    """
    works_s = [_work_s(each, cards) for each in candidates]
    known_s = [work_s for work_s in works_s if work_s is not None]
    typical_s = statistics.median(known_s) if known_s else _UNKNOWN_S
    queues = {
        card.name: _card_queue(
            card, [it for it in taken if card.name in it.cards], now_s, typical_s
        )
        for card in cards
        if card.closed is None
    }
    able: list[tuple[Candidate, list[tuple[float, _Option]]]] = []
    reasons: dict[str, str] = {}
    for candidate, work_s in zip(candidates, works_s, strict=True):
        options = [
            _Option(card, tuple(queues[name] for name in card.name.split(JOINT)))
            for card in choices(candidate.job, cards)
            if card.closed is None and _fits(candidate, card)
        ]
        if options:
            seconds, length_s = candidate.seconds, typical_s if work_s is None else work_s
            lengths_s = [
                seconds.get(option.card.name, length_s / option.card.speed) for option in options
            ]
            able.append((candidate, [*zip(lengths_s, options, strict=True)]))
        else:
            reasons[candidate.job.name] = _why_no_card(candidate, cards)
    able.sort(key=lambda it: (-it[0].job.priority, -min(seconds for seconds, _ in it[1])))

    starts: list[Place] = []
    recalls: dict[str, str] = {}
    waits: list[tuple[Candidate, _Option, int, float]] = []
    for candidate, lengths in able:
        # If it would end at the same time on two cards, a free card is preferred.
        took_s, option = min(lengths, key=lambda it: (it[1].free_s + it[0], len(it[1].there)))
        start_s = option.free_s
        if candidate.job.preempt and (cleared := _cleared(candidate, lengths, now_s)):
            end_s, took, at = cleared
            if end_s < start_s + took_s:
                took_s, option = took, at
                start_s = end_s - took_s
                recalls.update((it.job, candidate.job.name) for it in option.there if not it.leaves)
        gap = _gap(candidate, lengths, now_s)
        end_s, option = gap or (start_s + took_s, option)
        place = _place(candidate, option, end_s) if gap or not option.waiting else None
        if place is None:
            waits.append((candidate, option, option.waiting, start_s))
        else:
            starts.append(place)
        for queue in option.queues:
            if place is None:
                queue.waiting += 1
                queue.kept_from_s = min(queue.kept_from_s, start_s)
            else:
                queue.there.append(place)
            queue.free_s = queue.free_s if gap else end_s

    free = [queue.card for queue in queues.values() if not queue.there and not queue.waiting]
    for candidate, option, ahead, start_s in waits:
        others = (f"; {_why_not(candidate, card)}" for card in free)
        reasons[candidate.job.name] = _why_taken(option, ahead, start_s - now_s) + "".join(others)
    expected = {candidate.job.name: start_s for candidate, _, _, start_s in waits}
    return Plan(starts=tuple(starts), recalls=recalls, reasons=reasons, expected_start_s=expected)


def never_fits(job: Job, least_bytes: int | None, cards: Sequence[Card]) -> str | None:
    """Return why no card here can ever hold a job, with the figures; `None`: a card can.

    `least_bytes` is the predicted memory of its smallest step. Closed cards count: they open again.
    """
    allowed = [card for card in choices(job, cards) if suits(job, card)]
    if not allowed:
        title = f"a card called {job.card!r}" if job.card is not None else "a card"
        where = f" on {' or '.join(job.nodes)}" if job.nodes else ""
        here = ", ".join(f"{card.title} ({card.name})" for card in cards) or "none"
        return f"asks for {title}{where}; the cards here: {here}"

    need_bytes = max(least_bytes or 0, job.memory_bytes or 0)
    largest = max(allowed, key=lambda card: card.room_bytes)
    if need_bytes <= largest.room_bytes:
        return None
    which = "largest card here" if len(allowed) == len(cards) else "largest card that it may use"
    which = "smallest card of its team" if job.is_team else which
    which, gives = ("cards of its team", "give") if job.is_divided else (which, "gives")
    may_divide = job.is_team and not job.is_divided and len(largest.name.split(JOINT)) == 2
    return (
        f"needs at least {_gib(need_bytes, math.ceil)}; the {which} {gives} "
        f"{_gib(largest.room_bytes, math.floor)} ({largest.name})"
        + ("; with train.split: layers both would hold it together" if may_divide else "")
    )


def choices(job: Job, cards: Sequence[Card]) -> Sequence[Card]:
    """Return the cards from which a job gets one. A team has one choice: its cards as one `Card`,
    which is closed if any of them is.
    """
    if not job.is_team:
        return cards
    mine = [card for card in cards if suits(job, card)]
    return (joint(job, mine),) if len(mine) > 1 else ()


def joint(job: Job, cards: Sequence[Card]) -> Card:
    """Return the cards of a team as one `Card`.

    Members that divide the samples of a step each hold the whole model. Members that divide the
    model hold it together and compute in turns; the first card is that of the leader.
    """
    rooms_bytes = [card.room_bytes for card in cards]
    room_bytes, speed = min(rooms_bytes), sum(card.speed for card in cards)
    if job.is_divided:
        cards = sorted(cards, key=lambda card: -card.room_bytes)  # as in `core.placement`
        room_bytes, speed = sum(rooms_bytes), speed / len(cards)
    return replace(
        cards[0],
        name=JOINT.join(card.name for card in cards),
        title=" + ".join(card.title for card in cards),
        room_bytes=room_bytes,
        speed=speed,
        closed=next((card.closed for card in cards if card.closed is not None), None),
    )


def suits(job: Job, card: Card) -> bool:
    """Return whether a job may run on a card, apart from memory."""
    if job.nodes and card.node not in job.nodes and card.name not in job.nodes:
        return False
    return job.card is None or plain(job.card) in plain(card.title)


def plain(card: str) -> str:
    """Return a card name in lower case, with only letters and digits, for comparison."""
    return re.sub(r"[^a-z0-9]", "", card.lower())


def _work_s(candidate: Candidate, cards: Sequence[Card]) -> float | None:
    """Return the work of a candidate in seconds at speed 1: the mean over its measured cards."""
    seconds = candidate.seconds
    taken = choices(candidate.job, cards)
    works = [seconds[card.name] * card.speed for card in taken if card.name in seconds]
    return sum(works) / len(works) if works else None


def _card_queue(card: Card, there: list[Place], now_s: float, typical_s: float) -> _CardQueue:
    ends_s = (
        now_s + max(typical_s / card.speed, place.ran_s)
        if place.ends_at_s is None
        else place.ends_at_s
        for place in there
    )
    return _CardQueue(card, there, max([now_s, *ends_s]))


def _cleared(
    candidate: Candidate, lengths: Sequence[tuple[float, _Option]], now_s: float
) -> tuple[float, float, _Option] | None:
    """Return the earliest end of a candidate if jobs of lower priority leave a card for it, with
    its length and the card. `None`: it can begin without that, or no card can be cleared.
    """
    found = []
    for took_s, option in lengths:
        if option.waiting:
            continue
        if _place(candidate, option, now_s) is not None:
            return None
        if all(
            it.priority < candidate.job.priority and (it.yields or it.leaves) for it in option.there
        ):
            wait_s = 0.0 if all(it.leaves for it in option.there) else _SAVE_S
            found.append((now_s + wait_s + took_s, took_s, option))
    return min(found, key=lambda it: it[0], default=None)


def _gap(
    candidate: Candidate, lengths: Sequence[tuple[float, _Option]], now_s: float
) -> tuple[float, _Option] | None:
    """Return the end of a candidate on a card that is idle because a team waits for another card,
    and that card. `None`: the candidate is not known to end before the team begins.
    """
    for took_s, option in lengths:
        end_s = now_s + took_s
        is_known = option.card.name in candidate.seconds
        if is_known and option.waiting and not option.there and end_s <= option.kept_from_s:
            return end_s, option
    return None


def _place(candidate: Candidate, option: _Option, end_s: float) -> Place | None:
    """Return the place of a candidate that begins on a card now; `None`: it cannot begin yet."""
    card, there = option.card, option.there
    taken_bytes = candidate.measured_bytes or candidate.job.memory_bytes
    budget_bytes, alone = card.room_bytes, True
    if candidate.job.pack and taken_bytes is not None:
        share = taken_bytes + max(_RESERVE_BYTES, math.ceil(taken_bytes * _RESERVE))
        if (candidate.least_room_bytes or 0) <= share <= card.room_bytes:
            budget_bytes, alone = share, False
    free_bytes = card.room_bytes - sum(place.budget_bytes for place in there)
    may_join = not alone and not any(place.alone for place in there)
    if there and not (may_join and len(there) < _MOST_ON_CARD and budget_bytes <= free_bytes):
        return None
    return Place(
        job=candidate.job.name,
        card=card.name,
        budget_bytes=budget_bytes,
        alone=alone,
        ends_at_s=end_s,
        priority=candidate.job.priority,
    )


def _needed(candidate: Candidate) -> int:
    return max(candidate.job.memory_bytes or 0, candidate.least_room_bytes or 0)


def _fits(candidate: Candidate, card: Card) -> bool:
    return _needed(candidate) <= card.room_bytes and suits(candidate.job, card)


def _why_taken(option: _Option, ahead: int, left_s: float) -> str:
    """Return which jobs have a card or go first on it, and for how long if that is known."""
    if ahead:
        return f"{ahead} {'job goes' if ahead == 1 else 'jobs go'} first on {option.card.name}"
    reason = f"{option.card.name} runs {' and '.join(place.job for place in option.there)}"
    if left_s > 0 and all(place.ends_at_s is not None for place in option.there):
        rounded_s = round(left_s) if left_s < 60 else round(left_s / 60) * 60
        reason += f" for about {format_duration(rounded_s)} more"
    return reason


def _why_not(candidate: Candidate, card: Card) -> str:
    """Return why a candidate does not start on a free card."""
    if not suits(candidate.job, card):
        return f"{card.name} is free, but it may not run there"
    if not _fits(candidate, card):
        gives, need = _gib(card.room_bytes, math.floor), _gib(_needed(candidate), math.ceil)
        return f"{card.name} is free, but gives {gives} of the {need} that it needs"
    return f"{card.name} is free, but it would end later there"


def _why_no_card(candidate: Candidate, cards: Sequence[Card]) -> str:
    closed = [card for card in choices(candidate.job, cards) if _fits(candidate, card)]
    return never_fits(candidate.job, _needed(candidate), cards) or "; ".join(
        f"{card.name} is closed: {card.closed}" for card in closed
    )


def _gib(count_bytes: int, rounded: Callable[[float], int]) -> str:
    return f"{rounded(count_bytes / GIB * 10) / 10:.1f} GiB"
