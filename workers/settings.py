"""The specification of a worker, passed once to its process, and the values in it.

Does not cover later messages (`messages`). Imports neither torch nor ray. All units are bytes and
seconds; `None` means unknown or off.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, TypeAlias

from workers.units import MIB

Scalar: TypeAlias = str | int | float | bool | None

#: Assumed size of a CUDA context until it is measured, or if it cannot be: 676 MiB on an H200
#: (docs/results/h200.md). Older cards and drivers took about 300 MB (pytorch #20532, #107667).
ASSUMED_CONTEXT_BYTES: Final = 676 * MIB

#: A temperature outside these bounds is no valid reading of a running card.
COLDEST_C: Final = -50.0
HOTTEST_C: Final = 150.0


class FailureKind(StrEnum):
    """What an exception means for the worker.

    DEFINITE and PROBABLE are out-of-memory: the step shrinks. CONTEXT_CORRUPTED ends the process.
    OTHER is an error of the workload.
    """

    DEFINITE = "definite"
    PROBABLE = "probable"
    CONTEXT_CORRUPTED = "poisoned"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Progressive allocation and back-off, in the units of the machine the worker runs on."""

    first_fraction: float
    """First stage of progressive allocation, as a share of the allowed bytes; later stages add as
    much.
    """
    retry_reduction: float
    """Share by which a stage shrinks after a failure."""
    floor_bytes: int
    """Progressive allocation stops shrinking here."""
    size_decay: float
    size_floor: int
    batch_step: int
    batch_floor: int
    emergency_size: int
    cleanup_every: int
    """Successful steps between two clean-ups; 0: never."""
    failures_per_minute: int = 6
    """The most out-of-memory errors that `adaptive` allows within any 60 s."""
    leave_free_bytes: int = 0
    """`adaptive` shrinks if less than this stays free on the device."""
    remember: bool = False
    """`adaptive` starts with the limits of earlier runs, and stores its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """Which workload to run and the size and batch it starts from."""

    name: str
    """`matmul`, `train`, or `package.module:Class` for the user's own."""
    dtype: str
    size: int
    batch: int
    seed: int
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    """Further settings of the workload: the section `train:` of cluster.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThermalSettings:
    """The thresholds of a thermal governor. If `warm_c`, `hot_c` and `critical_c` are all off, the
    governor does nothing.

    Raises:
        ValueError: A value is not a number or out of its bounds, or the thresholds do not ascend.
    """

    warm_c: float | None = 70.0
    """From here the card is WARM, and the duty may be reduced if it warms fast. Below, the guides
    allow all of the time (BOOST). `None`: off.
    """
    hot_c: float | None = 78.0
    """From here the duty is reduced (guides). `None`: never."""
    critical_c: float | None = 83.0
    """From here all work pauses ("never exceed 83 C sustained" in the guides). `None`: never."""
    resume_c: float | None = 75.0
    """Below this a pause ends (guides). `None`: 2 degrees below `critical_c`."""

    def __post_init__(self) -> None:
        names = "warm_c", "hot_c", "critical_c", "resume_c"
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        for name, value in known.items():
            if not COLDEST_C < value < HOTTEST_C:
                raise ValueError(
                    f"{name} must be between {COLDEST_C:g} and {HOTTEST_C:g} C or off, not {value}"
                )
        ascending = [name for name in known if name != "resume_c"]
        pairs = [*itertools.pairwise(ascending), ("resume_c", "critical_c")]
        for lower, upper in pairs:
            if {lower, upper} <= known.keys() and known[lower] >= known[upper]:
                raise ValueError(
                    f"{lower} must be below {upper}, not {known[lower]:g} and {known[upper]:g} C"
                )

    @property
    def off(self) -> bool:
        """Whether the governor is disabled, including its alarms."""
        return self.warm_c is None and self.hot_c is None and self.critical_c is None


#: Settings of a disabled governor.
THERMAL_OFF: Final = ThermalSettings(warm_c=None, hot_c=None, critical_c=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a run learned about a workload on a card: where to start, and how its memory grows."""

    size: int
    """The largest size that succeeded lately."""
    fixed_bytes: float | None = None
    """A step takes `fixed_bytes + unit_bytes x size^power`; `None` if no peak was measured."""
    unit_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """The state of a policy, for the next process of its slot. Without times, which depend on the
    clock of a process.
    """

    failures: int = 0
    """Failures as the formulas of `classic` count them."""
    level: int = 0
    """Level of the last part (`workers.policy.base.Run`)."""
    learned: tuple[Learned | None, ...] = ()
    """What was learned at each level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """A user's program that runs unmodified, in place of an engine."""

    argv: tuple[str, ...]
    cwd: str | None = None
    """Folder in which it starts; `None`: the working directory of the worker."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the worker's environment."""
    python: str | None = None
    """A virtual environment or an interpreter, which `python` then names."""
    time_limit_s: float | None = None
    grace_s: float = 30.0
    """Between SIGTERM and SIGKILL."""
    lease_s: float | None = None
    """Its keeper ends it after this time without orders, because another PC may have started it
    again. `None`: no other PC can.
    """
    cap: bool = True
    """Whether a Python script runs under `workers.capped`, with the job's memory as cap."""
    outputs: tuple[str, ...] = ()
    """Glob patterns of its output files in its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamSpec:
    """The team of slots that share one training, as specified for one member."""

    members: tuple[str, ...]
    """All slots of the team, in the order in which their sums are added up."""
    listen: str
    """The only address (`host:port`) at which this member listens; port 0: any free one."""
    split: Literal["data", "layers"] = "data"
    """Whether members divide the samples of each step, or the blocks of the model."""
    budgets_bytes: tuple[int, ...] = ()
    """Budget of each member, in the order of `members`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything that the worker of one slot must know.

    Passed once to each of its processes; constant during a run.
    """

    slot: str
    node: str
    device: str
    """`cuda` or `cpu`."""
    budget_bytes: int
    """Bytes the whole process may hold on the device, context included."""
    card_budget_bytes: int
    """Sum of the budgets of all workers that share this worker's card."""
    memory_fraction: float
    """Largest share of the card's real memory that `card_budget_bytes` may reach."""
    workers_on_host: int
    """Number of worker processes on this machine, which divide its cores."""
    duty: float | None
    """Share of wall time in which it may keep the device busy; `None`: no limit."""
    mps: bool = False
    """Whether it is a client of the MPS daemon of its PC, which must be running. MPS then enforces
    its budget as well.
    """
    thread_share: float | None = None
    """Share of the card's multiprocessors that an MPS client may use; `None`: no limit."""
    policy: str
    memory: MemorySettings
    workload: WorkloadSpec
    thermal: ThermalSettings = THERMAL_OFF
    """Temperatures from which it slows down and pauses."""
    check_share: float = 0.0
    """Share of its time for checks of its results; 0: no checks."""
    run_id: str | None = None
    """Run under which a workload keeps its state on the node; `None`: no state is kept."""
    poll_s: float = 1.0
    """Interval of the engine's status reports."""
    team: TeamSpec | None = None
    """The team that shares its training; `None`: it trains by itself."""
    oom_rate: float = 0.0
    """Share of its parts for which `run --chaos` injects an out-of-memory, 0..1."""
    chaos_seed: int = 0
    """Seed of these injected errors."""
    command: CommandSpec | None = None
    """The program of this slot in place of an engine; then `policy`, `memory` and `workload` are
    unused.
    """

    @property
    def follows_memory(self) -> bool:
        """Whether its size follows the memory that the head leases; else it only shrinks."""
        return self.policy == "adaptive"
