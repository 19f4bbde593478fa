"""Which job starts on which card, and why the others wait.

Jobs of a higher level are planned first, each level on what those above leave of the cards: nothing
below moves the reserved start of a job above. A level is a job's priority and one more for each
hour that it has waited, so that none starves. Within a level the longest goes first, each job to
the card on which it ends first: 1 % above the optimum on two cards, as measured. So a job may wait
for a faster card while a slower one is idle. Pure; it starts nothing.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from orchestrator.config.duration import format_duration
from orchestrator.jobs.model import Card, Job
from orchestrator.jobs.packing import packed_budgets
from workers.units import GIB

#: A job rises by one level of priority in so many seconds of waiting.
LEVEL_S: Final = 3600.0
#: So many jobs are planned in full; those behind get a rough start only. A night has fewer.
LOOKAHEAD: Final = 200
#: What a job takes at speed 1 when nothing is known of any: only ratios between cards matter.
UNKNOWN_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A job that may start now, as far as placement goes."""

    name: str
    priority: int = 0
    queued_at_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What remains of it, by the name of a card. A card that is missing is scaled from another by
    the cards' speeds; where all are missing, it is as much work as the median of the others.
    """
    memory_bytes: int | None = None
    """What it needs on a card, as the user says."""
    measured_bytes: int | None = None
    """The most that it took so far: what it gets of a card that it shares, with a reserve. `None`:
    `memory_bytes`, and where that is missing too it shares none.
    """
    least_room_bytes: int | None = None
    """A card with less room is not tried."""
    nodes: tuple[str, ...] = ()
    card: str | None = None
    """A part of the card's title."""
    shares: Mapping[str, str] = field(default_factory=dict)
    """The cards that it may share, by name, each with those for which this is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A job that has a place on a card."""

    name: str
    budget_bytes: int
    ends_at_s: float | None = None
    """`None`: not known; then as much as a job of unknown length is still to come, or as much as
    there has been if that is more: without that, a job would wait for it beside a free card.
    """
    ran_s: float = 0.0
    alone: bool = True
    shares: str | None = None
    """With whom it may share the card, as for `Candidate.shares`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A job that starts now."""

    job: str
    card: str
    budget_bytes: int
    """All of the card's room for a job that is alone there."""
    alone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What starts now, and when and why the rest starts later."""

    starts: tuple[Placement, ...]
    reasons: Mapping[str, str]
    """Why it waits, of each candidate that does not start now."""
    expected_start_s: Mapping[str, float]
    """When it is to start, of each of these that an open card can hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledJob:
    """A job in the estimate of a queue."""

    job: str
    card: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The estimate of a queue, from its start at 0."""

    jobs: tuple[ScheduledJob, ...]
    """By start."""
    makespan_s: float
    left: Mapping[str, str]
    """Why it never starts, of each job that does not."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A candidate's planned time on a card."""

    candidate: Candidate
    level: int
    start_s: float
    end_s: float


def plan(
    candidates: Sequence[Candidate],
    cards: Sequence[Card],
    residents: Mapping[str, Sequence[Resident]],
    now_s: float,
) -> Plan:
    """Return which candidates start now, and why and until when the others wait.

    Candidates are in the order of submission, which decides ties. `residents` are by card.
    """
    front, rest = _front(candidates, cards, now_s)
    typical_s = _typical_work(front, cards)
    turns, homeless = _turns(front, cards, residents, now_s, typical_s)
    starts = _starts(turns, cards, residents)

    started = {start.job: start.card for start in starts}
    idle = [
        card
        for card in cards
        if card.name in turns and not residents.get(card.name) and card.name not in started.values()
    ]
    reasons: dict[str, str] = {}
    expected: dict[str, float] = {}
    for name, own in turns.items():
        names = [each.name for each in residents.get(name, ())]
        names += [job for job, card in started.items() if card == name]
        waiting = [turn for turn in own if turn.candidate.name not in started]
        for ahead, turn in enumerate(waiting):
            if ahead:
                reason = f"{ahead} {'job goes' if ahead == 1 else 'jobs go'} first on {name}"
            else:
                reason = f"{name} runs {' and '.join(names)}"
                is_known = all(each.ends_at_s is not None for each in residents.get(name, ()))
                if is_known and turn.start_s > now_s:
                    reason += f" for about {_about(turn.start_s - now_s)} more"
            reason += "".join(f"; {_why_not(turn.candidate, card)}" for card in idle)
            reasons[turn.candidate.name] = reason
            expected[turn.candidate.name] = turn.start_s
    for candidate in homeless:
        reasons[candidate.name] = _why_no_card(candidate, cards)

    # Those behind: as long as the median of the others each, on all open cards together.
    speed = sum(card.speed for card in cards if card.closed is None)
    for place, candidate in enumerate(rest, len(front) - len(starts)):
        reasons[candidate.name] = f"{place} jobs go first"
        if speed:
            expected[candidate.name] = now_s + place * typical_s / speed
    return Plan(starts=starts, reasons=reasons, expected_start_s=expected)


def estimate(
    jobs: Sequence[Candidate], cards: Sequence[Card], after: Mapping[str, Sequence[str]]
) -> Schedule:
    """Return when and where each job would run, by planning in virtual time from 0.

    `after` has the jobs that must have ended before a job may start. Every job is taken to be
    alone on its card, and to take as long as is known; nothing fails.
    """
    waiting = {job.name: set(after.get(job.name, ())) for job in jobs}
    ready = [replace(job, queued_at_s=0.0) for job in jobs if not waiting[job.name]]
    followers: dict[str, list[Candidate]] = {}
    for job in jobs:
        for name in waiting[job.name]:
            followers.setdefault(name, []).append(job)

    typical_s = _typical_work(jobs, cards)
    on_card: dict[str, list[Resident]] = {}
    entries: list[ScheduledJob] = []
    now_s = 0.0
    while True:
        front, _ = _front(ready, cards, now_s)
        turns, _ = _turns(front, cards, on_card, now_s, typical_s)
        for start in _starts(turns, cards, on_card):
            end_s = turns[start.card][0].end_s
            entries.append(ScheduledJob(job=start.job, card=start.card, start_s=now_s, end_s=end_s))
            on_card[start.card] = [
                Resident(name=start.job, budget_bytes=start.budget_bytes, ends_at_s=end_s)
            ]
        started = {there.name for (there,) in on_card.values()}
        ready = [job for job in ready if job.name not in started]
        if not on_card:
            break

        now_s, card = min((there.ends_at_s or 0.0, name) for name, (there,) in on_card.items())
        ended = on_card.pop(card)[0].name
        for job in followers.get(ended, ()):
            waiting[job.name].discard(ended)
            if not waiting[job.name]:
                ready.append(replace(job, queued_at_s=now_s))

    left = {job.name: _why_no_card(job, cards) for job in ready}
    for job in jobs:
        if waiting[job.name]:
            left[job.name] = f"comes after {', '.join(sorted(waiting[job.name]))}, which never ends"
    makespan_s = max((entry.end_s for entry in entries), default=0.0)
    return Schedule(jobs=tuple(entries), makespan_s=makespan_s, left=left)


def never_fits(job: Job | Candidate, least_bytes: int | None, cards: Sequence[Card]) -> str | None:
    """Return why no card here can ever hold a job, with the sum, or `None`.

    `least_bytes` is what its smallest step takes, as predicted. Closed cards count: they open
    again.
    """
    allowed = [card for card in cards if suits(job, card)]
    if not allowed:
        title = f"a card called {job.card!r}" if job.card is not None else "a card"
        where = f" on {' or '.join(job.nodes)}" if job.nodes else ""
        here = ", ".join(f"{card.title} ({card.name})" for card in cards) or "none"
        return f"asks for {title}{where}; the cards here: {here}"

    need_bytes = max(least_bytes or 0, job.memory_bytes or 0)
    largest = max(allowed, key=lambda card: card.room_bytes)
    if need_bytes <= largest.room_bytes:
        return None
    which = "card here" if len(allowed) == len(cards) else "card that it may use"
    return (
        f"needs at least {_gib(need_bytes, math.ceil)}; the largest {which} gives "
        f"{_gib(largest.room_bytes, math.floor)} ({largest.name})"
    )


def _level(candidate: Candidate, now_s: float) -> int:
    waited_s = max(0.0, now_s - candidate.queued_at_s)
    return candidate.priority + int(waited_s / LEVEL_S)


def _front(
    candidates: Sequence[Candidate], cards: Sequence[Card], now_s: float
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the candidates to plan in full, by level and age, and those behind.

    A card that none of the front fits gets the first one behind that does.
    """
    ordered = sorted(candidates, key=lambda each: (-_level(each, now_s), each.queued_at_s))
    front, rest = ordered[:LOOKAHEAD], ordered[LOOKAHEAD:]
    for card in cards if rest else ():
        if card.closed is None and not any(_fits(each, card) for each in front):
            place = next((n for n, each in enumerate(rest) if _fits(each, card)), None)
            if place is not None:
                front.append(rest.pop(place))
    return front, rest


def _turns(
    front: Sequence[Candidate],
    cards: Sequence[Card],
    residents: Mapping[str, Sequence[Resident]],
    now_s: float,
    typical_s: float,
) -> tuple[dict[str, list[_Turn]], list[Candidate]]:
    """Return the turns on each open card, in order, and the candidates that none of them can hold.

    `typical_s` is the work of a job of unknown length, in seconds at speed 1.
    """
    free_s = {}
    for card in cards:
        if card.closed is None:
            ends_s = [
                now_s + max(typical_s / card.speed, each.ran_s)
                if each.ends_at_s is None
                else each.ends_at_s
                for each in residents.get(card.name, ())
            ]
            free_s[card.name] = max([now_s, *ends_s])

    homeless = []
    levels: dict[int, list[tuple[Candidate, dict[str, float]]]] = {}
    for candidate in front:
        works = _works(candidate, cards)
        work_s = statistics.fmean(works) if works else typical_s
        options = {
            card.name: candidate.seconds.get(card.name, work_s / card.speed)
            for card in cards
            if card.closed is None and _fits(candidate, card)
        }
        if options:
            levels.setdefault(_level(candidate, now_s), []).append((candidate, options))
        else:
            homeless.append(candidate)

    turns: dict[str, list[_Turn]] = {name: [] for name in free_s}
    for level, group in levels.items():
        # The longest first: the short ones fill what is uneven at the end.
        group.sort(key=lambda each: -min(each[1].values()))
        for candidate, options in group:
            # Of two that end alike, the card that is free.
            name = min(
                options, key=lambda each: (free_s[each] + options[each], bool(residents.get(each)))
            )
            end_s = free_s[name] + options[name]
            turns[name].append(_Turn(candidate, level, free_s[name], end_s))
            free_s[name] = end_s
    return turns, homeless


def _starts(
    turns: Mapping[str, Sequence[_Turn]],
    cards: Sequence[Card],
    residents: Mapping[str, Sequence[Resident]],
) -> tuple[Placement, ...]:
    """Return what starts now: the first turn of each idle card, and who may share a card.

    A job shares a card with one that runs there packed, or that starts there now. It must be of
    the level that is next there: the two slow each other down, and that would move the reserved
    start of a job above.
    """
    starts: list[Placement] = []
    for card in cards:
        own, there = turns.get(card.name, ()), residents.get(card.name, ())
        if not own or len(there) > 1 or any(each.alone for each in there):
            continue

        first = [] if there else [own[0].candidate]
        shared = there[0].shares if there else own[0].candidate.shares.get(card.name)
        room_bytes = card.room_bytes - sum(each.budget_bytes for each in there)
        group, alone = first, True
        budgets: tuple[int, ...] = (card.room_bytes,)
        for turn in own[len(first) :] if shared is not None else ():
            both = [*first, turn.candidate]
            measured = [each.measured_bytes or each.memory_bytes for each in both]
            shares = packed_budgets(measured, room_bytes)
            if (
                turn.level == own[0].level
                and turn.candidate.shares.get(card.name) == shared
                and shares is not None
                and all(map(_has_room, both, shares))
            ):
                group, budgets, alone = both, shares, False
                break
        starts += [
            Placement(job=each.name, card=card.name, budget_bytes=budget, alone=alone)
            for each, budget in zip(group, budgets, strict=False)
        ]
    return tuple(starts)


def _has_room(candidate: Candidate, budget_bytes: int) -> bool:
    return budget_bytes >= (candidate.least_room_bytes or 0)


def _works(candidate: Candidate, cards: Sequence[Card]) -> list[float]:
    """Return the work of a candidate as each known card has it, in seconds at speed 1."""
    seconds = candidate.seconds
    return [seconds[card.name] * card.speed for card in cards if card.name in seconds]


def _typical_work(candidates: Sequence[Candidate], cards: Sequence[Card]) -> float:
    works = [work_s for candidate in candidates for work_s in _works(candidate, cards)]
    return statistics.median(works) if works else UNKNOWN_S


def suits(job: Job | Candidate, card: Card) -> bool:
    """Return whether a job may run on a card, whatever memory it takes."""
    if job.nodes and card.node not in job.nodes and card.name not in job.nodes:
        return False
    return job.card is None or plain(job.card) in plain(card.title)


def plain(card: str) -> str:
    """Return the name of a card without what people leave out or add."""
    return re.sub(r"[^a-z0-9]", "", card.lower())


def _needed(candidate: Candidate) -> int:
    return max(candidate.memory_bytes or 0, candidate.least_room_bytes or 0)


def _fits(candidate: Candidate, card: Card) -> bool:
    return _needed(candidate) <= card.room_bytes and suits(candidate, card)


def _why_not(candidate: Candidate, card: Card) -> str:
    """Return why a candidate does not start on a card that is free."""
    if not suits(candidate, card):
        return f"{card.name} is free, but it may not run there"
    if not _fits(candidate, card):
        gives, need = _gib(card.room_bytes, math.floor), _gib(_needed(candidate), math.ceil)
        return f"{card.name} is free, but gives {gives} of the {need} that it needs"
    return f"{card.name} is free, but it would end later there"


def _why_no_card(candidate: Candidate, cards: Sequence[Card]) -> str:
    closed = [card for card in cards if _fits(candidate, card)]
    return never_fits(candidate, _needed(candidate), cards) or "; ".join(
        f"{card.name} is closed: {card.closed}" for card in closed
    )


def _about(seconds: float) -> str:
    return format_duration(round(seconds) if seconds < 60 else round(seconds / 60) * 60)


def _gib(count_bytes: int, rounded: Callable[[float], int]) -> str:
    return f"{rounded(count_bytes / GIB * 10) / 10:.1f} GiB"
