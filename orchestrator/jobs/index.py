"""What a decision asks of the jobs of a queue, gathered in one walk through all of them. Pure.

Made anew once the queue has changed: of 1,000 jobs it takes a few milliseconds. Decides nothing but
what a job comes to whose others have ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from orchestrator.jobs.model import ENDED, ON_CARD, Job, JobState, Standing
from orchestrator.jobs.placement import LEVEL_S

#: A job, a milestone that it has reached, and its metric there.
Reach: TypeAlias = tuple[str, int, float]


@dataclass(slots=True, kw_only=True)
class Aside:
    """What the queue remembers of a job besides its standing; stored with it."""

    number: int
    """In order of submission."""
    queued_at_s: float | None = None
    """Since when its waiting counts."""
    wake_at_s: float = 0.0
    """While PARKED: not before."""
    in_row: int = 0
    """Attempts in a row that ended soon, and were not counted."""
    no_room: int = 0
    """Times in a row that it had no room, and no card was larger."""
    measured_at_s: float = 0.0
    to_recall: bool = False
    """Whether it is on a card, and a user has said where it goes."""
    reached: tuple[tuple[int, float, float], ...] = ()
    """Its milestones: the step, the value of its metric, and the world's time."""

    @property
    def milestone(self) -> int:
        """The last that it reached; 0 before the first."""
        return self.reached[-1][0] if self.reached else 0


class Needs(NamedTuple):
    """What decides where a job may run; jobs with the same needs form one line."""

    nodes: tuple[str, ...]
    card: str | None
    memory_bytes: int | None
    least_room_bytes: int | None
    hours: tuple[int, int] | None


Place: TypeAlias = tuple[float, int, str]
"""Of a job in its line: when its waiting began, earlier by an hour for each level of priority; its
number; its name."""


class Index:
    """The jobs of a queue as it is now, by what a decision asks for."""

    def __init__(
        self,
        standings: Mapping[str, Standing],
        asides: Mapping[str, Aside],
        likeness: Mapping[str, str | None],
    ) -> None:
        """Walk through all jobs; `likeness` is by job (`packing.likeness`)."""
        self._standings, self._asides, self._likeness = standings, asides, likeness
        self.open = 0
        """Jobs that have not ended."""
        self.moving = 0
        """Those among them that neither wait for others nor are PAUSED."""
        self.on_card: list[str] = []
        self.cards: Counter[str] = Counter()
        """Attempts by card."""
        self.parked: list[str] = []
        self.paused: dict[str, dict[str, None]] = defaultdict(dict)
        """By sweep."""
        self.active: Counter[str] = Counter()
        """Members of a sweep that have neither ended nor are PAUSED."""
        self.lines: dict[Needs, list[Place]] = defaultdict(list)
        """QUEUED jobs in their order."""
        self.needs: dict[Needs, list[str]] = defaultdict(list)
        """Jobs that are to start at some time."""
        self.due: dict[str, tuple[JobState, str]] = {}
        """What WAITING jobs come to whose others have ended, and SKIPPED ones whose others have
        not."""
        self.reached: dict[str, list[Reach]] = defaultdict(list)
        """Milestones by sweep, in the order in which they were reached."""
        self._speeds: dict[str, Mapping[str, float]] = {}
        """By sweep, those of the first of its members that was measured."""
        self._alike_paces: dict[str, dict[str, float]] = defaultdict(dict)
        """Of the first that was measured of jobs whose steps cost the same, by the title of a card.
        """
        self.alike_bytes: dict[str, int] = {}
        """The most that one of them took."""
        reached: list[tuple[float, int, str, Reach]] = []
        for name, standing in standings.items():
            if standing.state in ENDED:
                if standing.state is JobState.SKIPPED:
                    self._check(standing)
            else:
                self._add(standing)
            if standing.speeds or standing.peak_bytes:
                self._measured(standing)
            aside, sweep = asides[name], standing.job.sweep or ""
            for milestone, value, at_s in aside.reached:
                reached.append((at_s, aside.number, sweep, (name, milestone, value)))
        for line in self.lines.values():
            line.sort()
        for _, _, sweep, entry in sorted(reached, key=lambda each: each[:2]):
            self.reached[sweep].append(entry)

    def _add(self, standing: Standing) -> None:
        """Take in a job that has not ended."""
        job, state = standing.job, standing.state
        self.open += 1
        if state is JobState.PAUSED:
            self.paused[job.sweep or ""][job.name] = None
            return
        self.active[job.sweep or ""] += 1
        if state is JobState.WAITING:
            self._check(standing)
        else:
            self.moving += 1
        if state in ON_CARD:
            self.on_card.append(job.name)
            self.cards[standing.card or ""] += 1
        elif state is not JobState.HELD:
            needs = needs_of(standing)
            self.needs[needs].append(job.name)
            if state is JobState.QUEUED:
                self.lines[needs].append(self._place(standing))
            elif state is JobState.PARKED:
                self.parked.append(job.name)

    def _measured(self, standing: Standing) -> None:
        """Take in speeds, and the most memory that it took."""
        alike = self._likeness[standing.job.name]
        if alike is not None and standing.peak_bytes:
            self.alike_bytes[alike] = max(standing.peak_bytes, self.alike_bytes.get(alike, 0))
        if not standing.speeds:
            return
        if alike is not None:
            for title, pace in standing.paces.items():
                self._alike_paces[alike].setdefault(title, pace)
        if standing.job.sweep is not None:
            self._speeds.setdefault(standing.job.sweep, standing.speeds)

    def paces_alike(self, job: Job) -> Mapping[str, float]:
        """Return the paces of jobs whose steps cost as much, by the title of a card."""
        return self._alike_paces.get(self._likeness[job.name] or "", {})

    def speeds_of(self, standing: Standing) -> Mapping[str, float]:
        """Return the speeds of a job that is alone, by the title of a card: its own, else those of
        a job like it, else those of a member of its sweep.
        """
        of_sweep = self._speeds.get(standing.job.sweep or "", {})
        return standing.speeds or self.paces_alike(standing.job) or of_sweep

    def ahead(self, name: str) -> int:
        """Return how many QUEUED jobs are before one."""
        place = self._place(self._standings[name])
        return sum(bisect_left(line, place) for line in self.lines.values())

    def _place(self, standing: Standing) -> Place:
        aside = self._asides[standing.job.name]
        since_s = standing.since_s if aside.queued_at_s is None else aside.queued_at_s
        return since_s - LEVEL_S * standing.job.priority, aside.number, standing.job.name

    def _check(self, standing: Standing) -> None:
        """Look at a job that waits for others, or was skipped for their sake."""
        found = _after(standing.job, self._standings)
        if standing.state is JobState.SKIPPED:
            is_again = found is None or found[0] is not JobState.SKIPPED
            why = f"waits for {', '.join(standing.job.after)}"
            found = (JobState.WAITING, why) if is_again else None
        if found is not None:
            self.due[standing.job.name] = found


def needs_of(standing: Standing) -> Needs:
    """Return what decides where a job may run."""
    job = standing.job
    return Needs(job.nodes, job.card, job.memory_bytes, standing.least_room_bytes, job.hours)


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
