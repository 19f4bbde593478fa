"""Runs the lifecycle: owns the clock, polls the fleet, feeds events, performs commands, informs
watchers.

A turn processes what has happened, stores it, and only then sends orders: a head that is killed has
never ordered what its store does not know. The user's commands arrive as files beside the store;
the turn that judges them stores them with their answers. Decides nothing about a slot
(`lifecycle.py`), about nodes (`node_watch.py`) or where slots go (`placement.py`), only when a run
begins to count and when it ends. One thread, no callbacks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.config.schema import Config
from orchestrator.control.slots import EFFECTS, Answer, CommandRefusedError, command_of, events_of
from orchestrator.core import circuit_breaker, lifecycle, run_outcome
from orchestrator.core import slot as slots
from orchestrator.core.fleet import ActorUnreachable, Fleet, PollResult, StatusReceived
from orchestrator.core.memory_shares import MemoryShares
from orchestrator.core.placement import SlotPlan, listening_at
from orchestrator.core.slot import Event, Phase, Slot
from orchestrator.errors import PreflightError, UsageError
from orchestrator.record.command_file import Incoming, Row
from orchestrator.record.events import EventLog
from orchestrator.record.model import Snapshot
from orchestrator.record.output import OutputFiles
from orchestrator.record.store import SAMPLE_EVERY_S, RunStore, SlotRecord
from orchestrator.run.dispatcher import Dispatcher
from orchestrator.run.node_watch import NodeWatch
from orchestrator.run.resume import Past
from orchestrator.run.run_dir import STATES, CheckpointKeeper
from orchestrator.run.snapshot import Meter, row_of
from orchestrator.run.team import Team, is_finished
from orchestrator.view.live import Watcher
from workers.messages import Begin, Status

#: Longest wait for a status: Ctrl-C and deadlines may be noticed late by this time.
_WAIT_S = 0.1


#: Seconds between two runs of an action, at least. Without watchers, snapshots are made for the
#: store's samples alone; it times them by another clock, hence the 10 ms.
_EVERY_S = {
    "look at nodes": 1.0,
    "show": 0.25,
    "sample": SAMPLE_EVERY_S + 0.01,
    "dispatch": 0.2,
}

#: A turn that is later than `_SUSPENDED_S` shows that this process was suspended. For `_CATCH_UP_S`
#: after it, elapsed time counts against no slot.
_SUSPENDED_S = 3.0
_CATCH_UP_S = 2.0

#: A node is in use while a worker of it has reported within this time, even if the node does not
#: answer. Short enough to notice a lost node within 10 s.
_HEARD_WITHIN_S = 3.0

#: A slot in one of these phases gets no further process by itself.
_OVER = frozenset({Phase.QUARANTINED, Phase.DONE})

_TICK = slots.Tick()
_NOT_TOGETHER = "another member of its team has done all steps"

_GAPS = "the records of this run have gaps: they could not be written for a while"


class Clock:
    """The clock of this machine; tests derive others."""

    def monotonic_s(self) -> float:
        """Seconds that never jump back; every duration and deadline is measured in them."""
        return time.monotonic()

    def unix_s(self) -> float:
        """Seconds since 1970, for a person to read; may jump."""
        return time.time()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """The records and the views of a run.

    A full disk stops none of them; `problems` says what is wrong.
    """

    watchers: Sequence[Watcher]
    events: EventLog
    store: RunStore

    def show(self, snapshot: Snapshot) -> None:
        """Show the run as it is now, and take a sample of it if one is due."""
        for watcher in self.watchers:
            watcher.update(snapshot)
        self.store.update(snapshot)

    def close(self, snapshot: Snapshot) -> None:
        """Show the run as it ended."""
        for watcher in self.watchers:
            watcher.close(snapshot)
        self.store.update(snapshot, at_once=True)
        self.store.incomplete |= not self.store.commit()  # no later turn can

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each record that cannot be written now; else one if the records have
        gaps from a time when they could not.
        """
        now = tuple(text for text in (self.store.problem, self.events.problem) if text is not None)
        return now or ((_GAPS,) * self.incomplete)

    @property
    def incomplete(self) -> bool:
        """Whether the records of this run are incomplete."""
        return self.store.incomplete or self.events.incomplete


@dataclass(kw_only=True, eq=False)
class Supervisor:
    """Runs one run from the first actor to the last status; nothing is placed before `run`."""

    past: Past
    config: Config
    """The configuration of this run; scaled, if the run is."""
    plans: Sequence[SlotPlan]
    fleet: Fleet
    outlets: Outlets
    """Receives every event, every snapshot, and every slot that changed, before anything is ordered
    because of the change.
    """
    folder: Path
    """The run folder, named by the run's id. Commands arrive there; states and output are kept
    there.
    """
    interrupted: Callable[[], bool]
    clock: Clock = field(default_factory=Clock)
    dispatcher: Dispatcher | None = None
    """Names the slots of a run of jobs; `None` for other runs."""

    workload_error: str | None = field(default=None, init=False)
    """The traceback of the last error of the workload."""

    def __post_init__(self) -> None:
        self.checkpoints = CheckpointKeeper(self.folder / STATES)
        self.output = OutputFiles(self.folder)
        self.commands = Commands(self.folder, self.outlets, self.clock)
        self._plans = {plan.spec.slot: plan for plan in self.plans}
        self._of_run: dict[str, Any] = {
            "run": self.config.run,
            "slow_step_s": slow_step_s(self.config),
            "seed": self.config.workload.seed,
            "has_counted": self.past.elapsed_s > 0,
        }
        """The fields of `Moment` that are the same during the whole run."""
        self._slots = {name: self.past.slots.get(name, Slot(slot=name)) for name in self._plans}
        self._meters = {name: Meter() for name in self._plans}
        self._recorded: dict[str, tuple[object, ...]] = {}
        """What another head must know of each slot, as it was last given to the store."""
        self._nodes = NodeWatch(self.config, self.outlets.events)
        self._shares = MemoryShares(self._plans)
        self._outbox: list[tuple[str, slots.Command]] = []
        self._changed = dict.fromkeys(self._slots)
        """Slots that have changed, or whose actor has answered, since the last turn was stored."""
        if self.dispatcher is not None:
            rests = self.dispatcher.rests()
            for name, slot in self._slots.items():
                # An earlier head may have recalled or restarted the job without telling its slot.
                usual = None if slot.orders.hold is slots.Hold.DRAIN else slot.orders.hold
                hold = slots.Hold.DRAIN if name in rests else usual
                self._slots[name] = replace(slot, orders=replace(slot.orders, hold=hold))
        self._teams: dict[tuple[str, ...], Team] = {}
        """Keyed by members; the team of a job stays for its next attempt."""
        for plan in self.plans:
            self._add_team(plan)
        self._hazards: dict[str, None] = {}
        """The hazards that trainings have reported, each once, in order."""
        self._began_s = self._last_tick_s = self._ticks_from_s = self.clock.monotonic_s()
        self._first_ready_s: float | None = None
        self._counting_since_s: float | None = None
        self._ends_at_s: float | None = None
        self._ended_s: float | None = None
        self._done_at_s = dict.fromkeys(_EVERY_S, float("-inf"))

    def _add_team(self, plan: SlotPlan) -> None:
        spec = plan.spec.team
        if spec is not None and spec.members not in self._teams:
            self._teams[spec.members] = Team(
                spec,
                plan.spec.poll_s,
                self.past.team_generation,
                self.config.run.start_timeout_s,
                self.outlets.events,
                self.outlets.store,
                may_rest=self.config.train.split == "auto",
            )

    def run(self) -> Snapshot:
        """Run to the planned end, or until interrupted, and return the last snapshot.

        Raises:
            PreflightError: A worker found that the plan can never work on its machine.
            UsageError: A worker found that settings or data can never work.
        """
        try:
            while not self._over():
                self._turn()
            self._drain()
        except BaseException:
            self._close()
            self._send_out()
            raise
        snapshot = self.snapshot()
        self._send_out()
        self.outlets.close(snapshot)
        return snapshot

    def snapshot(self) -> Snapshot:
        """Return the run as it is now."""
        now_s = self.clock.monotonic_s()
        counting_since_s = self._counting_since_s if self._counting_since_s is not None else now_s
        elapsed_s = self.past.elapsed_s + now_s - counting_since_s
        kept = (self.checkpoints.problem, self.output.problem, self.commands.problem)
        rows = tuple(
            row_of(self._plans[name], slot, self._meters[name], now_s)
            for name, slot in self._slots.items()
        )
        return Snapshot(
            run_id=self.folder.name,
            now_unix_s=self.clock.unix_s(),
            elapsed_s=min(elapsed_s, self.config.run.duration_s),
            duration_s=self.config.run.duration_s,
            starting_s=None if self._counting_since_s is not None else now_s - self._began_s,
            nodes_planned=tuple(self.config.nodes),
            nodes_seen=self._nodes.in_use(),
            rows=rows,
            notices=(
                *self._nodes.notices(),
                *self.outlets.problems,
                *filter(None, kept),
                *self._hazards,
                *(each for team in self._teams.values() for each in team.notices(self._slots)),
                *(() if self.dispatcher is None else self.dispatcher.notices()),
            ),
            jobs=None if self.dispatcher is None else self.dispatcher.headline(rows),
        )

    def shortfalls(self) -> tuple[str, ...]:
        """Return why the ended run is degraded; empty if it is good."""
        ended_s = self.clock.monotonic_s() if self._ended_s is None else self._ended_s
        rate = self.config.run.min_success_rate
        sentences = (
            run_outcome.shortfalls(self._slots.values(), self._counting_since_s, ended_s, rate)
            if self.dispatcher is None
            else tuple(self.dispatcher.shortfalls())
        )
        return (*sentences, *((_GAPS,) * self.outlets.incomplete))

    def _over(self) -> bool:
        if self.interrupted():
            return True
        if self._ends_at_s is not None and self.clock.monotonic_s() >= self._ends_at_s:
            return True
        if self.dispatcher is not None:
            return self.dispatcher.is_over
        all_over = all(slot.phase in _OVER for slot in self._slots.values())
        return all_over or any(map(self._is_finished, self._teams.values()))

    def _is_finished(self, team: Team) -> bool:
        return is_finished(self._slots[name] for name in team.members)

    def _turn(self) -> None:
        now_s = self.clock.monotonic_s()
        if self._is_time_to("look at nodes", now_s):
            for node, event in self._nodes.update(self.fleet.nodes(), self._heard_nodes(now_s)):
                for name in self._slots_of(node):
                    self._feed(name, event)
        self._hear()
        self._tick()
        self._obey()
        self._dispatch(now_s)
        for team in () if self.dispatcher is not None else self._teams.values():
            for name, why in team.surplus(self._slots):
                self._feed(name, slots.Held(hold=slots.Hold.DRAIN, why=why))
        self._quarantine_cards(now_s)
        self._begin_counting()
        self._send_out()
        self._show()

    def _slots_of(self, node: str) -> list[str]:
        return [name for name, plan in self._plans.items() if plan.spec.node == node]

    def _heard_nodes(self, now_s: float) -> set[str]:
        return {
            self._plans[name].spec.node
            for name, slot in self._slots.items()
            if slot.heard_at_s is not None and slot.heard_at_s > now_s - _HEARD_WITHIN_S
        }

    def _is_time_to(self, what: str, now_s: float) -> bool:
        if now_s - self._done_at_s[what] < _EVERY_S[what]:
            return False
        self._done_at_s[what] = now_s
        return True

    def _hear(self) -> None:
        for heard in self.fleet.wait(_WAIT_S):
            self._take(heard)

    def _moment(self) -> slots.Moment:
        now_s = self.clock.monotonic_s()
        return slots.Moment(now_s=now_s, ends_at_s=self._ends_at_s, **self._of_run)

    def _tick(self) -> None:
        now_s = self.clock.monotonic_s()
        if now_s - self._last_tick_s > _SUSPENDED_S:
            self._ticks_from_s = now_s + _CATCH_UP_S
        self._last_tick_s = now_s
        if now_s >= self._ticks_from_s:
            for name in self._slots:
                self._feed(name, _TICK)

    def _obey(self) -> None:
        is_ending = self._ended_s is not None
        queued = () if self.dispatcher is None else self.dispatcher.rests()
        for name, event in self.commands.receive(
            self._slots, self._plans, is_ending=is_ending, queued=queued
        ):
            self._feed(name, event)
            if isinstance(event, slots.Reinstated):
                self._join(name)

    def _dispatch(self, now_s: float) -> None:
        if self.dispatcher is None or not self._is_time_to("dispatch", now_s):
            return
        for plan in self.dispatcher.turn(self._slots, self._nodes.in_use(), self.clock.unix_s()):
            self._begin(plan)
        finished = filter(self._is_finished, self._teams.values())
        left = {name: _NOT_TOGETHER for team in finished for name in team.members}
        for name, why in {**left, **self.dispatcher.rests()}.items():
            if self._may_rest(name):
                self._feed(name, slots.Held(hold=slots.Hold.DRAIN, why=why))

    def _may_rest(self, name: str) -> bool:
        slot = self._slots.get(name)
        return (
            slot is not None
            and slot.orders.hold is not slots.Hold.DRAIN
            and slot.phase not in {*_OVER, Phase.STOPPED}  # it has ended just now
        )

    def _begin(self, plan: SlotPlan) -> None:
        """Begin an attempt at a job, in its earlier slot or in a new one."""
        name = plan.spec.slot
        self._plans[name] = plan
        self._meters.setdefault(name, Meter())
        self._slots.setdefault(name, self.past.slots.get(name, Slot(slot=name)))
        self._shares.replan(self._plans)
        self._add_team(plan)
        self._feed(name, slots.Assigned())
        self._join(name)

    def _join(self, name: str) -> None:
        """Feed `NodeJoined` to a slot that starts again, if its node is in use."""
        if self._plans[name].spec.node in self._nodes.present:
            self._feed(name, slots.NodeJoined())

    def _send_out(self) -> None:
        """Store what has changed, then perform the commands and send the orders that follow."""
        now_s = self.clock.monotonic_s()
        changed, self._changed = self._changed, {}
        for each in self._teams.values():
            if each.update(self._slots, now_s):
                changed |= dict.fromkeys(each.members)  # all get other orders
        for name in changed:
            self._record(self._slots[name], now_s)
        for name, lease_bytes in self._shares.update(self._slots, now_s).items():
            self.outlets.events.write("leased", slot=name, lease_bytes=lease_bytes)
            changed[name] = None
        if self.outlets.store.commit():
            self.commands.note_stored()
        outbox, self._outbox = self._outbox, []
        for name, command in outbox:
            self._perform(name, command)

        for name in changed:
            if (slot := self._slots[name]).placed:
                self._order(name, slot)

    def _record(self, slot: Slot, now_s: float) -> None:
        """Give a changed slot to the store, which must write it at once if another head must know
        the change.

        Its counters and what it has learned are stored with its sample, about once a second.
        """
        name = slot.slot
        # `training` has every reported step: a later head must know which steps were done before it
        # repeats some.
        known = (slot.state, slot.reason, slot.incarnation, slot.training, slot.orders)
        record = SlotRecord(
            row=row_of(self._plans[name], slot, self._meters[name], now_s),
            incarnation=slot.incarnation,
            resume=slot.resume,
            orders=slot.orders,
        )
        self.outlets.store.slots([record], at_once=self._recorded.get(name) != known)
        self._recorded[name] = known

    def _order(self, name: str, slot: Slot) -> None:
        """Send the present orders of the slot to the fleet."""
        begin = piece = None
        if slot.needs_begin:
            start = self._plans[name].spec.workload.settings.get("from")
            copy, piece = self.checkpoints.copy_for(name, slot.incarnation, start)
            begin = Begin(resume=slot.resume, fresh=slot.incarnation == 0, copy=copy)
        elif slot.heard_at_s is not None:
            self.checkpoints.drop_copy(name)
        kept = self.checkpoints.kept(name)
        lease_bytes = self._shares.grant(slot)
        of_team = self._plans[name].spec.team
        team = None if of_team is None else self._teams[of_team.members].orders
        wanted = lifecycle.orders_of(slot, lease_bytes, begin)
        self.fleet.order(name, replace(wanted, kept=kept, copy=piece, team=team))

    def _show(self) -> None:
        what = "show" if self.outlets.watchers else "sample"
        if self._is_time_to(what, self.clock.monotonic_s()):
            self.outlets.show(self.snapshot())

    def _begin_counting(self) -> None:
        """Begin the planned time once every worker whose node is in use has answered, or has had
        `start_timeout_s` since the first answer.
        """
        if self._ends_at_s is not None:
            return
        now_s = self.clock.monotonic_s()
        if self.dispatcher is not None:  # jobs begin and end at any time
            self._count_from(now_s)
            return
        here = [
            slot for slot in self._slots.values() if slot.phase not in {Phase.ABSENT, Phase.DONE}
        ]
        answered = [
            slot
            for slot in here
            if (slot.ready and slot.first_work_s is not None)
            or slot.phase in {Phase.QUARANTINED, Phase.HELD}
        ]
        if not answered:
            return
        self._first_ready_s = self._first_ready_s if self._first_ready_s is not None else now_s
        is_late = now_s - self._first_ready_s > self.config.run.start_timeout_s
        if is_late or len(answered) == len(here):
            self._count_from(now_s)

    def _count_from(self, now_s: float) -> None:
        self._counting_since_s = now_s
        remaining_s = max(0.0, self.config.run.duration_s - self.past.elapsed_s)
        self._ends_at_s = now_s + remaining_s
        self.outlets.events.write(
            "counting", duration_s=remaining_s, startup_s=now_s - self._began_s
        )

    def _quarantine_cards(self, now_s: float) -> None:
        # Jobs change on a card: those that have failed say nothing about the next one. A card is
        # not worse than before unless a slot has changed.
        if self.dispatcher is not None or not self._changed:
            return
        cards = circuit_breaker.by_card(self._plans, self._slots)
        window_s = self.config.run.death_window_s
        for card, reason in circuit_breaker.cards_to_quarantine(cards, now_s, window_s).items():
            self.outlets.events.write("card_quarantined", card=card, reason=reason)
            for slot in cards[card]:
                self._feed(slot.slot, slots.CardQuarantined(reason=reason))

    def _take(self, heard: PollResult) -> None:
        slot = self._slots[heard.slot]
        match heard:
            case StatusReceived(status=status) if slot.placed and slot.phase is not Phase.ABSENT:
                self._take_news(slot, status)
                self.checkpoints.note_copied(status)
                if status.incarnation == slot.incarnation:
                    self.checkpoints.take(status)
            case ActorUnreachable(text=text) if slot.unreached_since_s is None and slot.runs:
                self.outlets.events.write("unreached", slot=heard.slot, text=text)
        self._feed(heard.slot, heard)
        self._changed[heard.slot] = None  # its actor may have more of a file

    def _take_news(self, slot: Slot, status: Status) -> None:
        """Log what happened in a process: once, even if it is reported several times."""
        name, events = status.slot, self.outlets.events
        if status.news > (slot.heard if status.actor == slot.actor else 0):
            self.output.take(status)
            for happened in status.events:
                if happened.name == "hazard":  # one notice for all slots with one task
                    self._hazards[f"training hazard: {happened.detail['reason']}"] = None
                moment = {"worker_at_unix_s": happened.at_unix_s}
                events.write(happened.name, slot=name, **moment, **dict(happened.detail))
        if status.incarnation != slot.incarnation or slot.phase is not Phase.WORKING:
            return
        if status.died is not None:
            events.write("process_ended", slot=name, cause=status.died.cause, text=status.died.text)
        before = slot.status if slot.has_reported else None
        errors = 0 if before is None else before.counts.steps_error
        if status.error is not None and (
            before is None or before.error is None or status.counts.steps_error > errors
        ):
            self.workload_error = status.error
            events.write("workload_error", slot=name, traceback=status.error)

    def _feed(self, name: str, event: slots.Event) -> None:
        before = self._slots[name]
        try:
            after, commands = lifecycle.advance(before, event, self._moment())
        except lifecycle.IllegalEventError as error:
            self.outlets.events.write(
                "illegal_event", slot=name, phase=error.phase.value, refused=error.event
            )
            return
        if (after is before or after == before) and not commands:
            return
        self._slots[name], self._changed[name] = after, None
        if after.status is not None and after.news_at_s not in {None, before.news_at_s}:
            self._meters[name].add(after.status)
        if after.phase is not before.phase and after.phase in _OVER:
            # The queue must learn of an end before the store does.
            self._done_at_s["dispatch"] = float("-inf")
        for command in commands:
            match command:
                case slots.Note():
                    self.outlets.events.write(command.name, slot=name, **dict(command.fields))
                case slots.EndRun(reason=reason, is_input=is_input):
                    raise UsageError(reason) if is_input else PreflightError([reason])
                case _:
                    self._outbox.append((name, command))

    def _perform(self, name: str, command: slots.Command) -> None:
        match command:
            case slots.Place():
                plan = self._plans[name]
                address = self._nodes.address(plan.spec.node)
                spec = replace(listening_at(plan.spec, address), run_id=self.folder.name)
                self.fleet.place(spec, plan.num_cpus, plan.num_gpus)
            case slots.Abandon():
                self.fleet.abandon(name)

    def _drain(self) -> None:
        self._ended_s = self.clock.monotonic_s()
        for name in self._slots:
            self._feed(name, slots.Drain())
        self._send_out()
        run = self.config.run
        deadline_s = self.clock.monotonic_s() + 3 * run.poll_s + run.stop_grace_s
        while self.clock.monotonic_s() < deadline_s and any(
            slot.phase is Phase.WORKING for slot in self._slots.values()
        ):
            self._hear()
            self._obey()
            self._send_out()
            self._show()
        if self.dispatcher is not None:
            self.dispatcher.note_ends(self._slots, self._nodes.in_use())
        self._close()

    def _close(self) -> None:
        for name in self._slots:
            self._feed(name, slots.Close())


def slow_step_s(config: Config) -> float:
    """Return how long a slow step of the workload may take; 0 if it has none."""
    return config.train.slow_step_s if config.workload.name == "train" else 0.0


class Commands:
    """The users' commands to the slots of one run."""

    def __init__(self, folder: Path, outlets: Outlets, clock: Clock) -> None:
        """Read the commands that arrive in a run folder."""
        self._incoming = Incoming(folder)
        self._outlets = outlets
        self._clock = clock
        self._taken: list[Row] = []

    @property
    def problem(self) -> str | None:
        """Why commands cannot be read; `None`: they can."""
        problem = self._incoming.problem
        return None if problem is None else f"this run may miss commands: {problem}"

    def receive(
        self,
        slots: Mapping[str, Slot],
        plans: Mapping[str, SlotPlan],
        *,
        is_ending: bool,
        queued: Collection[str] = (),
    ) -> Iterator[tuple[str, Event]]:
        """Yield the events that new commands cause, with their slots. The caller must feed each
        event before it asks for the next one.

        A command that arrives twice has one answer and one effect. A command whose sender waits no
        longer is ignored.
        """
        self._taken, now_unix_s = self._incoming.rows(), self._clock.unix_s()
        for row in self._taken:
            is_late = row.until_unix_s is not None and row.until_unix_s < now_unix_s
            if is_late or self._outlets.store.has_command(row.id):
                continue
            logged: dict[str, Any] = {"do": "", "slots": (), "by": "", "amount_bytes": None}
            try:
                command = command_of(row.content)
                logged |= asdict(command)
                events = events_of(command, slots, plans, is_ending=is_ending, queued=queued)
                answer = Answer(ok=True, id=row.id, effect=EFFECTS[command.do])
            except CommandRefusedError as error:
                events, answer = (), Answer(ok=False, id=row.id, error=str(error))
            yield from events
            self._record({**logged, "id": row.id}, answer)

    def note_stored(self) -> None:
        """Remove the received commands, now that they are stored with their answers."""
        self._incoming.remove(self._taken)
        self._taken = []

    def _record(self, command: Mapping[str, Any], answer: Answer) -> None:
        stored = {**command, "at_unix_s": self._clock.unix_s(), "answer": asdict(answer)}
        self._outlets.store.command(answer.id, stored)
        slot = command["slots"][0] if len(command["slots"]) == 1 else None
        said = {"effect": answer.effect} if answer.ok else {"refused": answer.error}
        self._outlets.events.write("command", slot=slot, **command, **said)
