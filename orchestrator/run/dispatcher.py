"""Connects the queue of jobs to a run: what is seen of its slots goes in, which slots begin and
which come to rest comes out.

A job has one slot, with its name. A turn decides in memory, stores what has changed at once, and
only then tells what is to be done: a head that is killed before decides the same again. Decides
nothing itself (`jobs/queue.py`), and starts nothing (`supervisor.py`).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from orchestrator.config.schema import Config
from orchestrator.control.queue import NoMessageError, message_of
from orchestrator.core.placement import SlotPlan, Target
from orchestrator.core.slot import Slot
from orchestrator.errors import ConfigError, UsageError
from orchestrator.jobs.codec import event_of
from orchestrator.jobs.lifecycle import IllegalRecordError
from orchestrator.jobs.model import (
    ENDED,
    ON_CARD,
    AttemptBegun,
    AttemptEnded,
    AttemptRecalled,
    AttemptStatus,
    Card,
    Cause,
    HeadAway,
    Job,
    JobState,
    Record,
    SettingsChosen,
    Standing,
    StateChanged,
    UserOrder,
    World,
)
from orchestrator.jobs.queue import Queue
from orchestrator.jobs.sampler import settings_for
from orchestrator.record.command_file import Incoming, Row
from orchestrator.record.events import EventLog
from orchestrator.record.jobs import QueueSnapshot
from orchestrator.record.store import RunStore
from orchestrator.run.attempts_seen import AttemptsSeen
from orchestrator.run.background import Background
from orchestrator.run.job_files import JobFiles
from orchestrator.run.job_plans import JobPlans
from orchestrator.run.prediction import least_room_of
from orchestrator.view.jobs import summary_line
from workers.units import MIB

#: A card on which other programs leave a job too little memory is tried again after so long.
_TAKEN_S: Final = 300.0

#: A line about all jobs is made so often.
_HEADLINE_EVERY_S: Final = 1.0

#: With less room on the disk of the run folder nothing new is started.
_LEAST_FREE_BYTES: Final = 64 * MIB

#: A longer time between two turns was one without a head, or the PC was suspended.
_AWAY_S: Final = 60.0

#: A card on which so many attempts, one after the other, have ended with a driver fault gets no job
#: for so long; then it is tried by one. Less is the fault of a program that hides the card itself.
_FAULTS: Final = 2
_FAULTY_S: Final = 600.0

#: Viewers are told so often why jobs wait.
_OUTLOOK_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """An attempt at a job begins in its slot."""

    plan: SlotPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The slot saves, and its process ends."""

    slot: str
    why: str


Order: TypeAlias = Begin | Rest


@dataclass(kw_only=True, eq=False)
class Dispatcher:
    """The queue of one run."""

    folder: Path
    """Of the queue: its store, its commands, and a folder for each job."""
    config: Config
    """Of the run, scaled if it was."""
    target: Target
    events: EventLog
    store: RunStore
    queue: Queue
    """As it was stored; it changes in memory, and each turn stores what has changed."""
    stays: bool = False
    """Whether the run goes on when nothing is left to do."""
    before_unix_s: float | None = None
    """When the head before was last at work."""

    problem: str | None = field(default=None, init=False)
    """Why nothing can be decided now: the queue cannot be stored."""

    def __post_init__(self) -> None:
        self._records: list[Record] = []
        """Taken by the queue, and not told of yet: the queue may not be stored."""
        self._orders: list[Order] = []
        """What follows from them."""
        self._rows: list[Row] = []
        """Of commands: those that they came with."""
        self._at_s = max((each.since_s for each in self.queue.standings.values()), default=0.0)
        self._unix_s = self._at_s
        self._incoming = Incoming(self.folder)
        self._has_looked = False
        """Whether commands were read: a queue that is over may get more of them."""
        self._unplanned: dict[str, str] = {}
        """Jobs on a card whose slot cannot be made, and why."""
        self._outlook_at_s = 0.0
        self._told: Mapping[str, AttemptStatus] = {}
        """What was seen last of jobs on cards."""
        self._files = JobFiles(self.folder, one_machine=self.target.one_machine, events=self.events)
        self._plans = JobPlans(
            self.config,
            self.target,
            run_id=self.folder.parent.name,
            folder_of=self._files.of,
        )
        on_card = self.target.device != "cpu"
        self._attempts = AttemptsSeen(
            has_cards={
                node: on_card and bool(budget.gpus) for node, budget in self._plans.budgets.items()
            }
        )
        self._threads = Background(1, "prediction")
        self._choosing: tuple[Job, Future[dict[str, int]]] | None = None
        """A member of a sweep with its settings, and what it needs at least of a card."""
        self._least_room_of = partial(least_room_of, config=self.config, on_card=on_card, known={})
        self._faults: dict[str, list[str]] = {}
        """By card, the jobs whose attempts have ended with a driver fault since any other end."""
        self._closed: dict[str, tuple[float, str]] = {}
        """Until when a card gets no job, and why: other programs have it, or its driver fails."""
        self._headline = -math.inf, ""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to do any more, and all that was decided is stored."""
        is_over = self.queue.is_over and not self.stays
        return self._has_looked and self.problem is None and is_over

    def resumed(self) -> Iterator[SlotPlan]:
        """Yield the slot of each job that has a place on a card, for a head that begins."""
        for standing in self.queue.standings.values():
            if standing.state in ON_CARD and (plan := self._planned(standing)) is not None:
                yield plan

    def rests(self) -> frozenset[str]:
        """Return the jobs whose attempts are to come to rest."""
        return frozenset(it for it in self.queue.on_card if self.queue.standings[it].recalled_to)

    def at_work(self) -> frozenset[str]:
        """Return the jobs that have a place on a card, and are to keep it."""
        return self.queue.on_card - self.rests()

    def turn(
        self, slots: Mapping[str, Slot], nodes: Collection[str], now_unix_s: float
    ) -> tuple[Order, ...]:
        """Take in what has happened and what users ask, decide, and return what is to be done.

        What is returned is stored. While that cannot be, nothing more is decided.
        """
        # A clock that is set back must not stop all that waits for a time.
        self._at_s, self._unix_s = self._at_s + max(0.0, now_unix_s - self._unix_s), now_unix_s
        away_s = 0.0 if self.before_unix_s is None else now_unix_s - self.before_unix_s
        self.before_unix_s = now_unix_s
        try:
            if self.problem is None:
                self._decide(slots, nodes, away_s)
            orders = self._stored()
        except OSError as error:
            self.problem = f"the queue of jobs cannot be stored: {error}"
            return ()
        self.problem, self._has_looked = None, True
        if self._at_s - self._outlook_at_s >= _OUTLOOK_EVERY_S:
            self._outlook_at_s = self._at_s
            self.store.outlook(map(self.queue.shown, self.queue.standings))
        return orders

    def note_ends(self, slots: Mapping[str, Slot], nodes: Collection[str]) -> None:
        """Store which attempts have ended while the run does: a program that is done must not be
        started again by the next head. Commands are not heard any more.
        """
        with suppress(OSError):
            found = self.queue.next_records(self._world(slots, nodes))
            self._take(record for record in found if isinstance(record, AttemptEnded))
            self._stored()

    def _decide(self, slots: Mapping[str, Slot], nodes: Collection[str], away_s: float) -> None:
        """Have the queue take all that follows by now."""
        if away_s > _AWAY_S:
            self._take([HeadAway(at_s=self._at_s, away_s=away_s)])
        self._take_commands()
        world = self._world(slots, nodes)
        while records := self._chosen() or self.queue.next_records(world):
            self._take(records)
            # Not all of it anew: what is to begin just now has a slot that has ended before.
            seen = {**world.seen, **self._never_begun()}
            cards = tuple(self._cards(nodes))
            world = replace(world, cards=cards, seen=seen, left=dict(self._left()))

    def _stored(self) -> tuple[Order, ...]:
        """Store what the queue has taken, and return what follows from it.

        Raises:
            OSError: It is not stored; the next call tries again.
        """
        self.store.queue(self.queue)
        if not self.store.commit():
            raise OSError(self.store.problem)
        self._incoming.remove(self._rows)
        for record in self._records:
            event, slot, details = event_of(record)
            self.events.write(event, slot, **details)
            match record:
                case StateChanged(to=JobState.STOPPED | JobState.DONE):
                    self._files.drop_state(record.job)
        orders = tuple(self._orders)
        for taken in (self._rows, self._records, self._orders):
            taken.clear()
        return orders

    def _chosen(self) -> tuple[Record, ...]:
        """Return the settings of the next member of a sweep that wants some, once its memory is
        predicted: the head goes on meanwhile.

        One more than there are cards is at work, so that none of them waits for the next answer.
        """
        if self._choosing is None:
            for member, before in self.queue.unchosen(len(self._plans.cards(())) + 1):
                try:
                    job = member.with_settings(settings_for(member, before))
                except UsageError as error:
                    why, failed = f"its settings cannot be chosen: {error}", JobState.FAILED
                    return (StateChanged(at_s=self._at_s, job=member.name, to=failed, reason=why),)
                self._choosing = job, self._threads.submit(self._least_room_of, [job])
                break
        if self._choosing is None or not self._choosing[1].done():
            return ()
        (job, future), self._choosing = self._choosing, None
        if self.queue.standings[job.name].state is not JobState.WAITING:
            return ()  # a user has said otherwise meanwhile
        least = {} if future.exception() is not None else future.result()
        return (
            SettingsChosen(
                at_s=self._at_s,
                job=job.name,
                settings=job.settings,
                least_bytes=least.get(job.name),
            ),
        )

    def _take_commands(self) -> None:
        """Have the queue take all that users ask; what it refuses changes nothing."""
        self._rows = self._incoming.rows()
        for row in self._rows:
            try:
                message = message_of(row.content)
            except NoMessageError as error:
                self.events.write("job_message_refused", reason=str(error))
                continue
            for record in message:
                try:
                    self._take([replace(record, at_s=self._at_s)])
                except IllegalRecordError as error:
                    self.events.write("job_message_refused", reason=str(error))

    def _take(self, records: Iterable[Record]) -> None:
        """Have the queue take records, and note what follows from them.

        Raises:
            IllegalRecordError: One cannot be, and has changed nothing.
        """
        for record in records:
            if isinstance(record, AttemptEnded) and record.job in self.queue.standings:
                self._note_end(record, self.queue.standings[record.job])
            self.queue.apply(record)
            self._records.append(record)
            self._orders.extend(self._orders_of(record))

    def _note_end(self, ended: AttemptEnded, standing: Standing) -> None:
        """Close the card of an attempt for a while if the card, or its driver, is what fails."""
        card = str(standing.card)
        if ended.cause is None:
            return
        if ended.cause is not Cause.DRIVER:
            self._faults.pop(card, None)
            return
        jobs = self._faults.setdefault(card, [])
        jobs.append(ended.job)
        if len(jobs) >= _FAULTS and (standing.job.command is None or len(set(jobs)) > 1):
            why = (
                f"{len(jobs)} attempts, one after the other, ended with a driver fault "
                f"({ended.text[-200:]}); look for Xid in dmesg; it is tried again every "
                f"{_FAULTY_S / 60:.0f} min"
            )
            self._closed[card] = self._at_s + _FAULTY_S, why
            self.events.write("card_closed", card=card, reason=why)

    def _cards(self, nodes: Collection[str]) -> Iterator[Card]:
        for card in self._plans.cards(nodes):
            until_s, why = self._closed.get(card.name, (-math.inf, ""))
            yield replace(card, closed=card.closed or why) if self._at_s < until_s else card

    def _orders_of(self, record: Record) -> Iterator[Order]:
        match record:
            case AttemptBegun():
                self._attempts.begin(record.job)
                plan = self._planned(self.queue.standings[record.job])
                if plan is not None:
                    yield Begin(plan=plan)
            case AttemptRecalled() | UserOrder():
                standing = self.queue.standings[record.job]
                to, why = standing.recalled_to, standing.reason
                if to is not None and standing.state in ON_CARD:
                    # A slot says HELD itself.
                    yield Rest(slot=record.job, why=why if to is JobState.HELD else f"{to}: {why}")
            case AttemptEnded(cause=None):
                # After a node was lost nothing was recalled, and its slot must not come back.
                yield Rest(slot=record.job, why=self.queue.standings[record.job].reason)

    def _world(self, slots: Mapping[str, Slot], nodes: Collection[str]) -> World:
        local = datetime.fromtimestamp(self._unix_s).astimezone()
        on_card = {name: self.queue.standings[name] for name in self.queue.on_card}
        seen = self._attempts.look(on_card, slots, self._at_s)
        for name, each in seen.items():
            if each.taken is not None:
                self._closed[str(on_card[name].card)] = self._at_s + _TAKEN_S, each.taken
        self._told = {name: each for name, each in seen.items() if each.step is not None}
        return World(
            now_s=self._at_s,
            minute_of_day=60 * local.hour + local.minute,
            cards=tuple(self._cards(nodes)),
            seen={**seen, **self._never_begun()},
            left=dict(self._left()),
            disk_full=self._disk_full(),
        )

    def _never_begun(self) -> Mapping[str, AttemptStatus]:
        """Return the end of each job whose slot cannot be made."""
        return {
            name: AttemptStatus(
                job=name,
                attempt=self.queue.standings[name].attempt,
                cause=Cause.BAD_CONFIG,
                text=why,
            )
            for name, why in self._unplanned.items()
        }

    def _left(self) -> Iterator[tuple[str, tuple[JobState, str]]]:
        """Yield what is known of the files of jobs that are SAVING."""
        for name in self.queue.saving:
            standing = self.queue.standings[name]
            spec_of = partial(self._plans.spec_of, standing)
            try:
                told = self._files.left_by(standing.job, standing.attempt, spec_of, self._at_s)
            except ConfigError as error:
                told = JobState.FAILED, str(error)
            if told is not None:
                yield name, told

    def _disk_full(self) -> str | None:
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes >= _LEAST_FREE_BYTES:
            return None
        return f"the disk of {self.folder} is full: {free_bytes / MIB:.0f} MiB left"

    def _planned(self, standing: Standing) -> SlotPlan | None:
        """Return the slot of a job that has a place; `None`: it cannot be, and the job ends so."""
        self._unplanned.pop(standing.job.name, None)
        try:
            return self._plans.plan_of(standing)
        except ConfigError as error:
            self._unplanned[standing.job.name] = str(error)
            return None

    def headline(self) -> str:
        """Return how many jobs are in which state, and when the last may end, in a line."""
        if self._at_s - self._headline[0] >= _HEADLINE_EVERY_S:
            standings = tuple(
                replace(each, step=told.step) if (told := self._told.get(name)) else each
                for name, each in self.queue.standings.items()
            )
            etas_s = {name: told.eta_s for name, told in self._told.items() if told.eta_s}
            now = QueueSnapshot(
                standings=standings, now_s=self._at_s, held=self.queue.held, etas_s=etas_s
            )
            self._headline = self._at_s, summary_line(now)
        return self._headline[1]

    def notices(self) -> Iterator[str]:
        """Yield a line for what a person may want to do something about."""
        yield from filter(None, (self.problem, self._incoming.problem))
        for name, why in self._files.problems.items():
            if self.queue.standings[name].state not in ENDED:
                yield f"job {name}: {why}"
        for card, (until_s, why) in self._closed.items():
            if self._at_s < until_s:
                yield f"{card} gets no job: {why}"
        if self.queue.held is not None:
            yield f"the queue is held: {self.queue.held}; `jobs release` lets it go on"

    def shortfalls(self) -> Iterator[str]:
        """Yield a sentence for each job that did not end well, once the run has ended."""
        for name, standing in self.queue.standings.items():
            if standing.state not in {JobState.DONE, JobState.STOPPED, JobState.CANCELLED} and (
                standing.state in ENDED or self.queue.is_over
            ):
                yield f"job {name}: {standing.state}: {standing.reason}"
