"""A slot on a stage of its own: its clock, what it is fed, and reports and failures of its slices to feed it with.

Shared by the tests of the lifecycle. Knows nothing of what should come out. Here, too, is the
configuration that is shipped, for all tests that plan or run it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from orchestrator.core.fleet import SliceFailed, SliceFailure, SliceReported
from orchestrator.core.lifecycle import advance
from orchestrator.core.slot import (
    Command,
    Event,
    Moment,
    NodeJoined,
    Note,
    Phase,
    Slot,
    Tick,
)
from tests.factories import RULES, report_of
from workers.messages import Directive


class Scene:
    """One slot, from the beginning."""

    def __init__(
        self, *, ends_at_s: float | None = None, slot: str = "pc1/0", **rules: Any
    ) -> None:
        """Begin at second 1000, with some rules changed."""
        self.slot = Slot(slot=slot)
        self.now_s = 1000.0
        self.ends_at_s = ends_at_s
        self.rules = replace(RULES, **rules)

    @classmethod
    def joined(cls, **begin: Any) -> Self:
        """Begin on a node that is there."""
        scene = cls(**begin)
        scene.feed(NodeJoined())
        return scene

    @classmethod
    def working(cls, **begin: Any) -> Self:
        """Begin with a process that has reported."""
        scene = cls(**begin)
        scene.work()
        return scene

    def feed(self, event: Event, *, later_s: float = 0.0) -> list[Command]:
        """Let time pass, then the event happen; return the commands."""
        self.now_s += later_s
        self.slot, commands = advance(
            self.slot, event, Moment(now_s=self.now_s, rules=self.rules, ends_at_s=self.ends_at_s)
        )
        return list(commands)

    def deeds(self, event: Event, *, later_s: float = 0.0) -> list[Command]:
        """As `feed`, without what only the books and the log need."""
        return [
            command
            for command in self.feed(event, later_s=later_s)
            if not isinstance(command, Note)
        ]

    def report(self, **changes: object) -> SliceReported:
        """Make the report of the running slice."""
        sequence = self.slot.in_flight[0].sequence if self.slot.in_flight else 0
        return SliceReported(report=report_of(**{**self._names(sequence), **changes}))

    def failure(self, kind: SliceFailure = SliceFailure.DIED, **changes: Any) -> SliceFailed:
        """Make the failure of the running slice."""
        usual: dict[str, Any] = {
            "slot": self.slot.slot,
            "incarnation": self.slot.incarnation,
            "sequence": self.slot.in_flight[0].sequence,
            "failure": kind,
            "text": "worker died",
        }
        return SliceFailed(**{**usual, **changes})

    def _names(self, sequence: int) -> dict[str, Any]:
        return {"slot": self.slot.slot, "incarnation": self.slot.incarnation, "sequence": sequence}

    def work(self, **changes: object) -> None:
        """Join, and report its first slice."""
        self.feed(NodeJoined())
        self.feed(self.report(**changes), later_s=1)

    def die(self) -> float:
        """Let the process die, let a new one report as soon as the slot wants one, and return how long it waited."""
        self.feed(self.failure())
        assert self.slot.phase is Phase.PAUSING
        assert self.slot.wake_at_s is not None
        wait_s = self.slot.wake_at_s - self.now_s
        # Exactly then: adding up what was waited would round.
        self.now_s = self.slot.wake_at_s
        self.feed(Tick())
        self.feed(self.report())
        return wait_s


def submits(commands: list[Command]) -> list[Directive]:
    """Return what is sent."""
    return [command for command in commands if isinstance(command, Directive)]


def sequences(commands: list[Command]) -> list[int]:
    """Return the numbers of what is sent."""
    return [command.sequence for command in submits(commands)]


def notes(commands: list[Command], name: str) -> list[dict[str, Any]]:
    """Return the fields of each note of a name."""
    return [
        dict(command.fields)
        for command in commands
        if isinstance(command, Note) and command.name == name
    ]
