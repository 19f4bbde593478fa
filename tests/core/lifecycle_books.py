"""A simulated fleet's own books of one slot, made from the commands alone.

They say what is under way, what was counted, what was lost, and how many steps each slice really
did, those included whose report never came or came too late. For `test_lifecycle_machine.py`, which
says what happens and what must hold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from enum import Enum
from typing import Any, TypeAlias

from hypothesis.stateful import RuleBasedStateMachine

from orchestrator.core.fleet import SliceFailed, SliceFailure, SliceReported
from orchestrator.core.lifecycle import advance
from orchestrator.core.slot import (
    Abandon,
    Assigned,
    Capped,
    CardQuarantined,
    Command,
    EndRun,
    Event,
    Forget,
    Held,
    Moment,
    NodeJoined,
    NodeLeft,
    NodeRefused,
    Note,
    Phase,
    Place,
    Reinstated,
    Restart,
    Rules,
    SaveAsked,
    Slot,
    Unheld,
)
from tests.factories import report_of
from workers.messages import NO_COUNTS, STARVED, Directive, Progress

FINAL = {Phase.QUARANTINED, Phase.STOPPED, Phase.DONE}

#: What the membership, the circuit breaker and the judge of commands never tell a slot of a phase.
#: Everything else may happen at any time.
ILLEGAL: set[tuple[Phase, type[Event]]] = {
    (Phase.ABSENT, NodeLeft),
    (Phase.ABSENT, CardQuarantined),
    (Phase.WORKING, NodeJoined),
    (Phase.WORKING, NodeRefused),
    (Phase.PAUSING, NodeJoined),
    (Phase.PAUSING, NodeRefused),
    (Phase.STOPPED, CardQuarantined),
    *(
        (Phase.HELD, event)
        for event in (NodeJoined, NodeRefused, CardQuarantined, Reinstated, SaveAsked)
    ),
    *(
        (phase, event)
        for phase in (Phase.STOPPED, Phase.DONE)
        for event in (Held, Unheld, Reinstated, Capped, SaveAsked)
    ),
    *((Phase.QUARANTINED, event) for event in (Held, Unheld, SaveAsked)),
    *((phase, Reinstated) for phase in (Phase.ABSENT, Phase.WORKING, Phase.PAUSING)),
    *((phase, Assigned) for phase in (Phase.WORKING, Phase.PAUSING, Phase.STOPPED)),
    *((phase, SaveAsked) for phase in (Phase.ABSENT, Phase.PAUSING)),
    (Phase.PAUSING, Unheld),
}

#: What a report adds to; the other counters are the head's own.
SUMMED = tuple(asdict(NO_COUNTS))

#: A slice: its incarnation and its sequence.
Name: TypeAlias = tuple[int, int]


class FaultOutcome(Enum):
    """What became of a slice. It is in one of these at any time, and leaves only the first."""

    UNDER_WAY = "under way"
    COUNTED = "counted"
    LOST = "lost"
    UNSENT = "unsent"


class Books(RuleBasedStateMachine):
    """Feeds events to a slot, performs what it commands, and writes both down."""

    def moment(self, now_s: float | None = None) -> Moment:
        """Return now, or another time of this run."""
        at_s = self.now_s if now_s is None else now_s
        return Moment(now_s=at_s, rules=self.run_rules, ends_at_s=self.ends_at_s)

    def open(self, run_rules: Rules, earlier_incarnations: int) -> None:
        """Begin a run, perhaps one that another head began."""
        self.run_rules = run_rules
        self.now_s = 1000.0
        self.ends_at_s: float | None = None
        # A run that another head began: its last incarnation is gone.
        self.slot = Slot(
            slot="pc1/0", incarnation=earlier_incarnations, next_sequence=10 * earlier_incarnations
        )
        self.first_sequence = self.slot.next_sequence
        self.node_is_there = self.placed = self.abandoned = self.drained = False
        self.save_waits = False
        """The user has asked for the state to be saved, or the slot shall rest; and no slice has carried that yet."""
        self.trains = False
        self.submitted: dict[Name, Directive] = {}
        self.fates: dict[Name, FaultOutcome] = {}
        self.really_done: Counter[Name] = Counter()
        """Good steps of each slice, told of or not."""
        self.reported: set[Name] = set()
        """Slices that are over: their process has made its report, whether it arrived or not."""
        self.expected: dict[str, int | float] = dict.fromkeys(SUMMED, 0)
        self.expected_lost = 0
        self.last_resume: object = None
        self.history: list[Slot] = [self.slot]

    def saves_first(self, before: Slot) -> bool:
        """Say whether a slot that shall rest has something to save, and a process that can."""
        at_work = bool(before.in_flight) or before.phase is Phase.WORKING
        return at_work and before.report is not None and before.report.progress is not None

    @property
    def under_way(self) -> list[Name]:
        return [name for name, fate in self.fates.items() if fate is FaultOutcome.UNDER_WAY]

    def do_steps(self, name: Name, share: float) -> None:
        """Let a process do this share of the good steps that the slice may still do."""
        if self.fates[name] is FaultOutcome.UNSENT:
            return
        left = self.submitted[name].step_limit - self.really_done[name]
        self.really_done[name] += round(share * left)

    def accepted(self, name: Name, counts: dict[str, int | float], **changes: Any) -> None:
        # No more time than may have passed since the slice was sent: the head believes no more.
        seconds = {key: min(counts[key], 0.5) for key in ("busy_s", "wall_s") if key in counts}
        counts = {**counts, **seconds, "steps_ok": self.really_done[name]}
        progress = Progress(train_step=len(self.history)) if self.trains else None
        event = reported("pc1/0", name, counts, **{"progress": progress, **changes})
        assert self.fates[name] is FaultOutcome.UNDER_WAY
        self.fates[name] = FaultOutcome.COUNTED
        self.reported.add(name)
        for counter in SUMMED:
            self.expected[counter] += counts.get(counter, 0)
        self.last_resume = (
            event.report.resume if event.report.resume is not None else self.last_resume
        )
        commands = self.feed(event)
        assert not refusals(commands)
        assert self.slot.report is event.report
        assert self.slot.heard_at_s == self.now_s

    def feed(self, event: Event) -> tuple[Command, ...]:
        before = self.slot
        self.slot, commands = advance(before, event, self.moment())
        for command in commands:
            self.perform(command)
        self.history.append(self.slot)
        same = advance(before, event, self.moment())
        assert same == (self.slot, commands), (
            "the same event at the same time gives the same result"
        )
        return commands

    def refused(self, event: SliceReported) -> None:
        before = self.slot
        (command,) = self.feed(event)
        assert isinstance(command, Note)
        assert command.name == "report_refused"
        assert self.slot == before

    def perform(self, command: Command) -> None:
        """Do what a fleet would, and refuse what it could not do."""
        match command:
            case Place():
                assert not self.placed, "an actor is created once, and again after it was ended"
                assert self.node_is_there
                self.placed = True
                self.abandoned = False
            case Directive():
                self.check_submit(command)
                name = (command.incarnation, command.sequence)
                self.submitted[name] = command
                self.fates[name] = FaultOutcome.UNDER_WAY
            case Forget():
                self.lose()
            case Restart():
                assert self.placed
                assert not self.under_way, "no slice is sent to a process that is to be ended"
            case Abandon():
                assert not self.abandoned, "an actor is ended once"
                self.abandoned = True
                self.placed = False
                self.lose()
            case EndRun():
                raise AssertionError("nothing here makes a run impossible")
            case Note(name=name_of_note):
                assert name_of_note in {"state", "report_refused"}

    def lose(self) -> None:
        for name in self.under_way:
            self.fates[name] = FaultOutcome.LOST
            self.expected_lost += self.submitted[name].step_limit or 0

    def check_submit(self, submit: Directive) -> None:
        assert self.placed
        assert not self.abandoned
        rests = self.drained or self.slot.orders.hold is not None
        report = self.slot.report
        save_due = report is not None and report.save_due and report.state not in STARVED
        is_last = rests and (self.save_waits or save_due) and not self.under_way
        assert not self.drained or is_last, "after Drain nothing is submitted but slices that save"
        assert self.slot.phase is not Phase.DONE, "what is done is not begun again"
        assert self.slot.orders.hold is None or is_last, "what is held gets no work"
        assert self.node_is_there
        assert submit.sequence == self.first_sequence + len(self.submitted), (
            "sequences are counted without a gap"
        )
        assert submit.incarnation == self.slot.incarnation
        assert submit.resume == self.last_resume
        assert submit.step_limit is not None
        assert submit.step_limit >= 1
        assert submit.save == (self.save_waits or is_last)
        self.save_waits = False
        mine = [name for name in self.submitted if name[0] == submit.incarnation]
        if not any(self.fates[name] is FaultOutcome.COUNTED for name in mine):
            assert submit.duration_s == 0.0
            assert submit.step_limit == 1, "the first slice of a process is one step"
            assert not self.under_way, "nothing more is sent before its report"
            return
        assert self.run_rules.slice_s / 10 <= submit.duration_s <= self.run_rules.slice_s
        if self.ends_at_s is not None and not is_last:
            busy_s = sum(self.submitted[name].duration_s for name in self.under_way)
            assert self.now_s + busy_s + submit.duration_s <= self.ends_at_s + 1e-6


def reported(
    slot: str, name: Name, counts: dict[str, int | float], **changes: Any
) -> SliceReported:
    return SliceReported(report=report_of(slot, *name, **{**counts, **changes}))


def failed(name: Name, failure: SliceFailure) -> SliceFailed:
    return SliceFailed(
        slot="pc1/0", incarnation=name[0], sequence=name[1], failure=failure, text="gone"
    )


def refusals(commands: tuple[Command, ...]) -> int:
    return sum(
        isinstance(command, Note) and command.name == "report_refused" for command in commands
    )
