"""A slot on a stage of its own: its clock, what it is fed, and statuses and ends of its processes to feed it with.

Shared by the tests of the lifecycle. Knows nothing of what should come out.
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
    """One slot, from the beginning."""

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
        """Begin on a node that is there."""
        scene = cls(**begin)
        scene.feed(NodeJoined())
        return scene

    @classmethod
    def working(cls, **begin: Any) -> Self:
        """Begin with a process that is at work."""
        scene = cls(**begin)
        scene.work()
        return scene

    def feed(self, event: Event, *, later_s: float = 0.0) -> list[Command]:
        """Let time pass, then the event happen; return the commands."""
        self.now_s += later_s
        self.slot, commands = advance(
            self.slot, event, Moment(now_s=self.now_s, ends_at_s=self.ends_at_s, **self._usual)
        )
        return list(commands)

    def deeds(self, event: Event, *, later_s: float = 0.0) -> list[Command]:
        """As `feed`, without what only the books and the log need."""
        return [
            command
            for command in self.feed(event, later_s=later_s)
            if not isinstance(command, Note)
        ]

    def status(self, **changes: object) -> StatusReceived:
        """Make a status of the present process: what was told last, and what is changed.

        It worked since, by its `wall_s`, which is that of the head unless it is told.
        """
        wall_s = self.now_s - (self.slot.working_since_s or self.now_s)
        usual: dict[str, Any] = {
            "incarnation": self.slot.incarnation,
            "actor": self.slot.actor or "pc1:1",
            "wall_s": wall_s,
        }
        return StatusReceived(status=status_of(self.slot.slot, **{**usual, **changes}))

    def end(self, text: str = "killed by signal 9", cause: Cause = Cause.KILLED) -> StatusReceived:
        """Make the end of the present process, which told what it told last."""
        told = self.slot.status
        died = Ending(cause=cause, text=text)
        if told is None or told.incarnation != self.slot.incarnation:
            return self.status(is_up=False, died=died)
        return StatusReceived(status=replace(told, died=died))

    def quiet(self, seconds: float, **seen: Any) -> StatusReceived:
        """Make the answer of the actor of a process that tells nothing."""
        told = self.slot.status
        quiet = Quiet(**{"seconds": seconds, "idle_s": seconds, **seen})
        if told is None or told.incarnation != self.slot.incarnation:
            return self.status(is_up=False, quiet=quiet)
        return StatusReceived(status=replace(told, quiet=quiet, reason="steady"))

    def unreached(self, **changes: Any) -> ActorUnreachable:
        """Make a poll that comes to nothing."""
        return ActorUnreachable(**{"slot": self.slot.slot, "text": "unavailable", **changes})

    def orders(self, lease_bytes: int | None = None) -> Orders:
        """Return what is wanted of the slot now."""
        return orders_of(self.slot, lease_bytes, Begin(resume=self.slot.resume))

    def work(self, **changes: object) -> None:
        """Join, and tell that it works."""
        self.feed(NodeJoined())
        self.now_s += 1
        self.feed(self.status(**changes))

    def die(self) -> float:
        """Let the process die, let a new one come up as soon as the slot wants one, and return how long it waited."""
        self.feed(self.end())
        assert self.slot.phase is Phase.PAUSING
        assert self.slot.wake_at_s is not None
        wait_s = self.slot.wake_at_s - self.now_s
        # Exactly then: adding up what was waited would round.
        self.now_s = self.slot.wake_at_s
        self.feed(Tick())
        self.feed(self.status())
        return wait_s


def notes(commands: list[Command], name: str) -> list[dict[str, Any]]:
    """Return the fields of each note of a name."""
    return [
        dict(command.fields)
        for command in commands
        if isinstance(command, Note) and command.name == name
    ]
