"""The values of the lifecycle: a slot, the events that can happen to it, the commands that can
follow.

Frozen values without behaviour. `lifecycle.py` says which event leads to which commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from orchestrator.core.fleet import Told, Unreached
from orchestrator.core.leak_detector import NO_WATCH, LeakWatch
from orchestrator.core.training import NO_TRAINING, Training
from workers.messages import (
    NO_COUNTS,
    Cause,
    DeviceInfo,
    Quiet,
    Status,
    StepCounts,
    WorkerState,
)
from workers.settings import PolicyState, Scalar

if TYPE_CHECKING:
    from orchestrator.config.schema import RunConfig


class HeadState(StrEnum):
    """What the head knows of a slot from which no worker reports.

    Shown like the state that a worker reports.
    """

    #: Its node has not joined yet, or its first process is starting.
    STARTING = "STARTING"
    #: Its process has ended, and another one is awaited.
    RESTARTING = "RESTARTING"
    #: Its node has left.
    LOST = "LOST"
    #: It was given up until the user reinstates it, or starts a new run.
    QUARANTINED = "QUARANTINED"
    #: The user has it wait.
    HELD = "HELD"


#: What a slot is shown as. The words of both types differ.
SlotState: TypeAlias = WorkerState | HeadState


def slot_state(word: str) -> SlotState:
    """Return the state of this name; `ValueError` if there is none."""
    return HeadState(word) if word in set(HeadState) else WorkerState(word)


class Phase(StrEnum):
    """What a slot waits for. Never shown."""

    ABSENT = "absent"
    #: There is to be a process, which works, starts, or comes to rest.
    WORKING = "working"
    #: There is to be no process until a time.
    PAUSING = "pausing"
    #: Its node is there, and it does no work until the user undoes that.
    HELD = "held"
    QUARANTINED = "quarantined"
    STOPPED = "stopped"
    DONE = "done"


class Hold(StrEnum):
    """How the user has a slot wait."""

    #: Its process stays, with its memory.
    PAUSE = "pause"
    #: Its process ends.
    DRAIN = "drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserOrders:
    """What the user has asked of a slot and not taken back.

    The store keeps it for the next head.
    """

    hold: Hold | None = None
    cap_bytes: int | None = None
    """The most that its worker may hold; `None`: as much as the plan says."""
    why: str | None = None
    """Why it waits, where a queue of jobs has it wait and not a user."""

    def within_cap(self, some_bytes: int) -> int:
        """Return as many of these bytes as the cap allows."""
        return some_bytes if self.cap_bytes is None else min(some_bytes, self.cap_bytes)


NOTHING_ASKED = UserOrders()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Everything known about a slot."""

    slot: str
    phase: Phase = Phase.ABSENT
    state: SlotState = HeadState.STARTING
    reason: str = "waiting for its node"
    placed: bool = False
    """Whether it has an actor."""
    draining: bool = False
    orders: UserOrders = NOTHING_ASKED
    held_since_s: float | None = None
    wake_at_s: float | None = None
    failure: Cause | None = None
    """Why it was given up, or why a process of it ended that was to go on: the last since it was
    placed or reinstated; `None`: there was none. Of an exception `Status.error` has the words.
    """

    incarnation: int = 0
    """Counts the processes of the slot. What follows is of the present one."""
    runs: bool = False
    """Whether there is to be a process."""
    saves: int = 0
    """How often it was asked to save its state."""
    working_since_s: float | None = None
    """When it was first asked to work."""
    heard_at_s: float | None = None
    """When the last status of it came."""
    news_at_s: float | None = None
    """When the last came that told something new."""
    quiet: Quiet | None = None
    """What was seen of it when it had told nothing for a while."""
    leak: LeakWatch = NO_WATCH
    leak_told: bool = False

    actor: str | None = None
    """The process of the actor that keeps it; `None`: it is not known yet."""
    heard: int = 0
    """Number of the last news that came from that process of the actor."""
    unreached_since_s: float | None = None
    """Since when polls have come to nothing."""

    status: Status | None = None
    """The last of a process that was up: the present one, or one before it."""
    counts_before: StepCounts = NO_COUNTS
    """Of all processes before the present one."""
    longest_step_s: float | None = None
    """Of the steps of all its processes; `None` before the first."""
    most_steps: int = 0
    """Good steps of that of its dead processes that did most."""
    progressed_at_s: float | None = None
    """When it last got further than any process of it before (`processes.py`)."""
    deaths_at_s: tuple[float, ...] = ()
    """Those of the last `death_window_s`, and all since a process last came up: a slot that never
    answers is given up.
    """
    resume: PolicyState | None = None
    training: Training = NO_TRAINING
    device: DeviceInfo | None = None
    """The last that any status named: a broken process names none."""
    first_work_s: float | None = None
    """When it was first beyond its warm-up, in this head's time."""
    worked_s: float = 0.0
    """Time for which it worked or was held since then, once the run counts."""
    ended_stale: bool = False
    """Whether it had told nothing for more than `stale_after_s` when the run ended; `reason` says
    for how long.
    """
    restarts: int = 0

    @property
    def needs_begin(self) -> bool:
        """Whether a process is to start, and the actor that starts it is known."""
        return self.runs and self.heard_at_s is None and self.actor is not None

    @property
    def ready(self) -> bool:
        """Whether its present process has come up, and is to stay."""
        return self.runs and self.has_told

    @property
    def has_told(self) -> bool:
        """Whether its present process has told anything itself."""
        return self.status is not None and self.status.incarnation == self.incarnation

    @property
    def counts(self) -> StepCounts:
        """Of all its processes, as far as they told."""
        if self.status is None or not self.has_told:
            return self.counts_before
        return self.counts_before + self.status.counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a transition depends on besides the slot and the event."""

    now_s: float
    """Monotonic seconds."""
    run: RunConfig
    """The section `run:` of cluster.yaml."""
    ends_at_s: float | None
    """When the run shall end; `None` before the planned time has begun."""
    slow_step_s: float = 0.0
    """How long a step may take where the workload is known to have slow ones, such as those in
    which torch compiles.

    They may come at any time: where the first step had one sample, or after a change of how memory
    is used.
    """
    seed: int = 0
    """Of the jitter in restart pauses."""
    has_counted: bool = False
    """Whether an earlier head has worked on this run: what cannot work here then costs its slot,
    and not the run.
    """


@dataclass(frozen=True, slots=True)
class _Plain:
    """An event or a command that has no details: equal to every other of its class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reasoned:
    reason: str


class NodeJoined(_Plain):
    """The slot's node is there and can take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """The slot's node is gone."""

    reason: str = "its node has left the cluster"


class NodeRefused(_Reasoned):
    """The slot's node is there and cannot take it: fewer CPUs than planned, or two nodes of one
    name.
    """


class CardQuarantined(_Reasoned):
    """Every worker of the slot's card keeps dying: the card is given up, not one worker after the
    other.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The user has the slot wait once its step has ended; or a queue, which says why."""

    hold: Hold
    why: str | None = None


class Unheld(_Plain):
    """The user lets the slot work again."""


class Reinstated(_Plain):
    """The user lifts the quarantine of the slot, which then waits for its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capped:
    """The user bounds what the slot's worker may hold; `None`: no longer."""

    cap_bytes: int | None


class Assigned(_Plain):
    """The slot has a place again, perhaps on another node, for which it then waits, for another
    attempt at its work.
    """


class SaveAsked(_Plain):
    """The user wants the state saved of what the slot trains."""


class Tick(_Plain):
    """Time has passed."""


class Drain(_Plain):
    """The run is ending: come to rest, begin nothing."""


class Close(_Plain):
    """The run has ended: nothing more is heard."""


Event: TypeAlias = (
    NodeJoined
    | NodeLeft
    | NodeRefused
    | CardQuarantined
    | Told
    | Unreached
    | Held
    | Unheld
    | Reinstated
    | Assigned
    | Capped
    | SaveAsked
    | Tick
    | Drain
    | Close
)


class Place(_Plain):
    """Create the slot's actor."""


class Abandon(_Plain):
    """End the actor for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun(_Reasoned):
    """The run cannot continue: what was asked for can never work."""

    is_input: bool = False
    """Whether the user's settings or data are why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something for the event log."""

    name: str
    fields: tuple[tuple[str, Scalar], ...] = ()


#: What is to be done once. What is wanted of the process follows from the slot
#: (`lifecycle.orders_of`).
Command: TypeAlias = Place | Abandon | EndRun | Note

#: The slot after an event, and what the supervisor is to do about it, in this order.
Transition: TypeAlias = tuple[Slot, tuple[Command, ...]]
