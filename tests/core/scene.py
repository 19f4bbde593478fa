"""A single slot with its clock, and the events, statuses and ends of its processes.

Tests of the lifecycle share it. It does not know the expected results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from orchestrator.core.fleet import ActorUnreachable, StatusReceived
from orchestrator.core.lifecycle import advance, orders_of
from orchestrator.core.slot import Command, Event, Moment, NodeJoined, Note, Phase, Slot, Tick
from tests.factories import RULES, status_of
from workers.messages import Begin, Cause, Ending, Orders, Quiet


class Scene:
    """One slot, from its beginning."""

    def __init__(
        self, *, ends_at_s: float | None = None, slot: str = "pc1/0", **rules: Any
    ) -> None:
        """Begin at second 1000, with some rules changed."""
        self.slot = Slot(slot=slot)
        self.now_s = 1000.0
        self.ends_at_s = ends_at_s
        more = {name: rules.pop(name) for name in ("slow_step_s", "seed") if name in rules}
        self._usual: dict[str, Any] = {"run": RULES.model_copy(update=rules), **more}

    @classmethod
    def joined(cls, **begin: Any) -> Self:
        """Begin on a node that has joined."""
        scene = cls(**begin)
        scene.feed(NodeJoined())
        return scene

    @classmethod
    def working(cls, **begin: Any) -> Self:
        """Begin with a working process."""
        scene = cls(**begin)
        scene.work()
        return scene

    def feed(self, event: Event, *, later_s: float = 0.0) -> list[Command]:
        """Let time pass, and handle an event; return the commands."""
        self.now_s += later_s
        self.slot, commands = advance(
            self.slot, event, Moment(now_s=self.now_s, ends_at_s=self.ends_at_s, **self._usual)
        )
        return list(commands)

    def deeds(self, event: Event, *, later_s: float = 0.0) -> list[Command]:
        """The same as `feed`, without commands for the store and the log."""
        return [
            command
            for command in self.feed(event, later_s=later_s)
            if not isinstance(command, Note)
        ]

    def status(self, **changes: object) -> StatusReceived:
        """Return a status of the present process: its last status with changes.

        `wall_s` is the time since the process began to work by the head's clock, unless changed.
        """
        wall_s = self.now_s - (self.slot.working_since_s or self.now_s)
        usual: dict[str, Any] = {
            "incarnation": self.slot.incarnation,
            "actor": self.slot.actor or "pc1:1",
            "wall_s": wall_s,
        }
        return StatusReceived(status=status_of(self.slot.slot, **{**usual, **changes}))

    def end(self, text: str = "killed by signal 9", cause: Cause = Cause.KILLED) -> StatusReceived:
        """Return a status with the end of the present process, based on its last status."""
        told = self.slot.status
        died = Ending(cause=cause, text=text)
        if told is None or told.incarnation != self.slot.incarnation:
            return self.status(is_up=False, died=died)
        return StatusReceived(status=replace(told, died=died))

    def quiet(self, seconds: float, **seen: Any) -> StatusReceived:
        """Return the answer of an actor whose process reports nothing."""
        told = self.slot.status
        quiet = Quiet(**{"seconds": seconds, "idle_s": seconds, **seen})
        if told is None or told.incarnation != self.slot.incarnation:
            return self.status(is_up=False, quiet=quiet)
        return StatusReceived(status=replace(told, quiet=quiet, reason="steady"))

    def unreached(self, **changes: Any) -> ActorUnreachable:
        """Return the event of a failed poll."""
        return ActorUnreachable(**{"slot": self.slot.slot, "text": "unavailable", **changes})

    def orders(self, lease_bytes: int | None = None) -> Orders:
        """Return the present orders of the slot."""
        return orders_of(self.slot, lease_bytes, Begin(resume=self.slot.resume))

    def work(self, **changes: object) -> None:
        """Join the node, and report that the process works."""
        self.feed(NodeJoined())
        self.now_s += 1
        self.feed(self.status(**changes))

    def die(self) -> float:
        """Let the process die, and the next start when the slot wants it; return the pause in s."""
        self.feed(self.end())
        assert self.slot.phase is Phase.PAUSING
        assert self.slot.wake_at_s is not None
        wait_s = self.slot.wake_at_s - self.now_s
        # Exactly this time: adding up the waits would round.
        self.now_s = self.slot.wake_at_s
        self.feed(Tick())
        self.feed(self.status())
        return wait_s


def notes(commands: list[Command], name: str) -> list[dict[str, Any]]:
    """Return the fields of each note with this name."""
    return [
        dict(command.fields)
        for command in commands
        if isinstance(command, Note) and command.name == name
    ]
