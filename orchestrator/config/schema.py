"""cluster.yaml as frozen models, and the checks between keys that one field alone cannot make.

Does not cover reading and writing the text (`load`), wording the refusals (`validation`) nor the
sums (`core.placement`). The reason for each number is in the commented cluster.yaml at the root.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from orchestrator.config.duration import VALID_DURATION, parse_duration
from workers.settings import ThermalSettings
from workers.training.settings import TrainSettings

#: A year of seconds would be a typing error for any pause or timeout; a day is the longest that
#: helps.
_DAY_S = 86_400
_MINUTE_S = 60.0

MAX_NODES = 100

_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])"

Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=_DAY_S)]
Gib: TypeAlias = Annotated[float, Field(gt=0, le=4096)]
Mib: TypeAlias = Annotated[float, Field(gt=0, le=1_048_576)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000)]
#: Edge of a square matrix; beyond 2^20 a single fp16 matrix is 2 TiB.
Size: TypeAlias = Annotated[int, Field(ge=1, le=1_048_576)]
Dtype: TypeAlias = Literal["fp32", "tf32", "fp16", "bf16"]
Host: TypeAlias = Annotated[str, Field(pattern=rf"^{_HOST}$")]
PathText: TypeAlias = Annotated[str, Field(min_length=1, max_length=1024)]
Severity: TypeAlias = Literal["critical", "warning", "info"]
ComputeShareMode: TypeAlias = Literal["duty", "none"]
VALID_NODE_NAME = "1 to 63 of a-z, 0-9, - _ . that begin and end with a letter or digit"
#: Ends up in Ray labels (which must end in a letter or digit), file names and shell words.
NODE_NAME = r"^[a-z0-9](?:[a-z0-9_.-]{0,61}[a-z0-9])?$"
NodeName: TypeAlias = Annotated[str, Field(pattern=NODE_NAME, description=VALID_NODE_NAME)]


def _address(text: str) -> str:
    if text != "auto" and not 1 <= int(text.rpartition(":")[2]) <= 65_535:
        raise ValueError(f"{text} has a port that does not exist; valid: a port from 1 to 65535")
    return text


def _printable(text: str) -> str:
    """Refuse characters that control a terminal, C1 codes and bidi marks included: runs print this
    folder.
    """
    if not text.isprintable():
        raise ValueError(
            "has a character that cannot be printed; valid: a folder, made if it is not there"
        )
    return text


def _duration(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        refusal = f"this is not a duration; valid: {VALID_DURATION}"
        raise ValueError(refusal)  # noqa: TRY004 - pydantic's protocol
    parse_duration(value)
    return value


def _or_off(value: object) -> object:
    """Read `off` as `None`; YAML 1.1 reads an unquoted `off` as false."""
    return None if value is False or value == "off" else value


def _interval(value: float | str | None) -> float | str | None:
    if value is not None and parse_duration(value) < _MINUTE_S:
        raise ValueError(
            f"this is shorter than a minute; valid: {VALID_DURATION}, at least a minute, or off"
        )
    return value


def _no_address(text: str) -> str:
    """Refuse an address, which is a secret: a run copies its configuration into its records."""
    if "://" in text:
        raise ValueError(
            "this is an address, not a file; valid: a file (chmod 600) with an address a line, or "
            "null"
        )
    return text


#: As typed: minutes, or text with units. Code reads the property in seconds beside it.
Duration: TypeAlias = Annotated[
    float | str, BeforeValidator(_duration), Field(description=VALID_DURATION)
]
#: `None` is off.
Celsius: TypeAlias = Annotated[
    Annotated[float, Field(gt=-50, lt=150)] | None,
    BeforeValidator(_or_off),
    Field(description="degrees Celsius, or off"),
]


class _Section(BaseModel):
    """Base of all sections: values are not converted, unknown keys are refused, and models are
    frozen.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ClusterConfig(_Section):
    """Where the Ray cluster is and how its members know each other."""

    address: Annotated[
        str,
        Field(pattern=rf"^(?:auto|{_HOST}:[0-9]{{1,5}})$", description="auto, or HOST:PORT"),
        AfterValidator(_address),
    ] = "auto"
    head: NodeName | None = None
    """The node that runs the Ray head; `None` means the first of `nodes`."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 6379
    auth: Literal["token", "none"] = "token"


class NodeConfig(_Section):
    """One PC: its card and how many workers share it."""

    gpu: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9 _.()+-]{0,63}$",
            description="the name of a card, such as rtx-3090",
        ),
    ]
    gpus: Annotated[int, Field(ge=0, le=64)] = 1
    workers: Annotated[int, Field(ge=1, le=1024, description="how many workers, from 1 to 1024")]
    cpus_per_worker: Annotated[int, Field(ge=1, le=1024)] = 1
    gpu_share: Share = 1.0
    vram_per_worker_gib: Annotated[Gib, Field(description="GiB of each worker, above 0")]
    memory_fraction: Share = 0.9
    size: Size | None = None
    dtype: Dtype | None = None
    """`None` means the workload's."""
    vram_gib: Gib | None = None
    """Overrides what the card's profile says; on a node without cards, what its workers share."""
    host: Annotated[Host | None, Field(description="an IP address or a host name")] = None
    """How other PCs reach this one; `None` leaves the choice to Ray."""
    power_limit_w: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Set by `run --apply-power-limit` only; `None` keeps the card's own."""
    memory_offset_mhz: Annotated[int, Field(ge=-10_000, le=10_000)] | None = None
    """Set by `run --apply-power-limit --yes-really` only; `None` keeps the card's own."""


class WorkersConfig(_Section):
    """How worker processes share a card."""

    mps: bool = False
    """As clients of the MPS daemon that the user runs on each PC: `gpu_share` is then one of the
    processors, in place of time.
    """


class WorkloadConfig(_Section):
    """What the workers compute, and the size and batch they start from."""

    name: Annotated[
        str,
        Field(
            pattern=r"^(?:matmul|train|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*)$",
            max_length=255,
            description="matmul, train, or your own as package.module:Class",
        ),
    ] = "matmul"
    dtype: Dtype = "fp16"
    size: Size | None = None
    """`None` means each node's own."""
    batch: Annotated[int, Field(ge=1, le=1_048_576)] = 128
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0


class MemoryConfig(_Section):
    """Progressive allocation, and how workers back off when memory runs out.

    Defaults are the guides'.
    """

    policy: Literal["adaptive", "classic"] = "adaptive"
    failures_per_minute: Annotated[int, Field(ge=1, le=1_000)] = 6
    leave_free_mib: Annotated[float, Field(ge=0, le=1_048_576)] = 128.0
    remember: bool = True
    first_fraction: Share = 0.20
    retry_reduction: Annotated[float, Field(gt=0, lt=1)] = 0.10
    floor_mib: Mib = 100.0
    size_decay: Annotated[float, Field(gt=0, lt=1)] = 0.7
    size_floor: Size = 256
    batch_step: Annotated[int, Field(ge=0, le=1_048_576)] = 16
    batch_floor: Annotated[int, Field(ge=1, le=1_048_576)] = 32
    emergency_size: Size = 128
    cleanup_every: Annotated[int, Field(ge=0, le=1_000_000)] = 15


class ThermalConfig(_Section):
    """From which temperatures on workers slow down and pause; the numbers are the guides'."""

    warm_c: Celsius = 70.0
    hot_c: Celsius = 78.0
    critical_c: Celsius = 83.0
    resume_c: Celsius = 75.0

    @model_validator(mode="after")
    def _ordered(self) -> ThermalConfig:
        """Refuse thresholds that contradict each other."""
        try:
            self.settings()
        except ValueError as error:
            raise ValueError(
                f"{error}; valid: warm_c < hot_c < critical_c and resume_c < critical_c"
            ) from None
        return self

    def settings(self) -> ThermalSettings:
        """Return what a worker's governor gets."""
        return ThermalSettings(**self.model_dump())


class VerifyConfig(_Section):
    """How results are checked for corruption."""

    share: Annotated[float, Field(ge=0, le=0.5)] = 0.01


class RunConfig(_Section):
    """How long, how often, and when to give up."""

    duration: Duration = 5.0
    poll_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    min_success_rate: Annotated[float, Field(ge=0, le=1)] = 0.95
    hang_timeout_s: Seconds = 60.0
    stale_after_s: Seconds = 10.0
    start_timeout_s: Seconds = 120.0
    restart_backoff_s: Seconds = 1.0
    restart_backoff_max_s: Seconds = 60.0
    max_deaths: Count = 5
    death_window_s: Seconds = 300.0
    max_workload_errors: Count = 5
    leak_flag_mib: Mib | None = 256.0
    leak_limit_mib: Mib | None = 1024.0
    stop_grace_s: Annotated[float, Field(ge=0, le=_DAY_S)] = 10.0
    dir: Annotated[
        PathText, AfterValidator(_printable), Field(description="a folder, made if it is not there")
    ] = "runs"
    report: bool = False

    @property
    def duration_s(self) -> float:
        """Length of the run in seconds."""
        return parse_duration(self.duration)


class NotifyConfig(_Section):
    """What `run` and `notify` tell by mail or chat.

    Addresses are secrets and stand in a file of their own.
    """

    urls_file: Annotated[
        Annotated[PathText, AfterValidator(_no_address)] | None,
        Field(description="a file with an address a line, which only you can read"),
    ] = None
    every: Annotated[
        Duration | None,
        BeforeValidator(_or_off),
        AfterValidator(_interval),
        Field(description=f"{VALID_DURATION}, or off"),
    ] = "10m"
    """`None` sends no statuses."""
    severity: Severity = "warning"

    @property
    def every_s(self) -> float | None:
        """Seconds between two statuses; `None` if there are none."""
        return None if self.every is None else parse_duration(self.every)


class Config(_Section):
    """All of cluster.yaml. Frozen; a changed copy is a new configuration and validated again."""

    cluster: ClusterConfig = ClusterConfig()
    nodes: Annotated[
        dict[NodeName, NodeConfig],
        Field(
            min_length=1,
            max_length=MAX_NODES,
            description=f"at least one node under its name, at most {MAX_NODES}",
        ),
    ]
    workload: WorkloadConfig = WorkloadConfig()
    train: TrainSettings = TrainSettings()
    memory: MemoryConfig = MemoryConfig()
    compute_share_mode: ComputeShareMode = "duty"
    workers: WorkersConfig = WorkersConfig()
    thermal: ThermalConfig = ThermalConfig()
    verify: VerifyConfig = VerifyConfig()
    notify: NotifyConfig = NotifyConfig()
    run: RunConfig = RunConfig()

    @property
    def head_node(self) -> str:
        """Name of the node that runs the Ray head."""
        return self.cluster.head or next(iter(self.nodes))
