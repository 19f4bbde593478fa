"""What a worker gets once: its specification, and the values that make it up.

Does not cover what is told later (`messages`). Imports neither torch nor ray. Bytes and
seconds throughout; `None` means unknown or off.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, TypeAlias

from workers.units import MIB

Scalar: TypeAlias = str | int | float | bool | None

#: What a CUDA context is assumed to take until it is measured, or where nothing can measure it: 676
#: MiB on an H200 (docs/results/h200.md). Older cards and drivers took about
#: 300 MB (pytorch #20532, #107667).
ASSUMED_CONTEXT_BYTES: Final = 676 * MIB

#: Beyond these no sensor of a running card is valid.
COLDEST_C: Final = -50.0
HOTTEST_C: Final = 150.0


class FailureKind(StrEnum):
    """What an exception means for the worker.

    DEFINITE and PROBABLE are out-of-memory: shrink. CONTEXT_CORRUPTED ends the process. OTHER is
    the workload's bug.
    """

    DEFINITE = "definite"
    PROBABLE = "probable"
    CONTEXT_CORRUPTED = "poisoned"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Progressive allocation and back-off, in the units of the machine the worker runs on."""

    first_fraction: float
    """First stage of progressive allocation, as a share of what is allowed; the next stages add as
    much.
    """
    retry_reduction: float
    """After a failure a stage is this share smaller."""
    floor_bytes: int
    """Progressive allocation stops shrinking here."""
    size_decay: float
    size_floor: int
    batch_step: int
    batch_floor: int
    emergency_size: int
    cleanup_every: int
    """Good steps between two clean-ups; 0 never cleans up."""
    failures_per_minute: int = 6
    """`adaptive` never lets more steps run out of memory within any 60 s."""
    leave_free_bytes: int = 0
    """`adaptive` shrinks when less than this stays free on the device."""
    remember: bool = False
    """`adaptive` starts with what earlier runs have learned, and keeps what it learns."""


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
    """What else the workload is told: the section `train:` of cluster.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThermalSettings:
    """The thresholds of a governor. All three of `warm_c`, `hot_c` and `critical_c` off: the
    governor does nothing.

    Raises:
        ValueError: A value that is no number or out of its bounds, or thresholds that are not in
            ascending order.
    """

    warm_c: float | None = 70.0
    """From here the card is WARM, and its duty may be reduced if it warms fast. The guides boost
    below, with all of the time. `None`: off."""
    hot_c: float | None = 78.0
    """From here the duty is reduced (guides). `None`: it never is."""
    critical_c: float | None = 83.0
    """From here everything pauses ("never exceed 83 C sustained" in the guides). `None`: nothing
    ever pauses.
    """
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
        """Whether nothing is asked of the governor, not even alarms."""
        return self.warm_c is None and self.hot_c is None and self.critical_c is None


#: Nothing is asked of the governor.
THERMAL_OFF: Final = ThermalSettings(warm_c=None, hot_c=None, critical_c=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What to remember of a workload on a card: where to start, and how its memory grows."""

    size: int
    """The largest size that ended well lately."""
    fixed_bytes: float | None = None
    """A step takes `fixed_bytes + unit_bytes x size^power`; `None` if no peak was ever measured."""
    unit_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """What a policy knows, for the next process of its slot: no times, as its clock is another."""

    failures: int = 0
    """As the guide's formulas count them."""
    level: int = 0
    """Of the last part (`workers.policy.base.Run`)."""
    learned: tuple[Learned | None, ...] = ()
    """Of each level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """A program of the user that is run as it is, in place of an engine."""

    argv: tuple[str, ...]
    cwd: str | None = None
    """Folder it starts in; `None`: where it was submitted."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the worker's environment."""
    python: str | None = None
    """A virtual environment, or an interpreter, whose `python` it finds first."""
    time_limit_s: float | None = None
    grace_s: float = 30.0
    """Between SIGTERM and SIGKILL."""
    lease_s: float | None = None
    """It ends if its worker is not asked for so long: another PC may have begun it anew. `None`:
    none can.
    """
    cap: bool = True
    """Whether a Python script is started by `workers.capped` with the job's memory."""
    outputs: tuple[str, ...] = ()
    """Patterns of the files that are its results, in its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamSpec:
    """The team of slots that share one training, as one of them is told."""

    members: tuple[str, ...]
    """All slots of it, in the order in which their sums are added up."""
    listen: str
    """`host:port` of this member, at which it listens and nowhere else; port 0: any free one."""
    split: Literal["data", "layers"] = "data"
    """Whether members divide the samples of each step, or the blocks of the model."""
    budgets_bytes: tuple[int, ...] = ()
    """What each member may hold, in the order of the members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a worker of one slot must know.

    Passed once to each of its processes, and the same for all of a run.
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
    """Share of what the card really has that `card_budget_bytes` may reach."""
    workers_on_host: int
    """Worker processes on this machine, for dividing its cores."""
    duty: float | None
    """Share of wall time the device is kept busy; `None` does not limit it."""
    mps: bool = False
    """Whether it is a client of the MPS daemon of its PC; one must run there. Its budget is then a
    limit of MPS too.
    """
    thread_share: float | None = None
    """Share of the card's multiprocessors that it may use as such a client; `None` does not limit
    it.
    """
    policy: str
    memory: MemorySettings
    workload: WorkloadSpec
    thermal: ThermalSettings = THERMAL_OFF
    """From which temperatures on it slows down and pauses; with all of them off it does not."""
    check_share: float = 0.0
    """Share of its time that checks of its results may take; 0 checks nothing."""
    run_id: str | None = None
    """Under which a workload keeps its state on the node; `None` keeps none."""
    poll_s: float = 1.0
    """So often its engine tells how it is."""
    team: TeamSpec | None = None
    """With whom it shares its training; `None`: it trains by itself."""
    oom_rate: float = 0.0
    """Share of the parts of its steps that `run --chaos` lets run out of memory, 0..1."""
    chaos_seed: int = 0
    """Of the chance by which they do."""
    command: CommandSpec | None = None
    """What this slot runs in place of an engine; then `policy`, `memory` and `workload` mean
    nothing to it.
    """

    @property
    def follows_memory(self) -> bool:
        """Whether its size follows the memory that the head lends it; else it only shrinks."""
        return self.policy == "adaptive"
