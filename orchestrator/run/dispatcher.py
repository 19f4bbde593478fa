"""Connects the queue of jobs to a run. In goes the state of the slots; out comes which slots begin,
with which plans, and which must rest.

A job has one slot, named after the job; a team has one for each of its cards. A turn decides in
memory, stores at once what has changed, and only then returns what to do. That follows from how the
jobs stood before and stand now. A head that is killed before it has stored a turn decides the same
again. Decides nothing itself (`jobs/queue.py`), and starts nothing (`supervisor.py`).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Final

from orchestrator.config.gpu_specs import PROFILES
from orchestrator.config.schema import Config
from orchestrator.control.queue import NoMessageError, message_of
from orchestrator.core.placement import (
    RAY_STEPS,
    NodeBudget,
    SlotPlan,
    Target,
    node_budget,
    plan_slots,
)
from orchestrator.core.slot import Slot
from orchestrator.errors import ConfigError, UsageError
from orchestrator.jobs.lifecycle import SAVES, Event
from orchestrator.jobs.model import (
    ENDED,
    ON_CARD,
    AttemptStatus,
    Card,
    Job,
    JobState,
    Sent,
    Settings,
    Standing,
    World,
)
from orchestrator.jobs.queue import COMMAND_LEASE_S, Queue, decide, outlook, with_ends
from orchestrator.jobs.sampler import settings_for
from orchestrator.jobs.sweep import FOLDER, job_config
from orchestrator.record.command_file import Incoming
from orchestrator.record.command_file import Row as CommandRow
from orchestrator.record.events import EventLog
from orchestrator.record.jobs import QueueSnapshot
from orchestrator.record.model import Row
from orchestrator.record.store import RunStore
from orchestrator.run.attempts_seen import AttemptsSeen
from orchestrator.run.background import Background
from orchestrator.run.job_files import JobFiles
from orchestrator.run.prediction import least_room_of
from orchestrator.view.jobs import summary_line
from workers.command.code import CODE
from workers.command.launch import ATTEMPT, JOB_DIR, RESUME
from workers.messages import Cause
from workers.settings import CommandSpec, WorkerSpec
from workers.units import MIB

#: The head's copy of the state of a job in one of these is not needed any more.
_NEEDS_NO_STATE: Final = frozenset({JobState.STOPPED, JobState.DONE})

#: No attempt starts while the disk of the run folder has less free space than this.
_LEAST_FREE_BYTES: Final = 64 * MIB

#: Seconds between two updates of why jobs wait, for viewers.
_OUTLOOK_EVERY_S: Final = 5.0


@dataclass(kw_only=True, eq=False)
class Dispatcher:
    """The queue of one run, in the turns of its head."""

    folder: Path
    """The folder of the queue: the commands to it, and a folder for each job."""
    config: Config
    """The configuration of the run; scaled, if the run is."""
    target: Target
    events: EventLog
    store: RunStore
    queue: Queue
    """As it was last stored."""
    stays: bool = False
    """Whether the run continues when nothing is left to do."""
    before_unix_s: float | None = None
    """When a head last worked on this run, Unix seconds; `None`: none has."""

    problem: str | None = field(default=None, init=False)
    """Why the queue cannot be stored, so that nothing is decided; `None`: it can be."""

    def __post_init__(self) -> None:
        self._at_s = max((each.since_s for each in self.queue.standings.values()), default=0.0)
        self._unix_s = self._at_s
        self._away_s = 0.0
        """The longest time between two turns since the queue was last stored."""
        self._incoming = Incoming(self.folder)
        self._has_read_commands = False
        """Commands are read once before a run is over: they may add work to its queue."""
        self._unplanned: dict[str, AttemptStatus] = {}
        """Keyed by job: the end of a job that has a place, but whose slots cannot be planned."""
        self._outlook_at_s = 0.0
        self._files = JobFiles(self.folder, one_machine=self.target.one_machine, events=self.events)
        self._plans = JobPlans(
            config=self.config,
            target=self.target,
            run_id=self.folder.parent.name,
            folder_of=self._files.of,
        )
        self._attempts = AttemptsSeen(
            rooms_bytes={
                card.name: card.room_bytes
                for card in self._plans.cards(())
                if self.target.device != "cpu" and self.config.nodes[card.node].gpus
            }
        )
        self._threads = Background(1, "prediction")
        self._choosing: tuple[Job, Future[dict[str, int]]] | None = None
        """A member of a sweep with its settings, and the bytes that a card must have for it."""
        self._least_room_of = partial(
            least_room_of, config=self.config, target=self.target, known={}
        )

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do, and every decision is stored."""
        is_over = self.queue.is_over and not self.stays
        return self._has_read_commands and self.problem is None and is_over

    def resumed(self) -> Iterator[SlotPlan]:
        """Yield the slots of each job that has a place on a card, for a head that resumes a run."""
        for standing in self._on_card().values():
            yield from self._planned(standing)

    def _on_card(self) -> dict[str, Standing]:
        return self.queue.in_states(ON_CARD)

    def rests(self) -> dict[str, str]:
        """Return why slots must rest: their job has no place on a card, or must leave it."""
        found = dict(self._attempts.stranded)
        for standing in self.queue.standings.values():
            to, why = standing.recalled_to, standing.reason
            if standing.state not in ON_CARD or to is JobState.HELD:  # a slot says HELD itself
                found |= dict.fromkeys(standing.places, why)
            elif to is not None:
                found |= dict.fromkeys(standing.places, f"{to}: {why}")
        return found

    def turn(
        self, slots: Mapping[str, Slot], nodes: Collection[str], now_unix_s: float
    ) -> tuple[SlotPlan, ...]:
        """Process what has happened and what users ask, decide, and return the slots in which an
        attempt begins.

        The returned slots and the answer of `rests` are stored decisions. While the queue cannot be
        stored, nothing changes: each turn decides again.
        """
        # If the clock is set back, whatever waits for a time must not wait longer.
        self._at_s, self._unix_s = self._at_s + max(0.0, now_unix_s - self._unix_s), now_unix_s
        if self.before_unix_s is not None:
            self._away_s = max(self._away_s, now_unix_s - self.before_unix_s)
        self.before_unix_s = now_unix_s
        try:
            rows, refused = self._incoming.rows(), list[Event]()
            sent, chosen = tuple(_sent(rows, refused)), dict(self._chosen())
            world = replace(
                self._world(slots, nodes), sent=sent, chosen=chosen, away_s=self._away_s
            )
            queue, events = decide(self.queue, world)
            if self._at_s - self._outlook_at_s >= _OUTLOOK_EVERY_S:
                self._outlook_at_s = self._at_s
                self.store.outlook(outlook(queue, world))
            begins = (*self._stored(queue, [*refused, *events], rows), *self._restarts())
        except OSError as error:
            self.problem = f"the queue of jobs cannot be stored: {error}"
            return ()
        self.problem, self._has_read_commands, self._away_s = None, True, 0.0
        return begins

    def note_ends(self, slots: Mapping[str, Slot], nodes: Collection[str]) -> None:
        """Store which attempts have ended during the end of the run: the next head must not start a
        finished program again. Commands are not read any more.
        """
        with suppress(OSError):
            tuple(self._stored(*with_ends(self.queue, self._world(slots, nodes))))

    def _stored(
        self, queue: Queue, events: Sequence[Event], rows: Sequence[CommandRow] = ()
    ) -> Iterator[SlotPlan]:
        """Store what a turn has decided, and yield the slots in which an attempt begins.

        Raises:
            OSError: The store cannot be written.
        """
        self.store.queue(queue)
        if not self.store.commit():
            raise OSError(self.store.problem)
        self._incoming.remove(rows)
        for event in events:
            self.events.write(event.name, event.job, **event.details)
        before, self.queue = self.queue.standings, queue
        for name, now in queue.standings.items():
            was = before.get(name)
            if now.state in _NEEDS_NO_STATE and was is not None and was.state is not now.state:
                self._files.drop_state(name)
            if now.state in ON_CARD and (was is None or was.attempt != now.attempt):
                for slot in now.places:
                    self._attempts.begin(slot)
                yield from self._planned(now)

    def _restarts(self) -> Iterator[SlotPlan]:
        """Yield the quarantined members of teams that start again while others work."""
        for standing in self._on_card().values():
            may_begin = standing.job.is_team and standing.recalled_to is None
            if may_begin and (begin := set(self._attempts.restarts(standing))):
                yield from (it for it in self._planned(standing) if it.spec.slot in begin)

    def _chosen(self) -> Iterator[tuple[str, tuple[Settings, int | None] | str]]:
        """Yield the settings of the next member of a sweep that waits for some, once a thread has
        predicted its memory.

        Of a sweep, one member more than there are cards is ready: no card waits for a prediction.
        """
        if self._choosing is None:
            for member, before in self.queue.unchosen(len(self._plans.cards(())) + 1):
                try:
                    job = member.with_settings(settings_for(member, before))
                except UsageError as error:
                    yield member.name, f"its settings cannot be chosen: {error}"
                    return
                self._choosing = job, self._threads.submit(self._least_room_of, [job])
                break
        if self._choosing is None or not self._choosing[1].done():
            return
        (job, future), self._choosing = self._choosing, None
        least = {} if future.exception() is not None else future.result()
        yield job.name, (job.settings, least.get(job.name))

    def _world(self, slots: Mapping[str, Slot], nodes: Collection[str]) -> World:
        local = datetime.fromtimestamp(self._unix_s).astimezone()
        seen = self._attempts.observe(self._on_card(), slots, self._at_s)
        return World(
            now_s=self._at_s,
            minute_of_day=60 * local.hour + local.minute,
            cards=self._plans.cards(nodes),
            statuses=seen | self._unplanned,
            left=dict(self._left()),
            disk_full=self._disk_full(),
        )

    def _left(self) -> Iterator[tuple[str, tuple[JobState, str]]]:
        """Yield for SAVING jobs whether their files are complete, as far as that is known."""
        for name, standing in self.queue.in_states({JobState.SAVING}).items():
            spec_of = partial(self._plans.spec_of, standing)
            try:
                result = self._files.left_by(standing.job, standing.attempt, spec_of, self._at_s)
            except ConfigError as error:
                result = JobState.FAILED, str(error)
            if result is not None:
                yield name, result

    def _disk_full(self) -> str | None:
        free_bytes = shutil.disk_usage(self.folder).free
        if free_bytes >= _LEAST_FREE_BYTES:
            return None
        return f"the disk of {self.folder} is full: {free_bytes / MIB:.0f} MiB left"

    def _planned(self, standing: Standing) -> tuple[SlotPlan, ...]:
        """Return the plans of a job's slots; none if they are impossible, and then the job ends."""
        self._unplanned.pop(standing.job.name, None)
        try:
            return tuple(self._plans.plans_of(standing))
        except ConfigError as error:
            self._unplanned[standing.job.name] = AttemptStatus(
                attempt=standing.attempt, cause=Cause.BAD_CONFIG, text=str(error)
            )
            return ()

    def headline(self, rows: Sequence[Row]) -> str:
        """Return a line that says how many jobs are in each state, and when the last may end."""
        now = QueueSnapshot(
            standings=tuple(self.queue.standings.values()),
            now_s=self._at_s,
            held=self.queue.facts.held,
            rows={row.slot: row for row in rows},
        )
        return summary_line(now)

    def notices(self) -> Iterator[str]:
        """Yield a line for each condition that a person may want to act on."""
        yield from filter(None, (self.problem, self._incoming.problem))
        for name, standing in self.queue.in_states({JobState.SAVING}).items():
            if standing.reason != SAVES:
                yield f"job {name}: {standing.reason}"
        for card, (until_s, why) in self.queue.facts.closed.items():
            if self._at_s < until_s:
                yield f"{card} gets no job: {why}"
        if (held := self.queue.facts.held) is not None:
            yield f"the queue is held: {held}; `jobs release` lets it go on"

    def shortfalls(self) -> Iterator[str]:
        """Yield a sentence for each job that did not end well, once the run has ended."""
        for name, standing in self.queue.standings.items():
            if standing.state not in {JobState.DONE, JobState.STOPPED, JobState.CANCELLED} and (
                standing.state in ENDED or self.queue.is_over
            ):
                yield f"job {name}: {standing.state}: {standing.reason}"


def _sent(rows: Sequence[CommandRow], refused: list[Event]) -> Iterator[Sent]:
    """Yield the messages of users; add an event to `refused` for each row that is no message."""
    for row in rows:
        try:
            yield from message_of(row.content)
        except NoMessageError as error:
            refused.append(Event("job_message_refused", None, {"reason": str(error)}))


@dataclass(frozen=True, kw_only=True)
class JobPlans:
    """Makes the cards of a run and the plans of its jobs: budgets, reservations, and the paths of
    other jobs' folders in commands and settings.
    """

    config: Config
    target: Target
    run_id: str
    folder_of: Callable[[str], Path]
    """Returns the folder of the job of this name."""

    @cached_property
    def budgets(self) -> dict[str, NodeBudget]:
        """The budget of each node, keyed by node."""
        nodes = self.config.nodes.items()
        return {name: node_budget(name, node, self.config) for name, node in nodes}

    def cards(self, nodes: Collection[str]) -> tuple[Card, ...]:
        """Return the cards of the configuration; a card is closed unless its node is in `nodes`."""
        return tuple(
            Card(
                name=name if node.gpus <= 1 else f"{name}:{index}",
                node=name,
                title=PROFILES[node.gpu].product if node.gpu in PROFILES else node.gpu,
                room_bytes=self.budgets[name].card_budget_bytes,
                speed=_speed(node.gpu, self.budgets[name]),
                closed=None if name in nodes else f"{name} is not there",
            )
            for name, node in self.config.nodes.items()
            for index in range(max(1, node.gpus))
        )

    def plans_of(self, standing: Standing) -> Iterator[SlotPlan]:
        """Yield the plan of each slot of a job that has a place, or had one.

        Raises:
            ConfigError: The configuration of the job is not possible any more.
        """
        job = standing.job.with_texts(
            lambda text: FOLDER.sub(lambda named: str(self.folder_of(named[1])), text)
        )
        config = job_config(self.config, job)
        plans = {plan.spec.slot: plan for plan in plan_slots(config, self.target)}
        for slot, card in standing.places.items():
            node, _, index = card.partition(":")
            plan = plans[f"{node}/{index or 0}"]
            yield self._plan(replace(standing, job=job), slot, plan, config.workload.seed)

    def _plan(self, standing: Standing, slot: str, plan: SlotPlan, seed: int) -> SlotPlan:
        job, node, team = standing.job, plan.spec.node, plan.spec.team
        share, whole = self.budgets[node], self.budgets[node].card_budget_bytes
        budget_bytes = whole if standing.alone else standing.budget_bytes or 0
        part = min(1.0, budget_bytes / whole)
        duty = None if share.duty is None else share.duty * share.workers_per_card
        if duty is not None and duty < 1 and not standing.alone:
            duty /= 2  # two jobs share the card
        spec = replace(
            plan.spec,
            slot=slot,
            team=team and replace(team, members=tuple(f"{job.name}/{it}" for it in team.members)),
            budget_bytes=budget_bytes,
            card_budget_bytes=whole,
            duty=None if duty is None or duty >= 1 else duty,
            # The same on every card of a machine: it sets the threads, and so a sum's last bit.
            workers_on_host=sum(max(1, each.gpus) for each in self.budgets.values())
            if self.target.one_machine
            else max(1, share.gpus),
            workload=replace(plan.spec.workload, seed=seed),
            run_id=self.run_id,
            command=job.command and self._command(job, job.command, standing.attempt, node),
        )
        return replace(
            plan,
            spec=spec,
            num_cpus=share.cpus_per_worker * max(1, int(share.workers_per_card * part)),
            num_gpus=math.floor(RAY_STEPS * part) / RAY_STEPS if share.gpus else 0.0,
        )

    def spec_of(self, standing: Standing) -> WorkerSpec:
        """Return the `WorkerSpec` of the first slot of a job; see `plans_of`."""
        return next(self.plans_of(standing)).spec

    def _command(self, job: Job, command: CommandSpec, attempt: int, node: str) -> CommandSpec:
        """Return a command with the environment and the lease of its attempt."""
        env = {**command.env, ATTEMPT: str(attempt)}
        if attempt > 1:
            env[RESUME] = "1"
        if job.code is not None:
            env[CODE] = job.code
        if self.target.one_machine:
            env[JOB_DIR] = str(self.folder_of(job.name))
        # The head's own PC cannot lose its connection to the head.
        is_remote = not self.target.one_machine and node != self.config.head_node
        return replace(command, lease_s=COMMAND_LEASE_S if is_remote else None, env=env)


def _speed(gpu: str, budget: NodeBudget) -> float:
    """Return the rated speed of a card, TFLOP/s in the number type of its node; 1 if unknown."""
    profile = PROFILES.get(gpu)
    return 1.0 if profile is None else profile.peak_tflops(budget.dtype)
