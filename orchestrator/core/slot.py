"""The values of the lifecycle: a slot, the events that can happen to it, the commands that can
follow.

Frozen values without behaviour. `lifecycle.py` says which event leads to which commands.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from orchestrator.core.fleet import DeathCause, SliceFailed, SliceReported
from orchestrator.core.leak_detector import NO_WATCH, LeakWatch
from orchestrator.core.silence import NOT_SEEN, Silence
from orchestrator.core.training import NO_TRAINING, Training
from workers.messages import (
    NO_COUNTS,
    Activity,
    DeviceInfo,
    Directive,
    Report,
    ResumeState,
    StepCounts,
    WorkerState,
)
from workers.settings import Scalar


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
    WORKING = "working"
    PAUSING = "pausing"
    #: Its node is there, and nothing is sent until the user undoes that.
    HELD = "held"
    QUARANTINED = "quarantined"
    STOPPED = "stopped"
    #: Its work is finished; it waits for nothing but the reports of what was sent before that was
    #: known.
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The numbers of `run:` in cluster.yaml that concern a slot."""

    slice_s: float
    hang_timeout_s: float
    stale_after_s: float
    start_timeout_s: float
    slow_step_s: float = 0.0
    """How long a step may take where the workload is known to have slow ones, such as those in
    which torch compiles.

    They may come at any time: where the first step had one sample, or after a change of how memory
    is used.
    """
    restart_backoff_s: float
    restart_backoff_max_s: float
    max_deaths: int
    death_window_s: float
    max_workload_errors: int
    leak_flag_bytes: int | None = None
    """Growth of a worker's memory that is worth saying; `None` never says it."""
    leak_limit_bytes: int | None = None
    """Growth after which its process is replaced; `None` never does."""
    seed: int = 0
    """Of the jitter in restart pauses."""
    has_counted: bool = False
    """Whether an earlier head has worked on this run: what cannot work here then costs its slot,
    and not the run.
    """


class Flight(NamedTuple):
    """A slice under way; a tuple, as each report makes one."""

    sequence: int
    duration_s: float
    submitted_at_s: float
    step_limit: int
    """It cannot have done more good steps than this."""


class Hold(StrEnum):
    """How the user has a slot wait."""

    #: Its process stays, with its memory.
    PAUSE = "pause"
    #: Its process ends.
    DRAIN = "drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the user has asked of a slot and not taken back.

    The store keeps it for the next head.
    """

    hold: Hold | None = None
    cap_bytes: int | None = None
    """The most that its worker may hold; `None`: as much as the plan says."""
    save: bool = False
    """The next slice is to save the state of what it trains."""
    why: str | None = None
    """Why it waits, where a queue of jobs has it wait and not a user."""

    def within_cap(self, some_bytes: int) -> int:
        """Return as many of these bytes as the cap allows."""
        return some_bytes if self.cap_bytes is None else min(some_bytes, self.cap_bytes)


NO_ORDERS = Orders()


# Without `slots`: `changed` copies the dictionary of a slot, which costs a tenth of
# `dataclasses.replace`.
@dataclass(frozen=True, kw_only=True)
class Slot:
    """Everything known about a slot."""

    slot: str
    phase: Phase = Phase.ABSENT
    state: SlotState = HeadState.STARTING
    reason: str = "waiting for its node"
    incarnation: int = 0
    next_sequence: int = 0
    in_flight: tuple[Flight, ...] = ()
    placed: bool = False
    draining: bool = False
    orders: Orders = NO_ORDERS
    held_since_s: float | None = None
    ready: bool = False
    """Whether the present incarnation has reported: only then is it sent more than one step."""
    ending: bool = False
    """The process before was told to end and may not have ended yet: the first slice may still
    reach it, and fail.
    """
    wake_at_s: float | None = None
    working_since_s: float | None = None
    """When the present incarnation was first asked to work."""
    heard_at_s: float | None = None
    silent_since_s: float | None = None
    """When a process that cannot be reached was first asked to work, until one reports or dies."""
    silence: Silence = NOT_SEEN
    """What was seen of its process since its last report, once that is late."""
    longest_step_s: float | None = None
    """Of all steps that were reported, over all incarnations; `None` before the first."""
    process_steps: int = 0
    """Good steps that its present process has reported."""
    most_steps: int = 0
    """Good steps of that of its dead processes that reported most."""
    progressed_at_s: float | None = None
    """When it last got further than any process of it before (`slice_results.py`)."""
    deaths_at_s: tuple[float, ...] = ()
    """Those of the last `death_window_s`, and all since the last report: a slot that never answers
    is given up.
    """
    errors_in_a_row: int = 0
    leak: LeakWatch = NO_WATCH
    leak_told: bool = False
    resume: ResumeState | None = None
    report: Report | None = None
    training: Training = NO_TRAINING
    device: DeviceInfo | None = None
    """The last that any report named: a broken process reports none."""
    counts: StepCounts = NO_COUNTS
    """Of all reports accepted, over all incarnations."""
    first_report_s: float | None = None
    """When it first reported more than that it warms up, in this head's time."""
    worked_s: float = 0.0
    """Time for which it worked or was held since then, once the run counts (`slices.worked_s`)."""
    ended_stale: bool = False
    """Whether its slice was overdue by more than `stale_after_s` when the run ended; `reason` says
    by how much.
    """
    restarts: int = 0
    steps_lost_upper_bound: int = 0
    """At most so many good steps were done in slices that gave no report; they are not in `counts`.
    """

    def __post_init__(self) -> None:
        # More than 30 attributes set one by one leave a dict of twice the size, which every copy
        # keeps; one made at once does not.
        object.__setattr__(self, "__dict__", {**self.__dict__})


_SLOT_FIELDS = frozenset(item.name for item in fields(Slot))


def changed(slot: Slot, **changes: Any) -> Slot:  # noqa: ANN401 - the type of each field
    """Return a copy with other values, as `dataclasses.replace`, which costs a head of 1,000
    workers a sixth more.

    `TypeError` if there is no such field.
    """
    values = slot.__dict__ | changes
    if len(values) != len(_SLOT_FIELDS):
        raise TypeError(f"a slot has no {', '.join(sorted(changes.keys() - _SLOT_FIELDS))}")
    copy = object.__new__(Slot)
    object.__setattr__(copy, "__dict__", values)
    return copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a transition depends on besides the slot and the event."""

    now_s: float
    """Monotonic seconds."""
    rules: Rules
    ends_at_s: float | None
    """When the run shall end; `None` before the planned time has begun."""


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
class DeathExplained:
    """The cluster has found out why the slot's last process ended."""

    cause: DeathCause


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSeen:
    """The node was asked what the slot's silent process does, and may have answered."""

    activity: Activity | None
    """`None`: it has not answered yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The user has the slot wait, from the end of the slices under way; or a queue, which says why."""

    hold: Hold
    why: str | None = None


class Unheld(_Plain):
    """The user lets the slot work again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinstated:
    """The user lifts the quarantine of the slot."""

    node_is_there: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Capped:
    """The user bounds what the slot's worker may hold; `None`: no longer."""

    cap_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """The slot has a place again, perhaps on another node, for another attempt at its work."""

    node_is_there: bool


class SaveAsked(_Plain):
    """The user wants the state saved of what the slot trains."""


class Tick(_Plain):
    """Time has passed."""


class Drain(_Plain):
    """The run is ending: finish what runs, begin nothing."""


class Close(_Plain):
    """The run has ended: what is still under way is lost."""


Event: TypeAlias = (
    NodeJoined
    | NodeLeft
    | NodeRefused
    | CardQuarantined
    | SliceReported
    | SliceFailed
    | DeathExplained
    | ProcessSeen
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


class Forget(_Plain):
    """Give up every slice under way."""


class Restart(_Plain):
    """End the process; the cluster starts another."""


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


#: A directive is sent as it is, except for what only the supervisor can add: an injected fault, and
#: a lease.
Command: TypeAlias = Place | Directive | Forget | Restart | Abandon | EndRun | Note

#: The slot after an event, and what the supervisor is to do about it, in this order.
Transition: TypeAlias = tuple[Slot, tuple[Command, ...]]
