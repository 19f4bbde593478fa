"""The queue: which records follow from those recorded so far and from what is seen. Pure.

The queue is what its records add up to (`apply`); how each changes a job is in `lifecycle.py`.
`next_records` answers with one batch: either what was observed of attempts, or what that leads to
for jobs without one, or what starts. The caller applies it and asks again until nothing follows;
then it stores what has changed, and only then carries it out. So a queue that is made of what is
stored, asked about the same world, answers the same.

What the caller owes: every card of the configuration is in `World.cards`, closed while its node is
away; a job whose node does not answer has no entry in `World.seen`, and one with `node_lost` once
that has lasted `node_lost_s` of it.

Does not decide where a job goes (`places.py`), who goes on at a milestone (`milestones.py`), or
what a cause of failure means (`causes.py`), and stores nothing (`record/store.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from orchestrator.jobs import attempts, lifecycle, milestones, places
from orchestrator.jobs.index import Index, Reach
from orchestrator.jobs.lifecycle import IllegalRecordError
from orchestrator.jobs.model import (
    IN_LINE,
    ON_CARD,
    AttemptBegun,
    AttemptEnded,
    Card,
    Cause,
    HeadAway,
    Job,
    JobState,
    QueueHeld,
    Record,
    Standing,
    StateChanged,
    Submitted,
    UserOrder,
    World,
)
from orchestrator.jobs.places import Candidate, Place, Plan, likeness

#: A node that is away for so long is lost, and its trainings go on elsewhere: without a head, a
#: worker there trains no more.
NODE_LOST_S = 30.0

#: A program that hears nothing of the head for so long is ended by its own node; after that, and
#: what it is given to end, with a reserve for late news, it may begin elsewhere.
COMMAND_LEASE_S = 60.0
_LEASE_RESERVE_S = 15.0

#: So many different jobs that fail alike, each so soon after its start, hold the queue.
_ALIKE_JOBS, _ALIKE_WITHIN_S = 3, 60.0
#: Causes that say nothing about the queue as a whole, however many jobs they meet.
_OF_ONE_JOB = frozenset(
    {
        *(Cause.DONE, Cause.PARKED, Cause.OUT_OF_MEMORY, Cause.KILLED, Cause.NODE_LOST),
        *(Cause.CARD_TAKEN, Cause.DRIVER),  # for these a card is closed (`run/dispatcher.py`)
        Cause.DIED,
    }
)
#: A training that had no room on the largest card is tried there so often.
_NO_ROOM_TRIES = 6

#: Orders of a user that are known, so that one that comes twice is obeyed once.
_OBEYED_KEPT = 1_000

_CHANGING = re.compile(r"0x[0-9a-f]+|\d+")


def node_lost_s(job: Job) -> float:
    """Return how long the node of a job is away before the job may go on elsewhere."""
    return NODE_LOST_S if job.command is None else COMMAND_LEASE_S + _LEASE_RESERVE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """What there is of a queue besides its jobs, as it is stored."""

    held: str | None = None
    """Why nothing starts."""
    said: tuple[str, ...] = ()
    """The ids of the last orders of users."""
    alike: tuple[tuple[str, str], ...] = ()
    """A text, and a job that failed with it soon after its start."""


_NO_FACTS = QueueFacts()


class Queue:
    """All jobs of a run, and what comes next. See the module."""

    def __init__(self, standings: Iterable[Standing] = (), facts: QueueFacts = _NO_FACTS) -> None:
        """Begin with what was stored of it, the jobs in order of submission."""
        self.held = facts.held
        """Why nothing starts; `None`: it does."""
        self.unsaved: dict[str, None] = {}
        """Jobs whose standing has changed since it was stored; who stores it empties this."""
        self._standings: dict[str, Standing] = {}
        self._likeness: dict[str, str | None] = {}
        """By job, what is the same of jobs whose steps cost the same."""
        self._obeyed = dict.fromkeys(facts.said)
        self._alike: dict[str, dict[str, None]] = {}
        """Jobs that failed soon after their start: by the cause of a full disk alone, or by another
        cause and what they said.
        """
        for text, job in facts.alike:
            self._alike.setdefault(text, {})[job] = None
        self._index: Index | None = None
        self._world: World | None = None
        """The last one that it was asked about: why jobs wait is worked out for those who look."""
        self._plan: Plan | None = None
        for standing in standings:
            self._put(standing)
        self.unsaved.clear()

    @property
    def standings(self) -> Mapping[str, Standing]:
        """As they are stored, by job, in order of submission."""
        return self._standings

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All of them, in order of submission."""
        return tuple(standing.job for standing in self._standings.values())

    @property
    def on_card(self) -> frozenset[str]:
        """Jobs that have an attempt on a card."""
        return frozenset(self._indexed().on_card)

    @property
    def saving(self) -> Collection[str]:
        """Jobs whose work is done, and whose folders are being filled."""
        return self._indexed().saving

    @property
    def is_over(self) -> bool:
        """Whether every job has ended."""
        return self._indexed().open == 0

    def unchosen(self, places: int) -> Iterator[tuple[Job, list[Standing]]]:
        """Yield the next member of each sweep of method optuna of which fewer than `places` are at
        work, with the members that have their settings already.
        """
        index = self._indexed()
        for sweep, names in index.unchosen.items():
            if index.active[sweep] - len(names) < places:
                members = (each for each in self._standings.values() if each.job.sweep == sweep)
                chosen = [each for each in members if not each.job.awaits_settings]
                yield self._standings[names[0]].job, chosen

    def shown(self, name: str) -> Standing:
        """Return how a job stands; where it is in line, with the reason and the expected start."""
        standing = self._standings[name]
        if standing.state not in IN_LINE:
            return standing
        if self.held is not None:
            return replace(standing, reason=f"the queue is held: {self.held}")
        if self._world is None:
            return standing
        plan, hours = self._planned(self._world), standing.job.hours
        reason = plan.reasons.get(name, standing.reason)
        if not attempts.is_in_hours(hours, self._world.minute_of_day):
            reason = attempts.hours_in_words(hours)
        expected_s = plan.expected_start_s.get(name)
        return replace(standing, reason=reason, expected_start_s=expected_s)

    def why_refused(self, record: Record) -> str | None:
        """Return why a record of a user, or of no job there is, is not taken; `None`: it is."""
        if isinstance(record, Submitted):
            there = self._standings.get(record.job.name)
            if there is None:
                return None
            if there.job.id == record.job.id:
                return f"{record.job.name} has been submitted already"
            return f"there is another job called {record.job.name} ({there.job.origin})"
        if isinstance(record, UserOrder | QueueHeld) and record.id in self._obeyed:
            return "it has been obeyed already"
        if not isinstance(record, QueueHeld | HeadAway) and record.job not in self._standings:
            return f"there is no job called {record.job}"
        return None

    def apply(self, record: Record) -> None:
        """Add a record.

        Raises:
            IllegalRecordError: It cannot happen as things stand; nothing has changed.
        """
        if (why := self.why_refused(record)) is not None:
            raise IllegalRecordError(None, record, why)
        if isinstance(record, Submitted):
            self._put(lifecycle.standing_of(record, len(self._standings)))
        elif isinstance(record, QueueHeld):
            self.held = record.reason
            self._alike.clear()
        elif isinstance(record, HeadAway):
            self._leave_out(record)
        else:
            standing = self._standings[record.job]
            changed = replace(standing, **lifecycle.changes_of(standing, record))
            if isinstance(record, AttemptEnded) and record.cause is not None:
                self._note_alike(standing, record, record.cause)
            self._put(changed)
        if isinstance(record, UserOrder | QueueHeld) and record.id is not None:
            self._obeyed[record.id] = None
        self._index = None

    def _put(self, standing: Standing) -> None:
        name = standing.job.name
        if name not in self._standings or standing.job is not self._standings[name].job:
            self._likeness[name] = likeness(standing.job)
        self._standings[name] = standing
        self.unsaved[name] = None

    def _leave_out(self, gap: HeadAway) -> None:
        """Have a time without a head not count as worked."""
        began_s = gap.at_s - gap.away_s
        for standing in list(self._standings.values()):
            if standing.state in ON_CARD and standing.since_s <= began_s:
                self._put(replace(standing, since_s=standing.since_s + gap.away_s))

    @property
    def facts(self) -> QueueFacts:
        """What is to be stored of the queue itself; of orders, only the last ones."""
        return QueueFacts(
            held=self.held,
            said=tuple(self._obeyed)[-_OBEYED_KEPT:],
            alike=tuple((text, job) for text, jobs in self._alike.items() for job in jobs),
        )

    def next_records(self, world: World) -> tuple[Record, ...]:
        """Return the next batch; empty where nothing is to do."""
        sentence = self._why_to_hold(world)
        if sentence is not None:
            return (QueueHeld(at_s=world.now_s, reason=sentence),)
        stages: tuple[Callable[[World], Sequence[Record]], ...] = (
            self._observed,
            self._settled,
            self._placed,
        )
        for stage in stages:
            records = stage(world)
            if records:
                return tuple(records)
        return ()

    def _indexed(self) -> Index:
        """Return the index, made anew after a change."""
        if self._index is None:
            self._index = Index(self._standings, self._likeness)
        return self._index

    def _note_alike(self, standing: Standing, record: AttemptEnded, cause: Cause) -> None:
        """Note a job that failed soon after its start."""
        name, ran_s = standing.job.name, record.at_s - standing.since_s
        if cause is Cause.DISK_FULL:
            self._alike.setdefault(cause, {})[name] = None
        elif cause is Cause.DONE or ran_s > _ALIKE_WITHIN_S:
            self._alike.clear()
        elif cause not in _OF_ONE_JOB and standing.recalled_to is None:
            text = _CHANGING.sub("#", record.text.replace(name, "JOB").lower())[:300]
            self._alike.setdefault(f"{cause}: {text}", {})[name] = None

    # What follows

    def _why_to_hold(self, world: World) -> str | None:
        if self.held is not None:
            return None
        if world.disk_full is not None:
            return world.disk_full
        for text, jobs in self._alike.items():
            last = self._standings[list(jobs)[-1]].last_error
            if text == Cause.DISK_FULL:
                return f"the disk was full for {', '.join(jobs)}: {last}"
            if len(jobs) >= _ALIKE_JOBS:
                named = ", ".join(islice(jobs, _ALIKE_JOBS))
                return f"{named} failed alike within a minute of their start: {last}"
        return None

    def _observed(self, world: World) -> list[Record]:
        """Return what is new of the attempts on cards."""
        records: list[Record] = []
        index = self._indexed()
        reached: dict[str, list[Reach]] = {}
        for name in index.on_card:
            standing = self._standings[name]
            job, to, seen = standing.job, standing.recalled_to, attempts.seen_of(standing, world)
            ended = None if seen is None else attempts.end_of(seen, world.now_s)
            if ended is not None:
                records.append(ended)
            elif seen is None or to is not None:
                continue
            elif (recall := attempts.recall_of(standing, seen, world)) is not None:
                records.append(recall)
            else:
                found: list[Record] = []
                if job.sweep is not None:
                    so_far = reached.setdefault(job.sweep, list(index.reached[job.sweep]))
                    found = attempts.milestone_of(standing, seen, world, so_far)
                records += found or attempts.measured(standing, seen, world)
        return records

    def _settled(self, world: World) -> list[Record]:
        """Return what jobs without an attempt come to."""
        index = self._indexed()
        found: dict[str, tuple[JobState, str]] = dict(index.due)
        for names in index.needs.values() if world.cards else ():
            first = self._standings[names[0]]
            why = places.never_fits(first.job, first.least_room_bytes, world.cards)
            if why is not None:
                found.update(dict.fromkeys(names, (JobState.INFEASIBLE, why)))
        for name in index.saving:
            to, why = world.left.get(name, (JobState.SAVING, self._standings[name].reason))
            if (to, why) != (JobState.SAVING, self._standings[name].reason):
                found[name] = to, why
        for name in index.parked:
            wakes = self._wakes(name, world)
            if wakes is not None:
                found[name] = wakes
        for sweep, paused in index.paused.items():
            found.update(self._promoted(sweep, paused, index, is_idle=False))
        return [
            StateChanged(at_s=world.now_s, job=name, to=found[name][0], reason=found[name][1])
            for name in sorted(found, key=lambda name: self._standings[name].number)
        ]

    def _wakes(self, name: str, world: World) -> tuple[JobState, str] | None:
        """Return what a PARKED job comes to by now."""
        standing = self._standings[name]
        job = standing.job
        if world.now_s < standing.wake_at_s or not attempts.is_in_hours(
            job.hours, world.minute_of_day
        ):
            return None
        if standing.no_room >= _NO_ROOM_TRIES:
            return JobState.INFEASIBLE, f"{standing.reason}; tried {standing.no_room} times"
        taken = self._indexed().cards
        for card in world.cards:
            if (
                card.closed is None
                and places.suits(job, card)
                and card.room_bytes >= (standing.least_room_bytes or 0)
                and not (standing.no_room and taken[card.name])
            ):
                return JobState.QUEUED, "in line again"
        return None

    def _promoted(
        self, sweep: str, paused: Sequence[str], index: Index, *, is_idle: bool
    ) -> dict[str, tuple[JobState, str]]:
        """Return the member of a sweep that goes on by now, or all of them as stopped."""
        rule = self._standings[paused[0]].job.milestones
        if rule is None:
            return {}
        # Where nothing else can move, its members that wait do so for its paused ones.
        is_last = not index.active[sweep] or (not index.moving and not index.due)
        reached = index.reached[sweep]
        name = milestones.promotable(rule, reached, paused, is_idle=is_idle or is_last)
        if name is not None:
            return {name: (JobState.QUEUED, "goes on: among the best at its milestone by now")}
        if is_last:
            why = f"others of {sweep} were better, and all have ended"
            return dict.fromkeys(paused, (JobState.STOPPED, why))
        return {}

    def _placed(self, world: World) -> list[Record]:
        """Return what starts, or else what makes use of a card that stays free."""
        self._world, self._plan = world, None
        if self.held is not None:
            return []
        open_cards = [card for card in world.cards if card.closed is None]
        may_preempt = any(self._standings[name].job.preempt for name in self._indexed().in_line)
        if not may_preempt and not any(self._may_take_more(card) for card in open_cards):
            return []
        plan = self._planned(world)
        if plan.starts or plan.recalls:
            starts: list[Record] = [
                AttemptBegun(
                    at_s=world.now_s,
                    job=start.job,
                    attempt=self._standings[start.job].attempt + 1,
                    card=start.card,
                    budget_bytes=start.budget_bytes,
                    alone=start.alone,
                )
                for start in plan.starts
            ]
            return starts + [
                attempts.recalled(
                    self._standings[name], world, JobState.PREEMPTED, f"makes room for {other}"
                )
                for name, other in plan.recalls.items()
            ]
        taken = self._indexed().cards
        if all(taken[card.name] for card in open_cards):
            return []
        return self._one_more_promoted(world)  # a card is free that nothing in line can use

    def _may_take_more(self, card: Card) -> bool:
        """Return whether a card is free, or has a job that another one may join."""
        index = self._indexed()
        return not index.cards[card.name] or any(
            not self._standings[name].alone and self._standings[name].card == card.name
            for name in index.on_card
        )

    def _planned(self, world: World) -> Plan:
        """Return where jobs go, and why and how long the others wait: once for each world."""
        if self._plan is None:
            index = self._indexed()
            taken = [_place(self._standings[name], world) for name in index.on_card]
            candidates = [
                self._candidate(standing, world.cards)
                for standing in map(self._standings.__getitem__, index.in_line)
                if attempts.is_in_hours(standing.job.hours, world.minute_of_day)
            ]
            self._plan = places.plan(candidates, world.cards, taken, world.now_s)
        return self._plan

    def _one_more_promoted(self, world: World) -> list[Record]:
        index = self._indexed()
        for sweep in sorted(index.paused):
            found = self._promoted(sweep, index.paused[sweep], index, is_idle=True)
            for name, (to, reason) in found.items():
                return [StateChanged(at_s=world.now_s, job=name, to=to, reason=reason)]
        return []

    def _candidate(self, standing: Standing, cards: Sequence[Card]) -> Candidate:
        job, index = standing.job, self._indexed()
        seconds: dict[str, float] = {}
        if job.steps is not None:
            left, speeds = max(0, job.steps - (standing.step or 0)), index.speeds_of(standing)
            seconds = {
                card.name: left / speed for card in cards if (speed := speeds.get(card.title))
            }
        return Candidate(
            job=job,
            seconds=seconds,
            measured_bytes=index.peak_bytes_of(standing) if job.pack else None,
            least_room_bytes=standing.least_room_bytes,
        )


def _place(standing: Standing, world: World) -> Place:
    seen = attempts.seen_of(standing, world)
    eta_s = None if seen is None else seen.eta_s
    return Place(
        job=standing.job.name,
        card=standing.card or "",
        budget_bytes=standing.budget_bytes or 0,
        alone=standing.alone,
        ends_at_s=None if eta_s is None else world.now_s + eta_s,
        ran_s=max(0.0, world.now_s - standing.since_s),
        priority=standing.job.priority,
        yields=seen is not None
        and standing.recalled_to is None
        and (standing.job.parks or standing.job.command is None),
        leaves=standing.recalled_to is not None,
    )
