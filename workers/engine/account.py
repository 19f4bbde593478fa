"""The running account of one engine: what has happened since its process began, and how much of the
present turn is left. Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from workers.messages import NO_COUNTS, StepCounts, TeamOrders, WorkerEvent, WorkerState
from workers.settings import Scalar

#: Waits at most so many seconds for new orders, and says whether there are some.
Wait: TypeAlias = Callable[[float], bool]


class TurnOverError(Exception):
    """The turn ends before the next part begins; the step goes on in the next turn."""


def no_orders(seconds: float) -> bool:
    """Wait where no orders can come."""
    if seconds > 0:
        time.sleep(seconds)
    return False


@dataclass(slots=True, kw_only=True)
class Account:
    """What an engine adds up. Counters only grow."""

    slot: str
    state: WorkerState = WorkerState.WARMING
    reason: str = "opening the device"
    size: int | None = None
    batch: int | None = None
    counts: StepCounts = NO_COUNTS
    wall_s: float = 0.0
    """Time of the turns that worked, or rested from work."""
    longest_step_s: float = 0.0
    """Of the parts of its good steps."""
    errors_in_a_row: int = 0
    """Errors of the workload since a turn with good steps and no error."""
    error: str | None = None
    """Traceback of the workload's last exception."""
    events: list[WorkerEvent] = field(default_factory=list)
    """Those since the last turn."""
    duration_s: float = 0.0
    """Of the present turn, as it was asked for; 0 ends it with its first step."""
    began_s: float = 0.0
    """When the turn began (monotonic seconds)."""
    wait: Wait = no_orders
    has_orders: bool = False
    """Whether new orders came in the turn."""
    team_orders: TeamOrders | None = None
    """The newest, if its slot is a member of a team."""
    is_good: bool = False
    """Whether the turn has done good steps, and no error of the workload came after them."""

    def begin_turn(self, duration_s: float, wait: Wait) -> None:
        """Begin a turn of so long, which ends earlier when `wait` says that there are orders."""
        self.duration_s, self.wait, self.began_s = duration_s, wait, time.monotonic()
        self.has_orders = self.is_good = False

    def end_turn(self) -> None:
        """Count the time of a turn in which it worked, or rested from work."""
        self.wall_s += self.elapsed_s
        if self.is_good:
            self.errors_in_a_row = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the turn began."""
        return time.monotonic() - self.began_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the turn should end: 0 after that time, and when there are new orders."""
        self.sleep(0.0)
        return 0.0 if self.has_orders else max(0.0, self.duration_s - self.elapsed_s)

    def sleep(self, seconds: float) -> float:
        """Sleep, or wake up earlier for new orders; return for how long it was."""
        began_s = time.monotonic()
        self.has_orders = self.has_orders or self.wait(seconds)
        return time.monotonic() - began_s

    def pause(self, *, tells: bool) -> None:
        """Take note that a step waits for something, and goes on in a turn to come. `tells`:
        whether how it is should be told at once.

        Raises:
            TurnOverError: The time is over, there are new orders, or it should.
        """
        if tells or self.remaining_s <= 0:
            raise TurnOverError

    def good_part(self, seconds: float) -> None:
        """Count the time of a part of a step that ended well."""
        self.counts += StepCounts(parts_further=1, busy_s=seconds)
        self.longest_step_s = max(self.longest_step_s, seconds)
        self.is_good = True

    def workload_failed(self, reason: str, traceback: str) -> None:
        """Count an error that is the workload's own."""
        self.counts += StepCounts(steps_error=1)
        self.errors_in_a_row += 1
        self.is_good = False
        self.error = traceback
        self.settle(WorkerState.BACKOFF, reason)

    def event(self, name: str, /, **detail: Scalar) -> None:
        """Add an event for events.jsonl. Those that differ by their `count` alone are one."""
        event = WorkerEvent(name=name, at_unix_s=time.time(), detail=detail)
        for index, other in enumerate(self.events if "count" in detail else ()):
            if (name, {**detail, "count": None}) == (other.name, {**other.detail, "count": None}):
                counts = (detail["count"], other.detail["count"])
                detail["count"] = sum(count for count in counts if isinstance(count, int))
                self.events[index] = replace(other, detail=detail)
                return
        self.events.append(event)

    def settle(self, state: WorkerState, reason: str) -> None:
        """Set the state and the reason that the table shows."""
        self.state, self.reason = state, reason
