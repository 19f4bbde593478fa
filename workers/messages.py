"""What crosses processes: orders from the head to a worker, statuses back.

Covers the frozen dataclasses, the names of states, and the two errors that the engine turns into a
`Verdict`. Does not cover how they travel (the head's business) nor what a worker does (the
engine's). Imports neither torch nor ray. Bytes and seconds throughout; `None` means unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Final, get_args, get_type_hints

from workers.readings import SensorReading
from workers.settings import (
    FailureKind,  # noqa: F401 - where users import it from (docs/resilient.md)
    PolicyState,
    Scalar,
)


class WorkerState(StrEnum):
    """What a worker tells that it is doing, as the health table names it. Always shown with a
    reason in words.

    What only the head can know, such as that a node is lost, is its `HeadState`.
    """

    WARMING = "WARMING"
    RUNNING = "RUNNING"
    BACKOFF = "BACKOFF"
    EMERGENCY = "EMERGENCY"
    #: As EMERGENCY, of a workload whose state waits in host memory meanwhile.
    PARKED = "PARKED"
    THROTTLED = "THROTTLED"
    PAUSED = "PAUSED"
    CORRUPT = "CORRUPT"
    #: Its workload has finished all that there was to do.
    DONE = "DONE"
    #: It does no more work: its verdict says why.
    STOPPED = "STOPPED"


#: The states of a worker that had no memory for any step.
STARVED: Final = frozenset({WorkerState.EMERGENCY, WorkerState.PARKED})


class Verdict(StrEnum):
    """How the process that sent a status stands."""

    OK = "ok"
    #: The workload is finished; the head ends this process and starts no other.
    DONE = "done"
    #: The device context is beyond repair; the head must end this process and let a fresh one
    #: resume.
    CONTEXT_CORRUPTED = "poisoned"
    #: The workload cannot work on this machine however often it is tried (wrong card, unknown
    #: workload).
    INCOMPATIBLE = "incompatible"
    #: It can work on no machine before the user changes what is trained: its settings or its data.
    BAD_INPUT = "bad input"


class Cause(StrEnum):
    """Why a process, a slot, or an attempt at a job has ended, or can do nothing more."""

    DONE = "done"
    #: It ended by itself and wants to be started again (exit code 75, EX_TEMPFAIL).
    PARKED = "parked"
    #: Out of memory, or its budget is too small for it.
    OUT_OF_MEMORY = "out of memory"
    #: The RAM of its PC was full.
    HOST_MEMORY = "host memory"
    #: By a person, by another program, or by the kernel.
    KILLED = "killed"
    #: Its processes were killed, crashed, ended by themselves, hung, or kept too much memory by
    #: their first statuses, one after the other and without progress between.
    DIED = "died in vain"
    #: Its PC has no device that it can use, or that, or its driver, no longer answers.
    DRIVER = "driver fault"
    #: Out of memory, because other programs hold what it may have of the card.
    CARD_TAKEN = "card taken"
    DISK_FULL = "disk full"
    TIME_LIMIT = "time limit"
    #: An error of its own, or what was asked for: words say what.
    EXCEPTION = "exception"
    #: The program or its folder is not there, or no process can be started, or none came up.
    NOT_STARTED = "not started"
    #: Its code is not on its PC, or cannot be imported there; or its configuration is wrong.
    BAD_CONFIG = "bad configuration"
    #: The loss of a training is no finite number.
    NAN_LOSS = "loss is not a number"


class IncompatibleError(Exception):
    """The workload can never work here (wrong card, unknown workload, a cap too small).

    Its text says what would.
    """

    verdict = Verdict.INCOMPATIBLE

    def __init__(self, text: object = "", *, cause: Cause = Cause.EXCEPTION) -> None:
        """Say in words what would work, and as a value what is in the way."""
        super().__init__(text)
        self.cause = cause


class BadInputError(IncompatibleError):
    """The settings or the data of a training cannot be used."""

    verdict = Verdict.BAD_INPUT


class ContextCorruptedError(Exception):
    """The device no longer answers this process; a fresh process may succeed.

    Its text says what the device did.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBytes:
    """How much of a file with a slot's state has reached the head."""

    number: int
    """As of `CheckpointPiece`."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """What the process of an incarnation is told once, when it starts."""

    resume: PolicyState | None = None
    """The policy's state by the last status of the slot; `None`: there is none."""
    fresh: bool = False
    """Whether the slot begins its work: what an earlier run left on the disk is not its state."""
    copy: KeptBytes | None = None
    """The head's copy of the slot's state, which comes in pieces before; `None`: there is none."""
    checkpoint: Path | None = None
    """The file with that copy, on the engine's own PC."""


class TeamState(StrEnum):
    """How a member of a team trains."""

    #: It trains by itself: no other member is with it.
    ALONE = "ALONE"
    #: It computes its share of each step, and the sums of all members make the update.
    TOGETHER = "TOGETHER"
    #: It looks for the leader, or takes its state.
    REJOINING = "REJOINING"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamOrders:
    """Who leads a training that several slots share. The same for all of its members."""

    generation: int
    """Rises with each leader that the head names. A member obeys no smaller one."""
    leader: str
    """The slot that gives out rows and adds up the sums."""
    address: str
    """`host:port`, at which the leader listens for the other members."""
    secret: bytes = field(repr=False)
    """What each end proves that it knows before anything else is read from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamPace:
    """What a step takes at a member of a team, by its last steps with as many members."""

    steps: int
    """How many these are."""
    step_s: float
    """Of the whole team."""
    alone_s: float
    """If it computed all samples by itself, which nothing goes over the wire for."""
    update_s: float
    """Of both, the update of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamStatus:
    """How a member of a team stands."""

    state: TeamState
    listens: str
    """`host:port`, at which it takes in the other members where it is to lead."""
    generation: int | None
    """Of the newest orders that it obeys; `None` before the first."""
    step: int | None
    """Optimiser steps in the state that it holds; `None`: it has none yet, not even a first one."""
    lost: int | None = None
    """The generation whose leader it has lost, and waits for another; `None`: it has lost none. A
    leader that can lead no more, since it went back to a checkpoint or has no memory, names its
    own."""
    members: int = 1
    """Those that made the last update, itself included."""
    share_pct: float | None = None
    """Of the rows of the last steps, those that it computed."""
    wire_s: float | None = None
    """Time of a step for sums on the wire, of the last steps."""
    pace: TeamPace | None = None
    """`None`: too few steps were done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the head wants of a slot: all of it, so that orders that come twice change nothing."""

    actor: str | None = None
    """The process of the actor that is meant. Another one starts nothing, and tells its name:
    the process before it has ended, and the program with it."""
    incarnation: int = 0
    """Counts the processes that have computed in the slot. A larger number than that of the present
    process ends that one and starts another."""
    begin: Begin | None = None
    """For the process of this incarnation; `None` once a status has told that it was started."""
    runs: bool = True
    """Whether there is to be a process; `False` ends it."""
    holds: bool = False
    """Whether the process is to do no step. One that is asked to save goes on until it has."""
    saves: int = 0
    """Counts how often this process was asked to save its state as soon as it can."""
    lease_bytes: int | None = None
    """What the worker may hold now, its cap apart, so that those who share a card do not all grow
    into the same bytes; `None` does not limit it."""
    heard: int = 0
    """Number of the last news that the head has from this process of the actor (`Status.news`)."""
    kept: KeptBytes | None = None
    """How much the head has of the file with the slot's state that it gets in pieces."""
    copy: CheckpointPiece | None = None
    """The first part that is lacking there of what a process is to begin with (`Begin.copy`)."""
    team: TeamOrders | None = None
    """Who leads, where the slot is a member of a team; `None`: no slot does yet."""


NO_ORDERS = Orders()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What the worker found and what it was given."""

    kind: str
    name: str
    uuid: str | None
    total_bytes: int | None
    cap_bytes: int
    """As read back from whatever enforces it."""
    pid: int
    context_bytes: int = 0
    """What the process holds on the device before any tensor, measured (or assumed: see
    `context_source`). This and what follows is not known of a program of the user.
    """
    context_source: str = ""
    peak_source: str = ""
    """How the highest memory of a step is measured, or why it is not."""
    dtype: str = ""
    """The type really used; a CPU runs fp16 as bf16 or fp32."""
    threads: int = 0
    torch_version: str = ""
    driver: str | None = None
    """Version of the card's driver; `None` on a CPU, or where it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """The device's memory as the worker sees it between two steps."""

    device_total_bytes: int | None
    device_used_bytes: int | None
    """Use of the device by all programs."""
    allocated_bytes: int
    """In live tensors."""
    reserved_bytes: int
    """Held by the allocator: live tensors and its pool."""
    peak_bytes: int
    """The most that a step since the last status needed: `allocated_bytes`, and on a card gaps
    between tensors.
    """
    alloc_retries: int
    """Times the allocator had to flush its pool to satisfy a request, since the process began."""
    kept_bytes: int | None = None
    """What the process still held after the workload's last `release`, beyond what it held when it
    was opened; `None` before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """Something that happened to a worker: an OOM, a back-off, an emergency.

    Goes to events.jsonl.
    """

    name: str
    at_unix_s: float
    detail: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """The counters of steps and result checks: of one process, of a slot, or of a whole run.

    The only place that names them; whatever adds counts up, adds two of these. Their names are keys
    of summary.json.
    """

    steps_ok: int = 0
    steps_oom: int = 0
    steps_oom_probe: int = 0
    """Of `steps_oom`, those at a size that the policy was still searching for: `Run.is_probe`."""
    steps_error: int = 0
    """Steps that failed by the workload's own fault."""
    parts_further: int = 0
    """Parts that ended well beyond the first of each good step: a training's step has many, and
    each may run out of memory.
    """
    oom_count: int = 0
    """Every out-of-memory error, those of progressive allocation included."""
    emergency_count: int = 0
    """Times the prepared 128x128 product was run because memory had run out."""
    verify_checks: int = 0
    verify_errors: int = 0
    """Checked results that were wrong."""
    work_flop: float = 0.0
    busy_s: float = 0.0
    """Time for which steps and checks kept the device busy."""

    def __add__(self, other: StepCounts) -> StepCounts:
        """Return the sum, counter by counter."""
        return StepCounts(
            **{name: getattr(self, name) + getattr(other, name) for name in StepCounts.__slots__}
        )

    @staticmethod
    def total(counts: Iterable[StepCounts]) -> StepCounts:
        """Return the sum of any number of counts."""
        return sum(counts, NO_COUNTS)

    @property
    def steps(self) -> int:
        """All steps that were begun and ended, however they ended."""
        return self.steps_ok + self.steps_oom + self.steps_error

    @property
    def steps_judged(self) -> int:
        """The steps, or parts of them, that count for the success rate."""
        return self.steps + self.parts_further - self.steps_oom_probe

    @property
    def success_rate(self) -> float | None:
        """Share of the steps, or parts of them, that ended well, 0..1; `None` before the first.

        An out-of-memory counts against it, but not one of the search for the size: there are as
        many of those in a short run as in a long one.
        """
        judged = self.steps_judged
        return (self.steps_ok + self.parts_further) / judged if judged else None


NO_COUNTS = StepCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a workload with an end is, a training above all; `None` for what it does not tell.

    The only place that names these figures; they are keys of summary.json.
    """

    train_step: int | None = None
    """Optimiser steps done; a step of the engine is a micro-batch, of which an optimiser step takes
    several.
    """
    train_steps: int | None = None
    """Optimiser steps after which it is finished."""
    epoch: float | None = None
    loss: float | None = None
    """Of the last optimiser step."""
    first_loss: float | None = None
    """Of the first."""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    micro_batch: int | None = None
    """Samples computed at once."""
    accumulation: int | None = None
    """Micro-batches of an optimiser step."""
    memory_level: int | None = None
    """How much is done to save memory; 0: nothing."""
    saved_step: int | None = None
    """Optimiser steps in the last checkpoint that is safe on disk."""
    redone_steps: int | None = None
    """Optimiser steps that were done again after going back to a checkpoint: by this process, or in
    a row of the table by all of the slot's."""
    data_wait_pct: float | None = None
    """Share of the time in which the device waited for data."""
    copies_pct: float | None = None
    """Share of the time in which batches were copied from the host to the device."""
    optimizer_pct: float | None = None
    """Share of the time that clipping and the update of the weights took."""
    mfu_pct: float | None = None
    """Operations of the model, of what the card is rated for at its present clock; the head fills
    it in.
    """
    eta_s: float | None = None
    """Seconds until it is finished."""
    weights_sha256: str | None = None
    """Of all weights, once it is finished."""

    def __post_init__(self) -> None:
        """Refuse what no other process could read, such as a loss that is still a tensor."""
        for name, kinds in _progress_kinds().items():
            value = getattr(self, name)
            if type(value) not in kinds:
                raise TypeError(
                    f"progress: {name} cannot be {value!r:.80}, a {type(value).__name__}"
                )


@cache
def _progress_kinds() -> dict[str, frozenset[type]]:
    kinds = {name: set(get_args(hint)) for name, hint in get_type_hints(Progress).items()}
    return {
        name: frozenset(known | {int} if float in known else known) for name, known in kinds.items()
    }


#: Nothing is told.
NO_PROGRESS = Progress()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPiece:
    """A part of a file with a slot's state, on its way to the head, or back."""

    number: int
    """Of the file: that of no other file of the slot."""
    offset_bytes: int
    total_bytes: int
    """Of the file."""
    data: bytes = field(repr=False)

    @property
    def is_last(self) -> bool:
        """Whether the file ends with it."""
        return self.offset_bytes + len(self.data) == self.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """What a process did since it last told anything, as its own PC sees it."""

    seconds: float
    """For so long it has told nothing."""
    idle_s: float
    """For so long it was not seen to compute: `seconds` if it never was."""
    computed_s: float = 0.0
    """CPU seconds of its busiest thread while it computed; on a card seconds of wall time."""
    stands_at: str | None = None
    """The line of Python at which its step stands; `None`: it was not asked for, or is unknown."""


#: Of what was printed and is not acknowledged, at most so much is kept.
_PRINTED_CHARS: Final = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedOutput:
    """What a worker's process printed lately, by Python and by native libraries."""

    text: str
    """As it was printed: it may hold what steers a terminal."""
    dropped_bytes: int
    """Printed before it, and more than a status carries."""

    def followed_by(self, more: PrintedOutput) -> PrintedOutput:
        """Return both as one; of more than 64 Ki characters the newest."""
        text = self.text + more.text
        cut = text[: max(0, len(text) - _PRINTED_CHARS)]
        dropped_bytes = self.dropped_bytes + more.dropped_bytes + len(cut.encode())
        return PrintedOutput(text=text[len(cut) :], dropped_bytes=dropped_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an engine, or a program of the user, ended, as its PC saw it."""

    cause: Cause
    """Of an engine NOT_STARTED where another try ends so too, HOST_MEMORY, KILLED by any signal, or
    EXCEPTION with any exit code."""
    exit_code: int | None = None
    """Of a program of the user, as the next: `None` after a signal, and where it did not start."""
    signal: int | None = None
    text: str = ""
    """The end of its log, at most 16 KiB; why it did not start. Of an engine in words, with the
    last line that it printed."""
    was_asked: bool = False
    """Whether it ended because its slot is to rest: it is to be started again."""
    peak_bytes: int | None = None
    """Most that its processes took together: of the card, or on a CPU resident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a slot's process is. All counters are those of the process since it began, so that a
    status that is lost costs nothing.
    """

    slot: str
    incarnation: int | None = None
    """Of the process that is there, or was there last; `None`: the actor has started none."""
    actor: str = ""
    """The actor's process; the actor itself fills it in, as all fields from `news` on."""
    verdict: Verdict = Verdict.OK
    verdict_cause: Cause | None = None
    """`None` with the verdicts OK and DONE."""
    state: WorkerState = WorkerState.WARMING
    reason: str = "its process starts"
    is_up: bool = False
    """Whether the process has told anything itself."""
    is_held: bool = False
    """Whether it does no steps, as it was ordered."""
    saves: int = 0
    """`Orders.saves` that it has taken in."""
    save_due: bool = False
    """Whether it was asked to save its state and has not been able to since, or the head lacks a
    part of what was saved."""
    device: DeviceInfo | None = None
    memory: MemoryInfo | None = None
    size: int | None = None
    batch: int | None = None
    claim_bytes: int | None = None
    lease_bytes: int | None = None
    """`Orders.lease_bytes` that it obeys."""
    counts: StepCounts = NO_COUNTS
    wall_s: float = 0.0
    """Time for which it worked, or rested from work, since it opened its device."""
    longest_step_s: float = 0.0
    """Of its good steps."""
    errors_in_a_row: int = 0
    """Errors of the workload since it worked for about a second with good steps and without one."""
    error: str | None = None
    """Traceback of the workload's last exception, as text; it stays when good steps follow."""
    sensors: SensorReading | None = None
    """The last look at the sensors; `None` if there was none yet."""
    rss_bytes: int | None = None
    """Resident memory of the process on its host."""
    resume: PolicyState | None = None
    progress: Progress | None = None
    """`None` of a workload without an end, and before it could be asked."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last of each figure by which a training, or a program of the user, judges itself."""
    ended: Ending | None = None
    """How a program of the user ended; `None` while it runs, and of a workload."""
    team: TeamStatus | None = None
    """`None` of a slot that trains by itself."""
    saved: str | None = None
    """The file with its state that is to be kept by the head as well, on its own PC."""
    events: tuple[WorkerEvent, ...] = ()
    """Those that the head has not acknowledged."""

    news: int = 0
    """Number of the last of `events` and of `output`; the head acknowledges it in `Orders.heard`.
    """
    output: PrintedOutput | None = None
    """`None`: nothing new was printed, or it is not captured."""
    quiet: Quiet | None = None
    """What is seen of a process that tells nothing; `None`: it has just told something."""
    died: Ending | None = None
    """How the engine ended; `None` while it lives, and of one that was ended as ordered."""
    checkpoint: CheckpointPiece | None = None
    """The next part of the state that the head is to keep."""
    copied: KeptBytes | None = None
    """How much is here of the copy that the head sends in pieces."""
