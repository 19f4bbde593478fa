"""The values of the lifecycle: a slot, its events, and the commands that follow from them.

Frozen values without behaviour. `lifecycle.py` decides which event leads to which commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from orchestrator.core.fleet import ActorUnreachable, StatusReceived
from orchestrator.core.leak_detector import NO_WATCH, LeakWatch
from orchestrator.core.training import NO_TRAINING, Training
from workers.messages import NO_COUNTS, Cause, DeviceInfo, Quiet, Status, StepCounts, WorkerState
from workers.settings import PolicyState, Scalar

if TYPE_CHECKING:
    from orchestrator.config.schema import RunConfig


class HeadState(StrEnum):
    """The state of a slot whose worker reports none. Users see it like a worker's state."""

    #: The node has not joined yet, or the first process is starting.
    STARTING = "STARTING"
    #: The process has ended, and the next one has not reported yet.
    RESTARTING = "RESTARTING"
    #: The node has left.
    LOST = "LOST"
    #: The head gave the slot up until the user reinstates it or starts a new run.
    QUARANTINED = "QUARANTINED"
    #: The user holds the slot.
    HELD = "HELD"


#: The state of a slot as users see it. No word is in both types.
SlotState: TypeAlias = WorkerState | HeadState


def slot_state(word: str) -> SlotState:
    """Return the state called `word`; `ValueError` if there is none."""
    return HeadState(word) if word in set(HeadState) else WorkerState(word)


class Phase(StrEnum):
    """What the head waits for in a slot. Users never see it."""

    #: The slot waits for its node.
    ABSENT = "absent"
    #: The slot must have a process; it starts, works, or comes to rest.
    WORKING = "working"
    #: The slot has no process until `wake_at_s`.
    PAUSING = "pausing"
    #: The node is there, and the slot does no work until the user releases it.
    HELD = "held"
    QUARANTINED = "quarantined"
    STOPPED = "stopped"
    DONE = "done"


class Hold(StrEnum):
    """How the user holds a slot."""

    #: The process stays and keeps its memory.
    PAUSE = "pause"
    #: The process ends.
    DRAIN = "drain"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserOrders:
    """The orders of the user for a slot that are in force. They are stored for the next head."""

    hold: Hold | None = None
    cap_bytes: int | None = None
    """The most memory that the worker may hold; `None`: the plan decides."""
    why: str | None = None
    """Why the slot is held, if the queue of jobs holds it and not a user."""

    def within_cap(self, some_bytes: int) -> int:
        """Return `some_bytes`, reduced to the cap."""
        return some_bytes if self.cap_bytes is None else min(some_bytes, self.cap_bytes)


NOTHING_ASKED = UserOrders()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """All that the head knows about a slot."""

    slot: str
    phase: Phase = Phase.ABSENT
    state: SlotState = HeadState.STARTING
    reason: str = "waiting for its node"
    placed: bool = False
    """Whether the slot has an actor."""
    draining: bool = False
    orders: UserOrders = NOTHING_ASKED
    held_since_s: float | None = None
    wake_at_s: float | None = None
    failure: Cause | None = None
    """Cause for which the slot was given up, or of the last unexpected end of a process; `None`:
    none since it was placed or reinstated. For an exception, `Status.error` has the text.
    """

    incarnation: int = 0
    """Number of the present process; the fields up to `leak_logged` describe that process."""
    runs: bool = False
    """Whether the slot must have a process."""
    saves: int = 0
    """How often the process was asked to save its state."""
    working_since_s: float | None = None
    """When the process was first asked to work."""
    heard_at_s: float | None = None
    """When its last status arrived."""
    news_at_s: float | None = None
    """When its last status with new content arrived."""
    quiet: Quiet | None = None
    """What its actor observes while the process reports nothing."""
    leak: LeakWatch = NO_WATCH
    leak_logged: bool = False

    actor: str | None = None
    """Identifies the actor's process; `None`: not known yet."""
    heard: int = 0
    """Number of the last news from that process of the actor."""
    unreached_since_s: float | None = None
    """Since when polls of the actor have failed."""

    status: Status | None = None
    """The last status of a process that was up: of the present process or of an earlier one."""
    counts_before: StepCounts = NO_COUNTS
    """Sum of the counts of all earlier processes."""
    longest_step_s: float | None = None
    """Longest step of all processes; `None` before the first step."""
    most_steps: int = 0
    """The most good steps that any dead process of the slot did."""
    progressed_at_s: float | None = None
    """When a process last got further than all earlier ones (`processes.py`)."""
    deaths_at_s: tuple[float, ...] = ()
    """Deaths within `death_window_s`; while no process comes up, older ones stay too, so that a
    slot that never answers is given up.
    """
    resume: PolicyState | None = None
    training: Training = NO_TRAINING
    device: DeviceInfo | None = None
    """The device of the last status that had one; a broken process reports none."""
    first_work_s: float | None = None
    """When a process first finished its warm-up, in the time of this head."""
    worked_s: float = 0.0
    """Seconds for which the slot worked or was held since `first_work_s`, once the run counts."""
    ended_stale: bool = False
    """Whether the process had reported nothing for more than `stale_after_s` when the run ended;
    `reason` says for how long.
    """
    restarts: int = 0

    @property
    def needs_begin(self) -> bool:
        """Whether a process must start, and the actor that starts it is known."""
        return self.runs and self.heard_at_s is None and self.actor is not None

    @property
    def ready(self) -> bool:
        """Whether the present process has come up and must not end."""
        return self.runs and self.has_reported

    @property
    def has_reported(self) -> bool:
        """Whether the last status is from the present process."""
        return self.status is not None and self.status.incarnation == self.incarnation

    @property
    def counts(self) -> StepCounts:
        """Counts of all processes of the slot, up to the last status."""
        if self.status is None or not self.has_reported:
            return self.counts_before
        return self.counts_before + self.status.counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The input of a transition besides the slot and the event."""

    now_s: float
    """Monotonic seconds."""
    run: RunConfig
    """The section `run:` of cluster.yaml."""
    ends_at_s: float | None
    """Planned end of the run; `None` before the planned time has begun."""
    slow_step_s: float = 0.0
    """How long a slow step of the workload may take, such as one in which torch compiles.

    A slow step may come at any time: after a first step with one sample, or after a change of how
    memory is used.
    """
    seed: int = 0
    """Seed of the jitter in restart pauses."""
    has_counted: bool = False
    """Whether an earlier head has worked on this run. Then a slot that cannot work is given up and
    the run continues.
    """


@dataclass(frozen=True, slots=True)
class _Plain:
    """An event or a command without details: equal to every other of its class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reasoned:
    reason: str


class NodeJoined(_Plain):
    """The slot's node is there and has the resources for the slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """The slot's node has left the cluster."""

    reason: str = "its node has left the cluster"


class NodeRefused(_Reasoned):
    """The slot's node is there but unusable: fewer CPUs than planned, or two nodes of one name."""


class CardQuarantined(_Reasoned):
    """Every worker of the slot's card keeps dying, so the head gives up the whole card at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The user, or the queue of jobs with a reason, holds the slot once its step has ended."""

    hold: Hold
    why: str | None = None


class Unheld(_Plain):
    """The user releases the slot."""


class Reinstated(_Plain):
    """The user lifts the quarantine of the slot, which then waits for its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capped:
    """The user bounds the memory of the slot's worker; `None` removes the bound."""

    cap_bytes: int | None


class Assigned(_Plain):
    """The slot gets a place for another attempt at its work, perhaps on another node, and waits for
    that node.
    """


class SaveAsked(_Plain):
    """The user asks the slot to save the state of its training."""


class Tick(_Plain):
    """Time has passed."""


class Drain(_Plain):
    """The run is ending: processes come to rest, and none starts."""


class Close(_Plain):
    """The run has ended: no further status arrives."""


Event: TypeAlias = (
    NodeJoined
    | NodeLeft
    | NodeRefused
    | CardQuarantined
    | StatusReceived
    | ActorUnreachable
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
    """End the slot's actor; nothing restarts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun(_Reasoned):
    """End the run: what the user asked for can never work."""

    is_input: bool = False
    """Whether the user's settings or data are the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Write an entry of the event log."""

    name: str
    fields: tuple[tuple[str, Scalar], ...] = ()


#: An action that the supervisor performs once. Lasting orders for the process follow from the slot
#: (`lifecycle.orders_of`).
Command: TypeAlias = Place | Abandon | EndRun | Note

#: The slot after an event, and the commands that the supervisor performs, in order.
Transition: TypeAlias = tuple[Slot, tuple[Command, ...]]
