"""What a decision asks of the jobs of a queue, gathered in one walk through all of them. Pure.

Made anew once the queue has changed: of 1,000 jobs it takes a few milliseconds. Decides nothing but
what a job comes to whose others have ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TypeAlias

from orchestrator.jobs.model import ENDED, IN_LINE, ON_CARD, Job, JobState, Standing

#: A job, a milestone that it has reached, and its metric there.
Reach: TypeAlias = tuple[str, int, float]


class Index:
    """The jobs of a queue as it is now, by what a decision asks for."""

    def __init__(
        self,
        standings: Mapping[str, Standing],
        likeness: Mapping[str, str | None],
    ) -> None:
        """Walk through all jobs, in their order; `likeness` is by job (`places.likeness`)."""
        self._standings, self._likeness = standings, likeness
        self.open = 0
        """Jobs that have not ended."""
        self.moving = 0
        """Those among them that neither wait for others nor are PAUSED."""
        self.on_card: list[str] = []
        self.cards: Counter[str] = Counter()
        """Attempts by card."""
        self.saving: list[str] = []
        self.parked: list[str] = []
        self.paused: dict[str, list[str]] = defaultdict(list)
        """By sweep."""
        self.active: Counter[str] = Counter()
        """Members of a sweep that have neither ended nor are PAUSED."""
        self.unchosen: dict[str, list[str]] = defaultdict(list)
        """By sweep, those of them that wait for nothing but their settings."""
        self.in_line: list[str] = []
        self.needs: dict[tuple[object, ...], list[str]] = defaultdict(list)
        """Jobs that are to start at some time, by all that decides where they may ever run."""
        self.due: dict[str, tuple[JobState, str]] = {}
        """What WAITING jobs come to whose others have ended, and SKIPPED ones whose others have
        not."""
        self.reached: dict[str, list[Reach]] = defaultdict(list)
        """Milestones by sweep, in the order in which they were reached."""
        self._speeds: dict[str, dict[str, float]] = defaultdict(dict)
        """Steps per second of a job that is alone, by likeness or sweep and by the title of a card;
        of the first of these jobs that was measured.
        """
        self._alike_bytes: dict[str, int] = {}
        """The most that one of jobs alike took."""
        reached: list[tuple[float, int, str, Reach]] = []
        for name, standing in standings.items():
            if standing.state is JobState.SKIPPED:
                self._check(standing)
            elif standing.state not in ENDED:
                self._add(standing)
            if standing.speeds or standing.peak_bytes:
                self._measured(standing)
            sweep = standing.job.sweep or ""
            for milestone, value, at_s in standing.reached:
                reached.append((at_s, standing.number, sweep, (name, milestone, value)))
        for _, _, sweep, entry in sorted(reached, key=lambda each: each[:2]):
            self.reached[sweep].append(entry)

    def _add(self, standing: Standing) -> None:
        """Take in a job that has not ended."""
        job, state = standing.job, standing.state
        self.open += 1
        if state is JobState.PAUSED:
            self.paused[job.sweep or ""].append(job.name)
            return
        self.active[job.sweep or ""] += 1
        if state is JobState.WAITING:
            self._check(standing)
        else:
            self.moving += 1
        if state in ON_CARD:
            self.on_card.append(job.name)
            self.cards[standing.card or ""] += 1
        elif state is JobState.SAVING:
            self.saving.append(job.name)
        elif state is not JobState.HELD:
            needs = (job.nodes, job.card, job.memory_bytes, standing.least_room_bytes)
            self.needs[needs].append(job.name)
            if state in IN_LINE:
                self.in_line.append(job.name)
            elif state is JobState.PARKED:
                self.parked.append(job.name)

    def _measured(self, standing: Standing) -> None:
        """Take in speeds, and the most memory that it took."""
        alike = self._likeness[standing.job.name]
        if alike is not None and standing.peak_bytes:
            self._alike_bytes[alike] = max(standing.peak_bytes, self._alike_bytes.get(alike, 0))
        for key in filter(None, (alike, standing.job.sweep)):
            for title, speed in standing.speeds.items():
                self._speeds[key].setdefault(title, speed)

    def speeds_of(self, standing: Standing) -> Mapping[str, float]:
        """Return the steps per second of a job that is alone, by the title of a card: its own, and
        on other cards those of a job alike; where there are none, those of a member of its sweep.
        """
        for key in filter(None, (self._likeness[standing.job.name], standing.job.sweep)):
            known = self._speeds.get(key, {})
            if known or standing.speeds:
                return {**known, **standing.speeds}
        return standing.speeds

    def peak_bytes_of(self, standing: Standing) -> int | None:
        """Return the most that a job took so far, else that a job alike did; `None`: unknown."""
        alike = self._likeness[standing.job.name]
        return standing.peak_bytes or self._alike_bytes.get(alike or "")

    def _check(self, standing: Standing) -> None:
        """Look at a job that waits for others, or was skipped for their sake."""
        job, found = standing.job, _after(standing.job, self._standings)
        if standing.state is JobState.SKIPPED:
            if found is None or found[0] is not JobState.SKIPPED:
                self.due[job.name] = JobState.WAITING, f"waits for {', '.join(job.after)}"
        elif found is not None and found[0] is JobState.QUEUED and job.awaits_settings:
            self.unchosen[job.sweep or ""].append(job.name)
            self.moving += 1
        elif found is not None:
            self.due[job.name] = found


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
