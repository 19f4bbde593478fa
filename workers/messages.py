"""The messages between processes: orders from the head to a worker, and statuses back.

Covers the frozen dataclasses, the names of states, and the errors that the engine turns into a
`Verdict`. Does not cover their transport (the head) nor the actions of a worker (the engine).
Imports neither torch nor ray. All units are bytes and seconds; `None` means unknown.
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
    FailureKind,  # noqa: F401 - users import it from here (docs/resilient.md)
    PolicyState,
    Scalar,
)


class WorkerState(StrEnum):
    """The state that a worker reports, as the health table names it; always shown with a reason.

    States that only the head can know, such as a lost node, are in its `HeadState`.
    """

    WARMING = "WARMING"
    RUNNING = "RUNNING"
    BACKOFF = "BACKOFF"
    EMERGENCY = "EMERGENCY"
    #: As EMERGENCY, while the workload's state is parked in host memory.
    PARKED = "PARKED"
    THROTTLED = "THROTTLED"
    PAUSED = "PAUSED"
    CORRUPT = "CORRUPT"
    #: The workload has finished all of its work.
    DONE = "DONE"
    #: The worker does no more work; its verdict says why.
    STOPPED = "STOPPED"


#: The states of a worker that has no memory for any step.
STARVED: Final = frozenset({WorkerState.EMERGENCY, WorkerState.PARKED})


class Verdict(StrEnum):
    """Whether the process that sent a status can continue, and if not, why."""

    OK = "ok"
    #: The workload is finished; the head ends this process and starts no new one.
    DONE = "done"
    #: The device context is corrupted; the head must end this process; a new one resumes.
    CONTEXT_CORRUPTED = "poisoned"
    #: The workload can never run on this machine (wrong card, unknown workload).
    INCOMPATIBLE = "incompatible"
    #: It can run on no machine until the user changes the settings or data of the training.
    BAD_INPUT = "bad input"


class Cause(StrEnum):
    """Why a process, a slot, or an attempt at a job has ended or cannot continue."""

    DONE = "done"
    #: It ended by itself and asks to be started again (exit code 75, EX_TEMPFAIL).
    PARKED = "parked"
    #: Out of memory, or its budget is too small.
    OUT_OF_MEMORY = "out of memory"
    #: The RAM of its PC was full.
    HOST_MEMORY = "host memory"
    #: Killed by a person, another program, or the kernel.
    KILLED = "killed"
    #: One process after another was killed, crashed, ended by itself, hung, or kept too much memory
    #: according to its first statuses, without progress in between.
    DIED = "died in vain"
    #: Its PC has no usable device, or the device or its driver no longer answers.
    DRIVER = "driver fault"
    #: Out of memory, because other programs hold its share of the card.
    CARD_TAKEN = "card taken"
    DISK_FULL = "disk full"
    TIME_LIMIT = "time limit"
    #: An error of the program itself, or of the request; the reason says which.
    EXCEPTION = "exception"
    #: The program or its folder is missing, or its process could not be started or did not come up.
    NOT_STARTED = "not started"
    #: Its code is not on its PC or cannot be imported there, or its configuration is wrong.
    BAD_CONFIG = "bad configuration"
    #: The loss of a training is not a finite number.
    NAN_LOSS = "loss is not a number"


class IncompatibleError(Exception):
    """The workload can never run here (wrong card, unknown workload, a cap too small).

    The text says what would work.
    """

    verdict = Verdict.INCOMPATIBLE

    def __init__(self, text: object = "", *, cause: Cause = Cause.EXCEPTION) -> None:
        """Store the text, which says what would work, and the cause."""
        super().__init__(text)
        self.cause = cause


class BadInputError(IncompatibleError):
    """The settings or the data of a training cannot be used."""

    verdict = Verdict.BAD_INPUT


class ContextCorruptedError(Exception):
    """The device no longer answers this process; a fresh process may succeed.

    The text describes the failure of the device.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBytes:
    """How much of a file with a slot's state the receiver has."""

    number: int
    """Number of the file, as in `CheckpointPiece`."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The initial state of a new incarnation, sent once when its process starts."""

    resume: PolicyState | None = None
    """The policy's state in the slot's last status; `None` if there is none."""
    fresh: bool = False
    """Whether the slot begins new work: the state files of an earlier run do not belong to it."""
    copy: KeptBytes | None = None
    """The head's copy of the slot's state, sent in pieces before the start; `None` if there is
    none.
    """
    checkpoint: Path | None = None
    """The file with that copy, on the engine's PC."""


class TeamState(StrEnum):
    """Whether a member of a team trains alone or with others."""

    #: It trains by itself, without other members.
    ALONE = "ALONE"
    #: It computes its share of each step, and the update uses the sums of all members.
    TOGETHER = "TOGETHER"
    #: It connects to the leader, or receives the leader's state.
    REJOINING = "REJOINING"


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamOrders:
    """Who leads a training that several slots share; the same for all members."""

    generation: int
    """Rises with each leader that the head appoints. A member ignores smaller generations."""
    leader: str
    """The slot that distributes the rows and adds up the sums."""
    address: str
    """`host:port` at which the leader listens for the other members."""
    secret: bytes = field(repr=False)
    """Shared secret: each end must prove that it knows it before any other message is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamPace:
    """The time of a step at a member of a team, measured over its last steps with the present
    members.
    """

    steps: int
    """Number of these steps."""
    step_s: float
    """Time of a step of the whole team."""
    alone_s: float
    """Estimated time of a step if this member computed all samples, without any transfer."""
    update_s: float
    """Time of the weight update, which is part of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamStatus:
    """The status of a member of a team."""

    state: TeamState
    listens: str
    """`host:port` at which it accepts the other members if it becomes the leader."""
    generation: int | None
    """Generation of the newest orders that it obeys; `None` before the first."""
    step: int | None
    """Optimiser steps in its training state; `None` before it has any state."""
    lost: int | None = None
    """The generation whose leader it has lost, while it waits for another; `None` if it has lost
    none. A leader that can no longer lead, because it went back to a checkpoint or has no memory,
    reports its own generation.
    """
    members: int = 1
    """Number of members in the last update, itself included."""
    share_pct: float | None = None
    """Share of the rows of the last steps that it computed."""
    wire_s: float | None = None
    """Seconds per step for the transfer of sums, over the last steps."""
    pace: TeamPace | None = None
    """`None` after too few steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Everything that the head wants of a slot, so that repeated orders change nothing."""

    actor: str | None = None
    """The actor process to which these orders are addressed. Another one starts nothing and reports
    its own name: then the addressed one has ended, and its program with it.
    """
    incarnation: int = 0
    """Number of the slot's process that the head wants. If it is larger than that of the present
    process, the actor ends that one and starts a new one.
    """
    begin: Begin | None = None
    """Initial state of this incarnation; `None` once a status has reported its start."""
    runs: bool = True
    """Whether the slot must have a process; `False` ends it."""
    holds: bool = False
    """Whether the process must run no steps. If it must save as well, it continues until it has
    saved.
    """
    saves: int = 0
    """Number of requests to this process to save its state as soon as it can."""
    lease_bytes: int | None = None
    """A second limit besides the cap: bytes that the worker may hold now, so that workers on one
    card do not grow into the same free bytes; `None`: no limit.
    """
    heard: int = 0
    """The last `Status.news` of this actor process that the head has received."""
    kept: KeptBytes | None = None
    """How much the head has received of the file with the slot's state."""
    copy: CheckpointPiece | None = None
    """The first piece of `Begin.copy` that the slot's PC lacks."""
    team: TeamOrders | None = None
    """The leader, if the slot is a member of a team; `None` while there is no leader."""


NO_ORDERS = Orders()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """The device of a worker, and its limits."""

    kind: str
    name: str
    uuid: str | None
    total_bytes: int | None
    cap_bytes: int
    """As read back from the mechanism that enforces it."""
    pid: int
    context_bytes: int = 0
    """Bytes that the process holds on the device before any tensor, measured or assumed (see
    `context_source`). This field and the following ones are unknown for a user's program.
    """
    context_source: str = ""
    peak_source: str = ""
    """How the peak of a step is measured, or why it is not."""
    dtype: str = ""
    """The type in use; a CPU runs fp16 as bf16 or fp32."""
    threads: int = 0
    torch_version: str = ""
    driver: str | None = None
    """Version of the card's driver; `None` on a CPU, or if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """The device's memory, measured by the worker between two steps."""

    device_total_bytes: int | None
    device_used_bytes: int | None
    """Bytes that all programs use on the device."""
    allocated_bytes: int
    """Bytes in live tensors."""
    reserved_bytes: int
    """Bytes held by the allocator: live tensors and its pool."""
    peak_bytes: int
    """Peak of the steps since the last status: `allocated_bytes`, and on a card gaps between
    tensors.
    """
    alloc_retries: int
    """Times that the allocator flushed its pool to satisfy a request, since the process began."""
    kept_bytes: int | None = None
    """Bytes that the process still held after the workload's last `release`, beyond those at its
    start; `None` before the first `release`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """An event of a worker, such as an OOM, a back-off, or an emergency.

    Written to events.jsonl.
    """

    name: str
    at_unix_s: float
    detail: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """The counters of steps and result checks: of one process, of a slot, or of a whole run.

    The only definition of these counters; code that adds counts adds two of these objects. The
    field names are keys of summary.json.
    """

    steps_ok: int = 0
    steps_oom: int = 0
    steps_oom_probe: int = 0
    """Those of `steps_oom` that were probes of the policy (`Run.is_probe`)."""
    steps_error: int = 0
    """Steps that failed by an error of the workload."""
    parts_further: int = 0
    """Successful parts beyond the first one of each successful step: a training step has many
    parts, and each may run out of memory.
    """
    oom_count: int = 0
    """All out-of-memory errors, including those of progressive allocation."""
    emergency_count: int = 0
    """Runs of the prepared 128x128 product after an out-of-memory."""
    verify_checks: int = 0
    verify_errors: int = 0
    """Checked results that were wrong."""
    work_flop: float = 0.0
    busy_s: float = 0.0
    """Seconds in which steps and checks kept the device busy."""

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
        """All steps that have ended, with any result."""
        return self.steps_ok + self.steps_oom + self.steps_error

    @property
    def steps_judged(self) -> int:
        """Steps and further parts that count for the success rate."""
        return self.steps + self.parts_further - self.steps_oom_probe

    @property
    def success_rate(self) -> float | None:
        """Share of the judged steps and parts that succeeded, 0..1; `None` before the first.

        An out-of-memory counts as a failure unless it was a probe: a short run has as many failed
        probes as a long one.
        """
        judged = self.steps_judged
        return (self.steps_ok + self.parts_further) / judged if judged else None


NO_COUNTS = StepCounts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a workload with an end, such as a training; `None`: not reported.

    The only definition of these figures; the field names are keys of summary.json.
    """

    train_step: int | None = None
    """Optimiser steps done."""
    train_steps: int | None = None
    """Optimiser steps of the whole training."""
    epoch: float | None = None
    loss: float | None = None
    """Loss of the last optimiser step."""
    first_loss: float | None = None
    """Loss of the first optimiser step."""
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    micro_batch: int | None = None
    """Samples computed at once."""
    accumulation: int | None = None
    """Micro-batches in an optimiser step."""
    memory_level: int | None = None
    """Level of memory saving; 0: none."""
    saved_step: int | None = None
    """Optimiser steps in the last checkpoint that is durable on disk."""
    redone_steps: int | None = None
    """Optimiser steps repeated after a return to a checkpoint: by this process or, in a row of the
    table, by all processes of the slot.
    """
    data_wait_pct: float | None = None
    """Share of the time that the device waited for data."""
    copies_pct: float | None = None
    """Share of the time for copies of batches from the host to the device."""
    optimizer_pct: float | None = None
    """Share of the time for gradient clipping and the weight update."""
    mfu_pct: float | None = None
    """Model FLOP rate as a share of the card's rating at its present clock; the head computes
    it.
    """
    eta_s: float | None = None
    """Estimated seconds until it is finished."""
    weights_sha256: str | None = None
    """Hash of all weights, after the training has finished."""

    def __post_init__(self) -> None:
        """Refuse values that another process cannot read, such as a loss that is still a tensor."""
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


#: Nothing is reported.
NO_PROGRESS = Progress()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPiece:
    """A part of a file with a slot's state, sent to the head or back."""

    number: int
    """Number of the file; each file of a slot has a different one."""
    offset_bytes: int
    total_bytes: int
    """Size of the whole file."""
    data: bytes = field(repr=False)

    @property
    def is_last(self) -> bool:
        """Whether this is the last piece of the file."""
        return self.offset_bytes + len(self.data) == self.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """The activity of a process since its last status, measured on its PC."""

    seconds: float
    """Seconds since its last status."""
    idle_s: float
    """Seconds since it was last observed to compute; equals `seconds` if it never was."""
    computed_s: float = 0.0
    """CPU seconds of its busiest thread while it computed; on a card wall seconds."""
    stands_at: str | None = None
    """The line of Python that its step executes; `None`: not requested, or unknown."""


#: Most characters of unacknowledged output that are kept.
_PRINTED_CHARS: Final = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedOutput:
    """New output of a worker's process, from Python and native libraries."""

    text: str
    """The unmodified output: it may contain terminal control sequences."""
    dropped_bytes: int
    """Bytes printed before `text` that were dropped because a status cannot carry them."""

    def followed_by(self, more: PrintedOutput) -> PrintedOutput:
        """Return both as one, cut to the newest 64 Ki characters."""
        text = self.text + more.text
        cut = text[: max(0, len(text) - _PRINTED_CHARS)]
        dropped_bytes = self.dropped_bytes + more.dropped_bytes + len(cut.encode())
        return PrintedOutput(text=text[len(cut) :], dropped_bytes=dropped_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an engine or a user's program ended, as observed on its PC."""

    cause: Cause
    """For an engine one of NOT_STARTED (a retry would end in the same way), HOST_MEMORY, KILLED
    (any signal) and EXCEPTION (any exit code).
    """
    exit_code: int | None = None
    """Only for a user's program, like `signal`; `None` after a signal, or if it did not start."""
    signal: int | None = None
    text: str = ""
    """The end of its log, at most 16 KiB, or why it did not start. For an engine a description with
    the last line of its output.
    """
    was_asked: bool = False
    """Whether orders ended it (a pause, a new incarnation, or a save); orders start it again."""
    peak_bytes: int | None = None
    """Peak memory of its processes together: on the card, or resident on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The status of a slot's process. Its counters are totals since the process began, so that a
    lost status does no harm.
    """

    slot: str
    incarnation: int | None = None
    """Incarnation of the present or last process; `None` if the actor has started none."""
    actor: str = ""
    """The actor process; the actor fills in this field and all fields from `news` on."""
    verdict: Verdict = Verdict.OK
    verdict_cause: Cause | None = None
    """`None` with the verdicts OK and DONE."""
    state: WorkerState = WorkerState.WARMING
    reason: str = "its process starts"
    is_up: bool = False
    """Whether the process itself has sent a status."""
    is_held: bool = False
    """Whether it runs no steps because of its orders."""
    saves: int = 0
    """The newest `Orders.saves` that it has acted on."""
    save_due: bool = False
    """Whether a requested save is not done yet, or the head lacks a part of the saved state."""
    device: DeviceInfo | None = None
    memory: MemoryInfo | None = None
    size: int | None = None
    batch: int | None = None
    claim_bytes: int | None = None
    lease_bytes: int | None = None
    """The `Orders.lease_bytes` that it obeys."""
    counts: StepCounts = NO_COUNTS
    wall_s: float = 0.0
    """Time in which it worked, or rested after work, since it opened its device."""
    longest_step_s: float = 0.0
    """Longest part of a successful step."""
    errors_in_a_row: int = 0
    """Errors of the workload since its last turn (about 1 s) with successful steps and no error."""
    error: str | None = None
    """Traceback of the workload's last exception; it stays after later successful steps."""
    sensors: SensorReading | None = None
    """The last sensor reading; `None` before the first."""
    rss_bytes: int | None = None
    """Resident memory of the process on its host."""
    resume: PolicyState | None = None
    progress: Progress | None = None
    """`None` for a workload without an end, and before the first report."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last value of each metric that a training or a user's program reports."""
    ended: Ending | None = None
    """How a user's program ended; `None` while it runs, and for a workload."""
    team: TeamStatus | None = None
    """`None` for a slot without a team."""
    saved: str | None = None
    """Path on its PC of the file with its state, of which the head must keep a copy."""
    events: tuple[WorkerEvent, ...] = ()
    """The events that the head has not acknowledged."""

    news: int = 0
    """Number of the newest `events` and `output`; the head acknowledges it in `Orders.heard`."""
    output: PrintedOutput | None = None
    """`None` if there is no new output, or it is not captured."""
    quiet: Quiet | None = None
    """The activity of a silent process; `None` if it has just sent a status."""
    died: Ending | None = None
    """How the engine ended; `None` while it lives, and if its orders ended it."""
    checkpoint: CheckpointPiece | None = None
    """The next piece of the state of which the head must keep a copy."""
    copied: KeptBytes | None = None
    """How much this PC has received of the head's copy of the state."""
