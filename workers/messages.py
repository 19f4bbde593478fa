"""What crosses processes: directives from the head to a worker, reports back.

Covers the frozen dataclasses, the names of states, and the two errors that the engine turns into a
`Verdict`. Does not cover how they travel (the head's business) nor how a slice is run (the
engine's). Imports neither torch nor ray. Bytes and seconds throughout; `None` means unknown.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Final, TypeAlias, get_args, get_type_hints

from workers.readings import SensorReading
from workers.settings import (
    FailureKind,  # noqa: F401 - where users import it from (docs/resilient.md)
    Scalar,
    StoredLimit,
)

#: A policy's state in a form that any store can keep; the policy alone knows what the keys mean.
ResumeState: TypeAlias = Mapping[str, Scalar]


class WorkerState(StrEnum):
    """What a worker reports that it is doing, as the health table names it. Always shown with a
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
    """How the process that sent a report stands."""

    OK = "ok"
    #: The workload is finished; the head ends this process and starts no other.
    DONE = "done"
    #: The device context is beyond repair; the head must end this process and let a fresh one
    #: resume.
    CONTEXT_CORRUPTED = "poisoned"
    #: The directive cannot work on this machine however often it is tried (wrong card, unknown
    #: workload).
    INCOMPATIBLE = "incompatible"
    #: It can work on no machine before the user changes what is trained: its settings or its data.
    BAD_INPUT = "bad input"


class IncompatibleError(Exception):
    """The directive can never work here (wrong card, unknown workload, a cap too small).

    Its text says what would.
    """

    verdict = Verdict.INCOMPATIBLE


class BadInputError(IncompatibleError):
    """The settings or the data of a training cannot be used."""

    verdict = Verdict.BAD_INPUT


class ContextCorruptedError(Exception):
    """The device no longer answers this process; a fresh process may succeed.

    Its text says what the device did.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """One slice for one worker, which has had its `WorkerSpec` since its process began.

    `incarnation` counts the processes that have lived in the slot; a worker that sees a new one
    starts from `resume` instead of what it remembers. `sequence` counts the slices of the slot over
    the whole run.
    """

    incarnation: int
    sequence: int
    duration_s: float
    """Aim for this long; 0 returns after the first step that ends well, or fails for good."""
    resume: ResumeState | None
    step_limit: int | None = None
    """The slice ends early after this many good steps, so that a slice that gives no report cannot
    have done more; `None` sets no limit."""
    lease_bytes: int | None = None
    """What the worker may hold now, its cap apart, so that those who share a card do not all grow
    into the same bytes; `None` does not limit it."""
    checkpoint: bytes | None = None
    """The head's copy of the slot's state, in the first slice of a process; `None`: there is none.
    """
    save: bool = False
    """Whether the workload is asked to save its state as soon as it can."""

    def granted(self, lease_bytes: int | None, checkpoint: bytes | None) -> Directive:
        """Return this slice with its lease and copy; `dataclasses.replace` takes 3 times as long,
        and every slice has a lease.
        """
        return Directive(
            incarnation=self.incarnation,
            sequence=self.sequence,
            duration_s=self.duration_s,
            resume=self.resume,
            step_limit=self.step_limit,
            lease_bytes=lease_bytes,
            checkpoint=checkpoint,
            save=self.save,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """What the worker found and what it was given."""

    kind: str
    name: str
    uuid: str | None
    total_bytes: int | None
    context_bytes: int
    """What the process holds on the device before any tensor, measured (or assumed: see
    `context_source`).
    """
    context_source: str
    peak_source: str
    """How the highest memory of a step is measured, or why it is not."""
    cap_bytes: int
    """As read back from whatever enforces it."""
    dtype: str
    """The type really used; a CPU runs fp16 as bf16 or fp32."""
    threads: int
    pid: int
    hostname: str
    torch_version: str
    driver: str | None = None
    """Version of the card's driver; `None` on a CPU, or where it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """The device's memory as the worker sees it at the end of a slice."""

    device_total_bytes: int | None
    device_used_bytes: int | None
    """Use of the device by all programs."""
    free_bytes: int
    """What this worker could still obtain: min(cap, what the device has free), less what it holds.
    """
    allocated_bytes: int
    """In live tensors."""
    reserved_bytes: int
    """Held by the allocator: live tensors and its pool."""
    peak_bytes: int
    """The most that a step of the slice needed: `allocated_bytes`, and on a card gaps between
    tensors.
    """
    alloc_retries: int
    """Times the allocator had to flush its pool to satisfy a request, since the process began."""
    kept_bytes: int | None = None
    """What the process still held after the workload's last `release`, beyond what it held when it
    was opened; `None` before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEvent:
    """Something that happened inside a slice: an OOM, a back-off, an emergency.

    Goes to events.jsonl.
    """

    name: str
    at_unix_s: float
    detail: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """The counters of steps and result checks: of one slice, of a slot, or of a whole run.

    The only place that names them; whatever adds counts up, adds two of these. Their names are keys
    of summary.json.
    """

    steps_ok: int = 0
    steps_oom: int = 0
    steps_oom_probe: int = 0
    """Of `steps_oom`, those at a size that the policy was still searching for: `Run.is_probe`."""
    steps_error: int = 0
    """Steps that failed by the workload's own fault."""
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
        """Return the sum, counter by counter.

        Without `__init__`, which takes twice as long: every report adds two.
        """
        total = object.__new__(StepCounts)
        for put, mine, others in zip(
            _PUT_COUNTER, _counters_of(self), _counters_of(other), strict=True
        ):
            put(total, mine + others)
        return total

    @staticmethod
    def total(counts: Iterable[StepCounts]) -> StepCounts:
        """Return the sum of any number of counts.

        Of thousands, faster than adding them one by one.
        """
        known = tuple(counts)
        return StepCounts(
            **{name: sum(getattr(one, name) for one in known) for name in StepCounts.__slots__}
        )

    @property
    def steps(self) -> int:
        """All steps that were begun and ended, however they ended."""
        return self.steps_ok + self.steps_oom + self.steps_error

    @property
    def steps_judged(self) -> int:
        """The steps that count for the success rate."""
        return self.steps - self.steps_oom_probe

    @property
    def success_rate(self) -> float | None:
        """Share of the steps that ended well, 0..1; `None` before the first.

        An out-of-memory counts against it, but not one of the search for the size: there are as
        many of those in a short run as in a long one.
        """
        judged = self.steps_judged
        return self.steps_ok / judged if judged else None


_counters_of = operator.attrgetter(*StepCounts.__slots__)

#: What sets each counter of a new `StepCounts`, in their order.
_PUT_COUNTER = [getattr(StepCounts, name).__set__ for name in StepCounts.__slots__]

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
    """A part of a file with a slot's state, on its way to the head."""

    number: int
    """Of the file; counts up in each process."""
    offset_bytes: int
    total_bytes: int
    """Of the file."""
    data: bytes = field(repr=False)

    @property
    def is_last(self) -> bool:
        """Whether the file ends with it."""
        return self.offset_bytes + len(self.data) == self.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a process and its children did between two looks at it."""

    interval_s: float
    wanted_s: float
    """Seconds in which its busiest thread ran, or was ready and waited for a CPU: on a full machine
    a thread that computes gets little time and wants all of it."""
    cpu_s: float
    """Seconds in which that thread ran."""
    on_card: bool = False
    """Whether a card computed for it, or, where the driver does not tell for whom, for any process.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedOutput:
    """What a worker's process printed in one slice, by Python and by native libraries."""

    text: str
    """As it was printed: it may hold what steers a terminal."""
    dropped_bytes: int
    """Printed before it, and more than a report carries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a program of the user ended (`workers/command`)."""

    exit_code: int | None = None
    """`None` after a signal, and of a program that did not start."""
    signal: int | None = None
    text: str = ""
    """The end of its log, at most 16 KiB; why it did not start."""
    started: bool = True
    was_asked: bool = False
    """Whether it ended because its slot is to rest: it is to be started again."""
    time_limit: bool = False
    out_of_memory: bool = False
    """By the words in its log: its card's memory, or on a CPU its cap."""
    host_memory: bool = False
    """The kernel killed a process of this PC for want of RAM while it was killed, or it failed for
    want of RAM beside a card."""
    disk_full: bool = False
    """Where it writes there was no room left, or its last words say so."""
    nan_loss: bool = False
    """The last loss in its results was no number."""
    peak_bytes: int | None = None
    """Most that its processes took together: of the card, or on a CPU resident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a slice, which is also the heartbeat. Its counts are of this slice alone."""

    slot: str
    incarnation: int
    sequence: int
    verdict: Verdict
    state: WorkerState
    reason: str
    device: DeviceInfo | None
    memory: MemoryInfo | None
    size: int | None
    batch: int | None
    claim_bytes: int | None
    counts: StepCounts = NO_COUNTS
    wall_s: float = 0.0
    longest_step_s: float = 0.0
    """Of the good steps of this slice."""
    sensors: SensorReading | None = None
    """The last look at the sensors; `None` if there was none yet."""
    rss_bytes: int | None = None
    """Resident memory of the worker's process on its host at the end of the slice."""
    error: str | None = None
    """Traceback of the workload's own exception, as text."""
    events: tuple[WorkerEvent, ...] = ()
    resume: ResumeState | None = None
    progress: Progress | None = None
    """`None` of a workload without an end, and of a slice that failed before it could be asked."""
    checkpoint: CheckpointPiece | None = None
    """Of the state that the head is to keep, too."""
    save_due: bool = False
    """Whether the workload was asked to save its state, and has not been able to since."""
    learned: StoredLimit | None = None
    """What a later run under the same circumstances could start from; `None` if the policy learns
    nothing.
    """
    output: PrintedOutput | None = None
    """`None`: nothing was printed, or it is not captured."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last of each figure by which a training, or a program of the user, judges itself."""
    ended: Ending | None = None
    """How that program ended; `None` while it runs, and of a workload."""
