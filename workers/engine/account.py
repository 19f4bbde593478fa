"""The counters, events and state of one engine since its process began, and the time left in the
present turn. Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from workers.messages import NO_COUNTS, StepCounts, TeamOrders, WorkerEvent, WorkerState
from workers.settings import Scalar

#: Waits at most the given seconds for new orders, and returns whether some came.
Wait: TypeAlias = Callable[[float], bool]


class TurnOverError(Exception):
    """The turn ends before the next part begins; the step continues in the next turn."""


def no_orders(seconds: float) -> bool:
    """Sleep and return `False`: the `Wait` of an engine that receives no orders."""
    if seconds > 0:
        time.sleep(seconds)
    return False


@dataclass(slots=True, kw_only=True)
class Account:
    """What one engine counts and reports. Counters only grow."""

    slot: str
    state: WorkerState = WorkerState.WARMING
    reason: str = "opening the device"
    size: int | None = None
    batch: int | None = None
    counts: StepCounts = NO_COUNTS
    wall_s: float = 0.0
    """Total time of the turns in which it worked, or rested after work."""
    longest_step_s: float = 0.0
    """Longest part of a successful step."""
    errors_in_a_row: int = 0
    """Errors of the workload since the last turn with successful steps and no error."""
    error: str | None = None
    """Traceback of the workload's last exception."""
    events: list[WorkerEvent] = field(default_factory=list)
    """Events since the last status."""
    duration_s: float = 0.0
    """Requested duration of the present turn; 0 ends it after its first successful part."""
    began_s: float = 0.0
    """Start of the turn (monotonic seconds)."""
    wait: Wait = no_orders
    has_orders: bool = False
    """Whether new orders came in this turn."""
    team_orders: TeamOrders | None = None
    """The newest team orders, if the slot is a member of a team."""
    is_good: bool = False
    """Whether the turn had successful steps, and no error of the workload after them."""

    def begin_turn(self, duration_s: float, wait: Wait) -> None:
        """Begin a turn of `duration_s`, which ends earlier if `wait` reports new orders."""
        self.duration_s, self.wait, self.began_s = duration_s, wait, time.monotonic()
        self.has_orders = self.is_good = False

    def end_turn(self) -> None:
        """Add the time of the turn to `wall_s`."""
        self.wall_s += self.elapsed_s
        if self.is_good:
            self.errors_in_a_row = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the turn began."""
        return time.monotonic() - self.began_s

    @property
    def remaining_s(self) -> float:
        """Seconds until the turn must end; 0 after its time is over or when new orders came."""
        self.sleep(0.0)
        return 0.0 if self.has_orders else max(0.0, self.duration_s - self.elapsed_s)

    def sleep(self, seconds: float) -> float:
        """Sleep, but wake up early for new orders; return the seconds slept."""
        began_s = time.monotonic()
        self.has_orders = self.has_orders or self.wait(seconds)
        return time.monotonic() - began_s

    def pause(self, *, tells: bool) -> None:
        """End the turn if a waiting step must not wait longer in it. `tells`: the head must get a
        status at once.

        Raises:
            TurnOverError: The time is over, new orders came, or `tells` is set.
        """
        if tells or self.remaining_s <= 0:
            raise TurnOverError

    def good_part(self, seconds: float) -> None:
        """Count a successful part of a step and its seconds."""
        self.counts += StepCounts(parts_further=1, busy_s=seconds)
        self.longest_step_s = max(self.longest_step_s, seconds)
        self.is_good = True

    def workload_failed(self, reason: str, traceback: str) -> None:
        """Count an error of the workload."""
        self.counts += StepCounts(steps_error=1)
        self.errors_in_a_row += 1
        self.is_good = False
        self.error = traceback
        self.settle(WorkerState.BACKOFF, reason)

    def event(self, name: str, /, **detail: Scalar) -> None:
        """Add an event for events.jsonl. Events that differ only by `count` are merged into one."""
        event = WorkerEvent(name=name, at_unix_s=time.time(), detail=detail)
        for index, other in enumerate(self.events if "count" in detail else ()):
            if (name, {**detail, "count": None}) == (other.name, {**other.detail, "count": None}):
                counts = (detail["count"], other.detail["count"])
                detail["count"] = sum(count for count in counts if isinstance(count, int))
                self.events[index] = replace(other, detail=detail)
                return
        self.events.append(event)

    def settle(self, state: WorkerState, reason: str) -> None:
        """Set the state and the reason that the health table shows."""
        self.state, self.reason = state, reason
