"""Which job starts on which card, and why the others wait: places by earliest end.

The highest priority is first. Within a priority the longest is first, and jobs of unknown length
count as of the median length, in order of submission. Each goes to the card on which it is expected
to end first; so a job may wait for a faster card while a slower one is idle. Two jobs share a card
only where both say so, and jobs of lower priority make room only for one that says so. A team gets
all of its cards at the same time; until then none of them goes to a job that comes after it, but
for one that is known to end before. How long a job takes follows from what was measured of it, and
of jobs alike. Pure. Does not start or end one.
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

#: Work of a job, in seconds at speed 1, where no length is known: only ratios of cards matter then.
_UNKNOWN_S: Final = 3600.0

#: A job that shares a card gets what was measured of it and this share more, or `_RESERVE_BYTES` if
#: that is more: an allocator fragments, and the next long sequence takes more than the last.
_RESERVE: Final = 0.10
_RESERVE_BYTES: Final = 256 * MIB
#: What it takes until a job has saved and left its card, where it is asked to.
_SAVE_S: Final = 15.0
#: More than two on a card are each slowed by all the others.
_MOST_ON_CARD: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A job that may start now, as far as places go."""

    job: Job
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What remains of it, by the name of a card; on other cards it follows from their speeds.
    Empty: unknown.
    """
    measured_bytes: int | None = None
    """The most that it, or a job alike, took so far."""
    least_room_bytes: int | None = None
    """A card with less room is not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A job that has a place on a card, or gets it now."""

    job: str
    card: str
    """As of `Standing.last_card`."""
    budget_bytes: int
    """All of the card's room for a job that is alone there."""
    alone: bool = True
    """Whether no other job may join it."""
    ends_at_s: float | None = None
    """As expected. `None`: unknown; then as much is to come as of a job of unknown length, or as
    much as there was if that is more. Without that, a job would wait for it beside a free card.
    """
    ran_s: float = 0.0
    priority: int = 0
    yields: bool = False
    """Whether it can save, and give the card to a job of higher priority."""
    leaves: bool = False
    """Whether it does so already."""

    @property
    def cards(self) -> list[str]:
        """Their names."""
        return self.card.split(JOINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What starts now, and when and why the rest starts later."""

    starts: tuple[Place, ...]
    """Their ends are guesses where the length is unknown."""
    recalls: Mapping[str, str]
    """Jobs that are to make room now, each with the one that gets it."""
    reasons: Mapping[str, str]
    """Why it waits, of each candidate that does not start now."""
    expected_start_s: Mapping[str, float]
    """When it is to start, of each of these that an open card can hold."""


@dataclass(slots=True)
class _Line:
    """An open card, the jobs that have it, and those that wait for it."""

    card: Card
    there: list[Place]
    free_s: float
    """When all that have it or wait for it have ended, as expected."""
    waiting: int = 0
    kept_from_s: float = math.inf
    """When the first of those that wait is expected to begin."""


@dataclass(frozen=True, slots=True)
class _Row:
    """Open cards that a job takes at a time: one, or all of a team."""

    card: Card
    lines: tuple[_Line, ...]

    @property
    def there(self) -> list[Place]:
        return list({place.job: place for line in self.lines for place in line.there}.values())

    @property
    def free_s(self) -> float:
        return max(line.free_s for line in self.lines)

    @property
    def waiting(self) -> int:
        return max(line.waiting for line in self.lines)

    @property
    def kept_from_s(self) -> float:
        return min(line.kept_from_s for line in self.lines)


def candidates(
    standings: Iterable[Standing], in_line: Iterable[Standing], cards: Sequence[Card]
) -> list[Candidate]:
    """Return jobs in line with what is known of them; `standings` are all jobs of the queue, in
    order of submission.

    The speed of a job is its own, on other cards that of a job alike, and where there is none that
    of a member of its sweep.
    """
    # Steps per second of a job that is alone, by likeness or sweep and by the title of a card, of
    # the first of these jobs that was measured; and the most that one of jobs alike took.
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


def place_of(standing: Standing, seen: AttemptStatus | None, now_s: float) -> Place:
    """Return the place of a job on a card, of whose attempt this is seen."""
    leaves = standing.recalled_to is not None
    eta_s = None if seen is None else seen.eta_s
    may_save = standing.job.parks or standing.job.command is None
    return Place(
        job=standing.job.name,
        card=standing.card or "",
        budget_bytes=standing.budget_bytes or 0,
        alone=standing.alone,
        ends_at_s=None if eta_s is None else now_s + eta_s,
        ran_s=max(0.0, now_s - standing.since_s),
        priority=standing.job.priority,
        yields=seen is not None and may_save and not leaves,
        leaves=leaves,
    )


def plan(
    candidates: Sequence[Candidate],
    cards: Sequence[Card],
    taken: Sequence[Place],
    now_s: float,
) -> Plan:
    """Return which candidates start now, and why and until when the others wait.

    Candidates are in the order of submission, which decides ties. `taken` are the places of jobs on
    cards. A job of unknown length counts as of the median of the known ones.
    """
    works_s = [_work_s(each, cards) for each in candidates]
    known_s = [work_s for work_s in works_s if work_s is not None]
    typical_s = statistics.median(known_s) if known_s else _UNKNOWN_S
    lines = {
        card.name: _line(card, [it for it in taken if card.name in it.cards], now_s, typical_s)
        for card in cards
        if card.closed is None
    }
    able: list[tuple[Candidate, list[tuple[float, _Row]]]] = []
    reasons: dict[str, str] = {}
    for candidate, work_s in zip(candidates, works_s, strict=True):
        rows = [
            _Row(card, tuple(lines[name] for name in card.name.split(JOINT)))
            for card in choices(candidate.job, cards)
            if card.closed is None and _fits(candidate, card)
        ]
        if rows:
            seconds, length_s = candidate.seconds, typical_s if work_s is None else work_s
            lengths_s = [seconds.get(row.card.name, length_s / row.card.speed) for row in rows]
            able.append((candidate, [*zip(lengths_s, rows, strict=True)]))
        else:
            reasons[candidate.job.name] = _why_no_card(candidate, cards)
    able.sort(key=lambda it: (-it[0].job.priority, -min(seconds for seconds, _ in it[1])))

    starts: list[Place] = []
    recalls: dict[str, str] = {}
    waits: list[tuple[Candidate, _Row, int, float]] = []
    for candidate, lengths in able:
        # Of two cards on which it ends at the same time, the one that is free.
        took_s, row = min(lengths, key=lambda it: (it[1].free_s + it[0], len(it[1].there)))
        start_s = row.free_s
        if candidate.job.preempt and (cleared := _cleared(candidate, lengths, now_s)):
            end_s, took, at = cleared
            if end_s < start_s + took_s:
                took_s, row = took, at
                start_s = end_s - took_s
                recalls.update((it.job, candidate.job.name) for it in row.there if not it.leaves)
        gap = _gap(candidate, lengths, now_s)
        end_s, row = gap or (start_s + took_s, row)
        place = _place(candidate, row, end_s) if gap or not row.waiting else None
        if place is None:
            waits.append((candidate, row, row.waiting, start_s))
        else:
            starts.append(place)
        for line in row.lines:
            if place is None:
                line.waiting += 1
                line.kept_from_s = min(line.kept_from_s, start_s)
            else:
                line.there.append(place)
            line.free_s = line.free_s if gap else end_s

    free = [line.card for line in lines.values() if not line.there and not line.waiting]
    for candidate, row, ahead, start_s in waits:
        others = (f"; {_why_not(candidate, card)}" for card in free)
        reasons[candidate.job.name] = _why_taken(row, ahead, start_s - now_s) + "".join(others)
    expected = {candidate.job.name: start_s for candidate, _, _, start_s in waits}
    return Plan(starts=tuple(starts), recalls=recalls, reasons=reasons, expected_start_s=expected)


def never_fits(job: Job, least_bytes: int | None, cards: Sequence[Card]) -> str | None:
    """Return why no card here can ever hold a job, with the sum, or `None`.

    `least_bytes` is what its smallest step takes, as predicted. Closed cards count: they open
    again.
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
    """Return the cards of which a job takes one: for a team, all of its cards as if they were one,
    of which one that is closed closes all.
    """
    if not job.is_team:
        return cards
    mine = [card for card in cards if suits(job, card)]
    return (joint(job, mine),) if len(mine) > 1 else ()


def joint(job: Job, cards: Sequence[Card]) -> Card:
    """Return the cards of a team as if they were one.

    Members that divide the samples of a step each hold the model. Those that divide the model hold
    it together and compute in turns; the first card is that of the member which leads.
    """
    rooms_bytes = [card.room_bytes for card in cards]
    room_bytes, speed = min(rooms_bytes), sum(card.speed for card in cards)
    if job.is_divided:
        cards = sorted(cards, key=lambda card: -card.room_bytes)  # as `core.placement` has it
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
    """Return whether a job may run on a card, whatever memory it takes."""
    if job.nodes and card.node not in job.nodes and card.name not in job.nodes:
        return False
    return job.card is None or plain(job.card) in plain(card.title)


def plain(card: str) -> str:
    """Return the name of a card without what people leave out or add."""
    return re.sub(r"[^a-z0-9]", "", card.lower())


def _work_s(candidate: Candidate, cards: Sequence[Card]) -> float | None:
    """Return the work of a candidate in seconds at speed 1: the mean of what its cards say."""
    seconds = candidate.seconds
    taken = choices(candidate.job, cards)
    works = [seconds[card.name] * card.speed for card in taken if card.name in seconds]
    return sum(works) / len(works) if works else None


def _line(card: Card, there: list[Place], now_s: float, typical_s: float) -> _Line:
    ends_s = (
        now_s + max(typical_s / card.speed, place.ran_s)
        if place.ends_at_s is None
        else place.ends_at_s
        for place in there
    )
    return _Line(card, there, max([now_s, *ends_s]))


def _cleared(
    candidate: Candidate, lengths: Sequence[tuple[float, _Row]], now_s: float
) -> tuple[float, float, _Row] | None:
    """Return when a candidate would end, its seconds, and the card, if jobs of lower priority leave
    that card now; `None`: it can begin without that, or no card can be cleared.
    """
    found = []
    for took_s, row in lengths:
        if row.waiting:
            continue
        if _place(candidate, row, now_s) is not None:
            return None
        if all(
            it.priority < candidate.job.priority and (it.yields or it.leaves) for it in row.there
        ):
            wait_s = 0.0 if all(it.leaves for it in row.there) else _SAVE_S
            found.append((now_s + wait_s + took_s, took_s, row))
    return min(found, key=lambda it: it[0], default=None)


def _gap(
    candidate: Candidate, lengths: Sequence[tuple[float, _Row]], now_s: float
) -> tuple[float, _Row] | None:
    """Return a card that is idle because a team waits for another one, where a candidate is known
    to end before the team begins, and when it does.
    """
    for took_s, row in lengths:
        end_s = now_s + took_s
        is_known = row.card.name in candidate.seconds
        if is_known and row.waiting and not row.there and end_s <= row.kept_from_s:
            return end_s, row
    return None


def _place(candidate: Candidate, row: _Row, end_s: float) -> Place | None:
    """Return the place of a candidate that begins on a card now; `None`: it cannot yet."""
    card, there = row.card, row.there
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


def _why_taken(row: _Row, ahead: int, left_s: float) -> str:
    """Return who has a card or goes first on it, and for how long where that is known."""
    if ahead:
        return f"{ahead} {'job goes' if ahead == 1 else 'jobs go'} first on {row.card.name}"
    reason = f"{row.card.name} runs {' and '.join(place.job for place in row.there)}"
    if left_s > 0 and all(place.ends_at_s is not None for place in row.there):
        rounded_s = round(left_s) if left_s < 60 else round(left_s / 60) * 60
        reason += f" for about {format_duration(rounded_s)} more"
    return reason


def _why_not(candidate: Candidate, card: Card) -> str:
    """Return why a candidate does not start on a card that is free."""
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
