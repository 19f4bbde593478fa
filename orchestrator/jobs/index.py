"""The jobs of a queue by what a decision asks for, so that none walks through all of them. Pure.

What it holds follows from the standings alone: built anew after a replay, it is the same. Decides
nothing but what a job comes to whose others have ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

from orchestrator.jobs.model import ENDED, IN_LINE, ON_CARD, Job, JobState, Standing
from orchestrator.jobs.places import likeness

#: A job, a milestone that it has reached, and its metric there.
Reach: TypeAlias = tuple[str, int, float]


@dataclass(slots=True, kw_only=True)
class Aside:
    """What the queue remembers of a job besides its standing. In the journal only when that was
    compacted.
    """

    number: int
    """In order of submission."""
    wake_at_s: float = 0.0
    """While PARKED: not before."""
    in_row: int = 0
    """Attempts in a row that ended soon, and were not counted."""
    no_room: int = 0
    """Times in a row that it had no room, and no card was larger."""
    measured_at_s: float = 0.0
    milestone: int = 0
    """The last that it reached."""


class Needs(NamedTuple):
    """What decides where a job may ever run."""

    nodes: tuple[str, ...]
    card: str | None
    memory_bytes: int | None
    least_room_bytes: int | None


@dataclass(slots=True)
class Index:
    """The standings by what a decision asks for, so that none walks through all of them."""

    standings: Mapping[str, Standing]
    asides: Mapping[str, Aside]
    open: int = 0
    """Jobs that have not ended."""
    moving: int = 0
    """Those among them that neither wait for others nor are PAUSED."""
    on_card: dict[str, None] = field(default_factory=dict)
    cards: Counter[str] = field(default_factory=Counter)
    """Attempts by card."""
    parked: dict[str, None] = field(default_factory=dict)
    paused: dict[str, dict[str, None]] = field(default_factory=dict)
    """By sweep."""
    active: Counter[str] = field(default_factory=Counter)
    """Members of a sweep that have neither ended nor are PAUSED."""
    in_line: dict[str, None] = field(default_factory=dict)
    needs: dict[Needs, dict[str, None]] = field(default_factory=dict)
    """Jobs that are to start at some time."""
    followers: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    due: dict[str, tuple[JobState, str]] = field(default_factory=dict)
    """What WAITING jobs come to whose others have ended, and SKIPPED ones whose others have not."""
    reached: dict[str, list[Reach]] = field(default_factory=lambda: defaultdict(list))
    alike: dict[str, str | None] = field(default_factory=dict)
    """By job, what it has in common with others whose steps cost as much."""
    speeds: dict[str, dict[str, tuple[int, float]]] = field(default_factory=dict)
    """Steps per second of a job that is alone, by likeness or sweep and by the title of a card; of
    the first of these jobs that was measured, with its number.
    """
    alike_bytes: dict[str, int] = field(default_factory=dict)
    """The most that one of jobs alike took."""

    def build(self, reached: Iterable[Reach]) -> None:
        """Take in all that there is."""
        for standing in self.standings.values():
            self.enter(standing)
        for standing in self.standings.values():
            self.add(standing)
            self.measured(standing)
        for entry in reached:
            self.reach(self.standings[entry[0]].job.sweep, entry)

    def enter(self, standing: Standing) -> None:
        """Take in a job, once."""
        self.alike[standing.job.name] = likeness(standing.job)
        for name in standing.job.after:
            self.followers[name].append(standing.job.name)

    def add(self, standing: Standing) -> None:
        """Take in a job in its new state."""
        name, state, sweep = standing.job.name, standing.state, standing.job.sweep or ""
        if state in ENDED:
            if state is JobState.SKIPPED:
                self._check(name)
            return
        self._count(standing, 1)
        if state is JobState.PAUSED:
            self.paused.setdefault(sweep, {})[name] = None
        elif state in ON_CARD:
            self.on_card[name] = None
        elif state is not JobState.HELD:
            needs = needs_of(standing)
            self.needs.setdefault(needs, {})[name] = None
            if state is JobState.PARKED:
                self.parked[name] = None
            elif state in IN_LINE:
                self.in_line[name] = None
            else:
                self._check(name)

    def remove(self, standing: Standing) -> None:
        """Take a job out, before it changes."""
        name = standing.job.name
        for names in (self.on_card, self.parked, self.in_line, self.due):
            names.pop(name, None)
        if standing.state in ENDED:
            return
        self._count(standing, -1)
        _take(self.paused, standing.job.sweep or "", name)
        _take(self.needs, needs_of(standing), name)

    def _count(self, standing: Standing, by: int) -> None:
        state = standing.state
        self.open += by
        self.moving += by * (state not in {JobState.WAITING, JobState.PAUSED})
        self.active[standing.job.sweep or ""] += by * (state is not JobState.PAUSED)
        if state in ON_CARD:
            self.cards[standing.card or ""] += by

    def look_behind(self, name: str) -> None:
        """Look at the jobs after one that has come in, has ended, or begins once more."""
        for follower in self.followers.get(name, ()):
            if self.standings[follower].state in {JobState.WAITING, JobState.SKIPPED}:
                self._check(follower)

    def reach(self, sweep: str | None, entry: Reach) -> None:
        """Take in a milestone of a member."""
        self.reached[sweep or ""].append(entry)

    def measured(self, standing: Standing) -> None:
        """Take in speeds, and the most memory that it took."""
        job = standing.job
        alike, number = self.alike[job.name], self.asides[job.name].number
        if alike is not None:
            self.alike_bytes[alike] = max(standing.peak_bytes or 0, self.alike_bytes.get(alike, 0))
        for key in filter(None, (alike, job.sweep)):
            known = self.speeds.setdefault(key, {})
            for title, speed in standing.speeds.items():
                if number <= known.get(title, (number, speed))[0]:
                    known[title] = (number, speed)

    def speeds_of(self, standing: Standing) -> Mapping[str, float]:
        """Return the steps per second of a job that is alone, by the title of a card: its own, and
        on other cards those of a job alike; where there are none, those of a member of its sweep.
        """
        for key in filter(None, (self.alike[standing.job.name], standing.job.sweep)):
            known = {title: speed for title, (_, speed) in self.speeds.get(key, {}).items()}
            if known or standing.speeds:
                return {**known, **standing.speeds}
        return standing.speeds

    def peak_bytes_of(self, standing: Standing) -> int | None:
        """Return the most that a job took so far, else that a job alike did; `None`: unknown."""
        alike = self.alike[standing.job.name]
        return standing.peak_bytes or self.alike_bytes.get(alike or "") or None

    def _check(self, name: str) -> None:
        standing = self.standings[name]
        found = _after(standing.job, self.standings)
        if standing.state is JobState.SKIPPED:
            is_again = found is None or found[0] is not JobState.SKIPPED
            why = f"waits for {', '.join(standing.job.after)}"
            found = (JobState.WAITING, why) if is_again else None
        if found is None:
            self.due.pop(name, None)
        else:
            self.due[name] = found


def needs_of(standing: Standing) -> Needs:
    """Return what decides where a job may run."""
    job = standing.job
    return Needs(job.nodes, job.card, job.memory_bytes, standing.least_room_bytes)


_Key = TypeVar("_Key")


def _take(sets: dict[_Key, dict[str, None]], key: _Key, name: str) -> None:
    """Remove a name from one of the sets, if it is there, and the set once it is empty."""
    names = sets.get(key, {})
    names.pop(name, None)
    if not names:
        sets.pop(key, None)


def _after(job: Job, standings: Mapping[str, Standing]) -> tuple[JobState, str] | None:
    """Return what a WAITING job comes to; `None`: it goes on waiting.

    A job that was STOPPED by its milestone counts as ended well where another of its sweep, which
    the job also comes after, is DONE.
    """
    missing = next((name for name in job.after if name not in standings), None)
    if missing is not None:
        return JobState.SKIPPED, f"there is no job {missing} in this queue, which it comes after"
    known = [standings[name] for name in job.after]
    done = {other.job.sweep for other in known if other.state is JobState.DONE}
    if not job.after_any:
        for other in known:
            stopped = other.state is JobState.STOPPED
            if stopped and other.job.sweep in done:
                continue
            if other.state in ENDED and other.state is not JobState.DONE:
                if stopped and any(
                    mate.job.sweep == other.job.sweep and mate.state not in ENDED for mate in known
                ):
                    return None
                return JobState.SKIPPED, f"{other.job.name} is {other.state.value}: {other.reason}"
    if all(other.state in ENDED for other in known):
        return JobState.QUEUED, "in line"
    return None
