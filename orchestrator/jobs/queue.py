"""The queue: which records follow from those recorded so far and from what is seen. Pure.

The queue is what its records add up to (`apply`); how each changes a job is in `lifecycle.py`.
`next_records` answers with one batch: either what was observed of attempts, or what that leads to
for jobs without one, or what starts and moves. The caller writes it to the journal as a whole,
applies it, carries it out, and asks again until nothing follows. So a queue that is replayed from
the journal, asked about the same world, answers the same.

What the caller owes: every card of the configuration is in `World.cards`, closed while its node is
away; a job whose node does not answer has no entry in `World.seen`, and one with `node_lost` once
that has lasted `node_lost_s` of it.

Does not decide where a job fits (`placement.py`), who goes on at a milestone (`milestones.py`), or
what a cause of failure means (`causes.py`), and keeps nothing on disk (`journal.py`).
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias, cast, get_args

from orchestrator.jobs import attempts, lifecycle, milestones, packing, placement
from orchestrator.jobs.index import Aside, Index, Needs, Place, Reach, needs_of
from orchestrator.jobs.lifecycle import IllegalRecordError
from orchestrator.jobs.model import (
    ENDED,
    ON_CARD,
    Assigned,
    AttemptEnded,
    Card,
    Cause,
    HeadAway,
    Job,
    JobState,
    Measured,
    Packed,
    QueueHeld,
    Reached,
    Recalled,
    Record,
    Rested,
    Said,
    Settled,
    Standing,
    Submitted,
    SweepSubmitted,
    World,
)
from orchestrator.jobs.packing import Gain, likeness
from orchestrator.jobs.placement import Candidate, Plan, Resident

#: A node that is away for so long is lost, and its trainings go on elsewhere: without a head, a
#: worker there trains no more.
NODE_LOST_S = 30.0

#: A program that hears nothing of the head for so long is ended by its own node; after that, and
#: what it is given to end, with a reserve for late news, it may begin elsewhere.
COMMAND_LEASE_S = 60.0
_LEASE_RESERVE_S = 15.0

#: So many jobs are looked at for a place, and so many of them with the same needs.
_CANDIDATES, _ALIKE_CANDIDATES = 32, 12
#: So many different jobs that fail alike, each so soon after its start, hold the queue.
_ALIKE_JOBS, _ALIKE_WITHIN_S = 3, 60.0
#: Causes that say nothing about the queue as a whole, however many jobs they meet.
_OF_ONE_JOB = frozenset(
    {
        *(Cause.DONE, Cause.PARKED, Cause.OUT_OF_MEMORY, Cause.KILLED, Cause.NODE_LOST),
        *(Cause.CARD_TAKEN, Cause.DRIVER),  # for these a card is closed (`run/dispatcher.py`)
        *(Cause.NOT_WRITTEN, Cause.DIED),
    }
)
#: Wait before an attempt that is not counted is made again; doubled each time in a row.
_BACK_OFF_S, _LONGEST_BACK_OFF_S, _LONG_RUN_S = 5.0, 600.0, 600.0
#: The same for a training that had no room on the largest card, and how often that is tried.
_NO_ROOM_BACK_OFF_S, _NO_ROOM_TRIES = 60.0, 6
_JobRecord: TypeAlias = (
    Assigned | Recalled | Rested | AttemptEnded | Reached | Measured | Said | Settled
)
_OF_A_JOB = frozenset(get_args(_JobRecord))

#: Of a frozen value that nothing else has seen yet: a replay would take twice as long with copies.
_set = object.__setattr__

_CHANGING = re.compile(r"0x[0-9a-f]+|\d+")


def node_lost_s(job: Job) -> float:
    """Return how long the node of a job is away before the job may go on elsewhere."""
    return NODE_LOST_S if job.command is None else COMMAND_LEASE_S + _LEASE_RESERVE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A job as a compacted journal has it, in place of its records."""

    standing: Standing
    aside: Aside
    to_recall: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueKept:
    """The queue itself as a compacted journal has it."""

    held: str | None
    reached: tuple[Reach, ...]
    said: tuple[str, ...]
    alike: tuple[tuple[str, str], ...]
    packs: tuple[tuple[str, str, bool], ...] = ()


Entry: TypeAlias = Record | Kept | QueueKept


class _Standings(Mapping[str, Standing]):
    """The standings with what the last plan says about those that wait."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def __getitem__(self, name: str) -> Standing:
        return self._queue.shown(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._queue.names)

    def __len__(self) -> int:
        return len(self._queue.names)


class Queue:
    """All jobs of a run, and what comes next. See the module."""

    def __init__(self) -> None:
        """Begin without jobs."""
        self.held: str | None = None
        """Why nothing starts; `None`: it does."""
        self.reached: list[Reach] = []
        """Job, milestone and value, in journal order."""
        self.sweeps: dict[str, SweepSubmitted] = {}
        """Those whose members are asked for, by name; of one that came twice, the last."""
        self._members: dict[str, list[str]] = {}
        """Jobs by sweep, in order of submission."""
        self._standings: dict[str, Standing] = {}
        self._aside: dict[str, Aside] = {}
        self._said: dict[str, None] = {}
        self._to_recall: dict[str, None] = {}
        """Jobs on a card of which a user has said where they go."""
        self._alike: dict[str, dict[str, None]] = {}
        """Jobs that failed soon after their start: by the cause of a full disk alone, or by another
        cause and what they said.
        """
        self._packs: dict[tuple[str, str], bool] = {}
        """Whether it pays that two jobs share a card, by what they have in common and its title."""
        self._given: set[str] = set()
        """Jobs whose standing was handed out and may not change in place any more."""
        self._index: Index | None = None
        self._world: World | None = None
        """The last one that it was asked about: why jobs wait is worked out for those who look."""
        self._plan: Plan | None = None
        self._closed: set[Needs] = set()
        """Lines that are outside their hours."""
        self._fitting_cards: tuple[Card, ...] = ()
        self._fitting: dict[Needs, str | None] = {}
        """Why needs are never met on these cards: only so that it is not asked again."""

    @property
    def standings(self) -> Mapping[str, Standing]:
        """By job, in order of submission. Each is a value that does not change later."""
        return _Standings(self)

    @property
    def names(self) -> Collection[str]:
        """Of all jobs, in order of submission."""
        return self._standings.keys()

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All of them, in order of submission."""
        return tuple(standing.job for standing in self._standings.values())

    @property
    def on_card(self) -> frozenset[str]:
        """Jobs that have an attempt on a card."""
        return frozenset(self._indexed().on_card)

    @property
    def is_over(self) -> bool:
        """Whether every job has ended, and every sweep has been asked for all its members."""
        return self.is_over_without(())

    def is_over_without(self, sweeps: Collection[str]) -> bool:
        """Return the same, but as if nothing more were asked of `sweeps`."""
        return self._indexed().open == 0 and not any(
            self._left(name) for name in self.sweeps if name not in sweeps
        )

    def members(self, sweep: str) -> tuple[Standing, ...]:
        """Return the members of a sweep that there are, in order of submission."""
        names = self._members.get(sweep, ())
        self._given.update(names)
        return tuple(self._standings[name] for name in names)

    def wants_member(self, sweep: str, places: int) -> bool:
        """Return whether a sweep has more members to come, and fewer than `places` at work."""
        return self._left(sweep) > 0 and self._indexed().active[sweep] < places

    def _left(self, sweep: str) -> int:
        return self.sweeps[sweep].count - len(self._members.get(sweep, ()))

    def shown(self, name: str) -> Standing:
        """Return how a job stands; where it is in line, with the reason and the expected start."""
        standing = self._standings[name]
        self._given.add(name)
        if standing.state is not JobState.QUEUED:
            return standing
        if self.held is not None:
            return replace(standing, reason=f"the queue is held: {self.held}")
        if self._world is None:
            return standing
        plan, needs = self._planned(self._world), needs_of(standing)
        reason = plan.reasons.get(name)
        if needs in self._closed:
            reason = attempts.hours_in_words(needs.hours)
        elif reason is None and (ahead := self._indexed().ahead(name)):
            reason = f"{ahead:,} jobs are before it"
        expected = plan.expected_start_s.get(name)
        return replace(standing, reason=reason or standing.reason, expected_start_s=expected)

    def why_refused(self, record: Record) -> str | None:
        """Return why a record from the inbox is not for the journal; `None`: it is."""
        if isinstance(record, Submitted):
            there = self._standings.get(record.job.name)
            if there is not None and there.job.id == record.job.id:
                return f"{record.job.name} has been submitted already"
            return None if there is None else self._taken(record.job.name)
        if isinstance(record, SweepSubmitted):
            return self._why_sweep_refused(record)
        if isinstance(record, Said):
            if record.id in self._said:
                return "it has been obeyed already"
            if record.job not in self._standings:
                return f"there is no job called {record.job}"
        return None

    def _why_sweep_refused(self, record: SweepSubmitted) -> str | None:
        there = self.sweeps.get(record.name)
        if there is not None:
            is_same = (there.text, there.cwd) == (record.text, record.cwd)
            return f"the sweep {record.name} has been submitted already" if is_same else None
        names = (f"{record.name}-{number}" for number in range(record.count))
        taken = next((name for name in names if name in self._standings), None)
        return None if taken is None else self._taken(taken)

    def _taken(self, name: str) -> str:
        return f"there is another job called {name} ({self._standings[name].job.origin})"

    def apply(self, record: Entry) -> None:
        """Add a record. One that has been taken already changes nothing.

        Raises:
            IllegalRecordError: It cannot happen as things stand.
        """
        if type(record) in _OF_A_JOB:
            self._apply_to_job(cast("_JobRecord", record))
        elif isinstance(record, Submitted):
            self._submit(record)
        elif isinstance(record, SweepSubmitted):
            self.sweeps[record.name] = record
        elif isinstance(record, QueueHeld):
            self.held = record.reason
            self._alike.clear()
        elif isinstance(record, HeadAway):
            self._leave_out(record)
        elif isinstance(record, Packed):
            alike = likeness(self._standing(record).job) or ""
            self._packs[alike, record.card_title] = Gain(record.gain, record.low).pays
        elif isinstance(record, Kept):
            name = record.standing.job.name
            self._aside[name] = record.aside
            if record.to_recall:
                self._to_recall[name] = None
            self._add(record.standing)
        elif isinstance(record, QueueKept):
            self.held = record.held
            self.reached = list(record.reached)
            self._said = dict.fromkeys(record.said)
            for text, job in record.alike:
                self._alike.setdefault(text, {})[job] = None
            self._packs = {(alike, title): pays for alike, title, pays in record.packs}
            self._index = None

    def _leave_out(self, gap: HeadAway) -> None:
        """Have a time without a head count neither as worked nor as waited."""
        began_s = gap.at_s - gap.away_s
        for name, standing in self._standings.items():
            aside = self._aside[name]
            if standing.state in ON_CARD and standing.since_s <= began_s:
                since_s = standing.since_s + gap.away_s
                self._standings[name] = replace(standing, since_s=since_s)
            if aside.queued_at_s is not None and aside.queued_at_s <= began_s:
                aside.queued_at_s += gap.away_s
        self._index = None

    def condensed(self) -> Iterator[Entry]:
        """Return what the queue adds up to, as few entries that lead to the same queue."""
        alike = tuple((text, job) for text, jobs in self._alike.items() for job in jobs)
        reached, said = tuple(self.reached), tuple(self._said)
        packs = tuple((*key, pays) for key, pays in self._packs.items())
        yield QueueKept(held=self.held, reached=reached, said=said, alike=alike, packs=packs)
        yield from self.sweeps.values()
        for name, standing in self._standings.items():
            is_waiting = name in self._to_recall
            yield Kept(standing=standing, aside=self._aside[name], to_recall=is_waiting)

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

    # What records add up to

    def _indexed(self) -> Index:
        """Return the index, built anew after a replay."""
        if self._index is None:
            self._index = Index(self._standings, self._aside)
            self._index.build(self.reached)
        return self._index

    def _number(self, name: str) -> int:
        return self._aside[name].number

    def _submit(self, record: Submitted) -> None:
        name = record.job.name
        there = self._standings.get(name)
        if there is not None:
            if there.job.id != record.job.id:
                raise IllegalRecordError(there, record, "another job has its name")
            return
        standing = lifecycle.standing_of(record)
        queued_at_s = record.at_s if standing.state is JobState.QUEUED else None
        self._aside[name] = Aside(number=len(self._aside), queued_at_s=queued_at_s)
        self._add(standing)

    def _add(self, standing: Standing) -> None:
        self._standings[standing.job.name] = standing
        if standing.job.sweep is not None:
            self._members.setdefault(standing.job.sweep, []).append(standing.job.name)
        if self._index is not None:
            self._index.enter(standing)
            self._index.add(standing)
            self._index.look_behind(standing.job.name)

    def _standing(self, record: _JobRecord | Packed) -> Standing:
        standing = self._standings.get(record.job)
        if standing is None:
            raise IllegalRecordError(None, record, f"there is no job called {record.job}")
        return standing

    def _apply_to_job(self, record: _JobRecord) -> None:
        name, standing = record.job, self._standing(record)
        if isinstance(record, Said):
            if record.id in self._said:
                return
            self._said[record.id] = None
        changes = lifecycle.changes_of(standing, record)
        self._remember(standing, record, changes)
        index, before = self._index, standing.state
        if index is not None and "state" in changes:
            index.remove(standing)
        if name in self._given:
            self._standings[name] = standing = replace(standing, **changes)
            self._given.discard(name)
        else:
            for key, value in changes.items():
                _set(standing, key, value)
        if index is not None and "state" in changes:
            index.add(standing)
            if (before in ENDED) is not (standing.state in ENDED):
                index.look_behind(name)
        if index is not None and not changes.keys().isdisjoint({"speeds", "paces", "peak_bytes"}):
            index.measured(standing)

    def _remember(self, standing: Standing, record: Record, changes: lifecycle.Changes) -> None:
        """Note what the standing has no field for, before it changes."""
        name = standing.job.name
        aside = self._aside[name]
        kind = type(record)
        if kind is Measured:
            aside.measured_at_s = record.at_s
        elif isinstance(record, Reached):
            self.reached.append((name, record.milestone, record.value))
            aside.milestone = record.milestone
            if self._index is not None:
                self._index.reach(standing.job.sweep, self.reached[-1])
        elif isinstance(record, Recalled):
            self._to_recall.pop(name, None)
            aside.wake_at_s = record.at_s + record.wait_s
            if record.to is JobState.PARKED and record.least_room_bytes is not None:
                wait_s = _NO_ROOM_BACK_OFF_S * 2**aside.no_room if standing.alone else 0.0
                aside.no_room += 1
                aside.wake_at_s = record.at_s + wait_s
        elif isinstance(record, AttemptEnded):
            self._remember_end(standing, record, changes)
        elif kind is Said and "recalled_to" in changes and "state" not in changes:
            self._to_recall[name] = None
        state = changes.get("state")
        if state is not None and state not in ON_CARD:
            self._to_recall.pop(name, None)
            if state is JobState.QUEUED and aside.queued_at_s is None:
                aside.queued_at_s = record.at_s
            if kind is Said:
                aside.wake_at_s, aside.no_room, aside.in_row = 0.0, 0, 0

    def _remember_end(
        self, standing: Standing, record: AttemptEnded, changes: lifecycle.Changes
    ) -> None:
        name = standing.job.name
        aside = self._aside[name]
        ran_s = record.at_s - standing.since_s
        aside.no_room = 0
        if changes["state"] is JobState.PARKED and standing.recalled_to is None:
            aside.in_row = 1 if ran_s > _LONG_RUN_S else aside.in_row + 1
            first_s = attempts.TAKEN_S if record.cause is Cause.CARD_TAKEN else _BACK_OFF_S
            back_off_s = first_s * 2 ** min(aside.in_row - 1, 10)
            aside.wake_at_s = record.at_s + min(_LONGEST_BACK_OFF_S, back_off_s)
        if record.cause is Cause.DISK_FULL:
            self._alike.setdefault(record.cause, {})[name] = None
        elif record.cause is Cause.DONE or ran_s > _ALIKE_WITHIN_S:
            self._alike.clear()
        elif record.cause not in _OF_ONE_JOB and standing.recalled_to is None:
            text = _CHANGING.sub("#", record.text.replace(name, "JOB").lower())[:300]
            self._alike.setdefault(f"{record.cause}: {text}", {})[name] = None

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
        for name in sorted(index.on_card, key=self._number):
            standing = self._standings[name]
            job, to, seen = standing.job, standing.recalled_to, attempts.seen_of(standing, world)
            ended = None if seen is None else attempts.end_of(seen, world.now_s)
            if ended is not None:
                records.append(ended)
            elif name in self._to_recall and to is not None:
                records.append(attempts.recalled(standing, world, to, standing.reason))
            elif seen is None or to is not None:
                continue
            elif (recall := attempts.recall_of(standing, seen, world)) is not None:
                records.append(recall)
            else:
                aside, found = self._aside[name], list[Record]()
                if job.sweep is not None:
                    so_far = reached.setdefault(job.sweep, list(index.reached[job.sweep]))
                    found = attempts.milestone_of(standing, seen, world, aside.milestone, so_far)
                records += found or attempts.measured(standing, aside, seen, world)
        return records or self._judged(world)

    def _judged(self, world: World) -> list[Record]:
        """Return what trials of two jobs on a card have shown."""
        records: list[Record] = []
        index = self._indexed()
        names = sorted(index.on_card, key=self._number)
        sharing = [each for name in names if not (each := self._standings[name]).alone]
        for card in world.cards if sharing else ():
            pair = [standing for standing in sharing if standing.card == card.name]
            alike = likeness(pair[0].job) if pair else None
            alone = index.paces_alike(pair[0].job).get(card.title) if pair else None
            if alone is not None and (alike, card.title) not in self._packs:
                records += attempts.trial_of(pair, card, alone, world)
        return records

    def _settled(self, world: World) -> list[Record]:
        """Return what jobs without an attempt come to."""
        index = self._indexed()
        found: dict[str, tuple[JobState, str]] = dict(index.due)
        lasting = tuple(replace(card, closed=None, speed=1.0) for card in world.cards)
        if lasting != self._fitting_cards:
            self._fitting.clear()
            self._fitting_cards = lasting
        known = self._fitting
        for needs, names in index.needs.items() if lasting else ():
            why = known[needs] if needs in known else self._never_fits(needs, names)
            if why is not None:
                found.update(dict.fromkeys(names, (JobState.INFEASIBLE, why)))
        for name in index.parked:
            wakes = self._wakes(name, world)
            if wakes is not None:
                found[name] = wakes
        for sweep, paused in index.paused.items():
            found.update(self._promoted(sweep, paused, index, is_idle=False))
        return [
            Settled(at_s=world.now_s, job=name, to=found[name][0], reason=found[name][1])
            for name in sorted(found, key=self._number)
        ]

    def _never_fits(self, needs: Needs, names: Collection[str]) -> str | None:
        job = self._standings[min(names)].job
        why = placement.never_fits(job, needs.least_room_bytes, self._fitting_cards)
        self._fitting[needs] = why
        return why

    def _wakes(self, name: str, world: World) -> tuple[JobState, str] | None:
        """Return what a PARKED job comes to by now."""
        standing, aside = self._standings[name], self._aside[name]
        job = standing.job
        if world.now_s < aside.wake_at_s or not attempts.is_in_hours(
            job.hours, world.minute_of_day
        ):
            return None
        if aside.no_room >= _NO_ROOM_TRIES:
            return JobState.INFEASIBLE, f"{standing.reason}; tried {aside.no_room} times"
        taken = self._indexed().cards
        for card in world.cards:
            if (
                card.closed is None
                and placement.suits(job, card)
                and card.room_bytes >= (standing.least_room_bytes or 0)
                and not (aside.no_room and taken[card.name])
            ):
                return JobState.QUEUED, "in line again"
        return None

    def _promoted(
        self, sweep: str, paused: Mapping[str, None], index: Index, *, is_idle: bool
    ) -> dict[str, tuple[JobState, str]]:
        """Return the member of a sweep that goes on by now, or all of them as stopped."""
        rule = self._standings[next(iter(paused))].job.milestones
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
        if not any(self._may_take_more(card) for card in open_cards):
            return []
        plan = self._planned(world)
        if plan.starts:
            return [
                Assigned(
                    at_s=world.now_s,
                    job=start.job,
                    attempt=self._standings[start.job].attempt + 1,
                    card=start.card,
                    budget_bytes=start.budget_bytes,
                    alone=start.alone,
                )
                for start in plan.starts
            ]
        index = self._indexed()
        for card in open_cards:
            if not index.cards[card.name]:  # free, and nothing in line can use it
                return self._one_more_promoted(world) or self._moved(card, world)
        return []

    def _may_take_more(self, card: Card) -> bool:
        index = self._indexed()
        return not index.cards[card.name] or any(
            not self._standings[name].alone and self._standings[name].card == card.name
            for name in index.on_card
        )

    def _planned(self, world: World) -> Plan:
        """Return where jobs go, and why and how long the others wait: once for each world."""
        if self._plan is None:
            index = self._indexed()
            self._closed = {
                needs
                for needs in index.lines
                if needs.hours is not None
                and not attempts.is_in_hours(needs.hours, world.minute_of_day)
            }
            residents: dict[str, list[Resident]] = {card.name: [] for card in world.cards}
            for name in sorted(index.on_card, key=self._number):
                standing = self._standings[name]
                there = _resident(standing, world, self._shares(standing, world.cards))
                residents.setdefault(standing.card or "", []).append(there)
            lines: Iterable[list[Place]] = index.lines.values()
            if self._closed:
                lines = (line for needs, line in index.lines.items() if needs not in self._closed)
            firsts = heapq.nsmallest(_CANDIDATES, lines)  # by the first of each
            cut = (line[:_ALIKE_CANDIDATES] for line in firsts)
            names = [name for _, _, name in islice(heapq.merge(*cut), _CANDIDATES)]
            candidates = [self._candidate(name, world.cards) for name in names]
            self._plan = placement.plan(candidates, world.cards, residents, world.now_s)
        return self._plan

    def _one_more_promoted(self, world: World) -> list[Record]:
        index = self._indexed()
        for sweep in sorted(index.paused):
            found = self._promoted(sweep, index.paused[sweep], index, is_idle=True)
            for name, (to, reason) in found.items():
                return [Settled(at_s=world.now_s, job=name, to=to, reason=reason)]
        return []

    def _moved(self, card: Card, world: World) -> list[Record]:
        """Return the move to a free card of the job that gains most by it, if that pays."""
        names = sorted(self._indexed().on_card, key=self._number)
        moves = [
            attempts.move_of(standing, self._indexed().speeds_of(standing), card, world)
            for standing in map(self._standings.__getitem__, names)
        ]
        best = max((move for move in moves if move), key=lambda move: move[0], default=None)
        return [best[1]] if best else []

    def _candidate(self, name: str, cards: Sequence[Card]) -> Candidate:
        standing = self._standings[name]
        job = standing.job
        return Candidate(
            name=name,
            priority=job.priority,
            queued_at_s=self._aside[name].queued_at_s or standing.since_s,
            seconds=self._seconds(standing, cards),
            memory_bytes=job.memory_bytes,
            measured_bytes=standing.peak_bytes
            or self._indexed().alike_bytes.get(likeness(job) or ""),
            least_room_bytes=standing.least_room_bytes,
            nodes=job.nodes,
            card=job.card,
            shares=self._shares(standing, cards),
        )

    def _shares(self, standing: Standing, cards: Sequence[Card]) -> dict[str, str]:
        paces, left = self._indexed().paces_alike(standing.job), self._steps_left(standing)
        return packing.shares_of(standing.job, left, cards, paces, self._packs)

    def _steps_left(self, standing: Standing) -> int:
        return max(0, (standing.job.steps or 0) - (standing.step or 0))

    def _seconds(self, standing: Standing, cards: Sequence[Card]) -> dict[str, float]:
        """Return what is left of a job by card, as measured of it, or of another of its sweep."""
        speeds = self._indexed().speeds_of(standing)
        if standing.job.steps is None:
            return {}
        left = self._steps_left(standing)
        by_card = {card.name: speeds.get(card.title) for card in cards}
        return {name: left / speed for name, speed in by_card.items() if speed}


def _resident(standing: Standing, world: World, shares: Mapping[str, str]) -> Resident:
    seen = attempts.seen_of(standing, world)
    eta_s = None if seen is None else seen.eta_s
    return Resident(
        name=standing.job.name,
        budget_bytes=standing.budget_bytes or 0,
        ends_at_s=None if eta_s is None else world.now_s + eta_s,
        ran_s=max(0.0, world.now_s - standing.since_s),
        alone=standing.alone,
        shares=shares.get(standing.card or ""),
    )
