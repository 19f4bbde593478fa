"""cluster.yaml as frozen models, and the checks between keys that one field alone cannot make.

Does not cover reading the text and wording the refusals (`load`) nor the sums (`core.placement`).
The reason for each number is in the commented cluster.yaml at the root.
"""

from __future__ import annotations

import math
from ipaddress import ip_address
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from orchestrator.config.duration import VALID_DURATION, parse_duration
from orchestrator.config.gpu_specs import PROFILES, Dtype
from workers.settings import ThermalSettings
from workers.training.settings import TrainSettings
from workers.units import GIB

#: The longest pause or timeout that helps; more would be a typing error.
_DAY_S = 86_400

#: Up to here a card holds exactly as many workers as planned. Beyond, Ray's steps are too coarse:
#: of 150 planned workers each gets 66 steps, and 151 of those fit.
MAX_WORKERS_PER_CARD = 100

#: Edge of the square matrices if neither the workload nor the node sets it: the 3070 guide's size.
DEFAULT_SIZE = 4096

#: From 1 to 65535.
_PORT = r"(?:[1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])"

Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=_DAY_S)]
MOST_GIB = 4096.0
Gib: TypeAlias = Annotated[float, Field(gt=0, le=MOST_GIB)]
Mib: TypeAlias = Annotated[float, Field(gt=0, le=1_048_576)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000)]
#: Edge of a square matrix; beyond 2^20 a single fp16 matrix is 2 TiB.
Size: TypeAlias = Annotated[int, Field(ge=1, le=1_048_576)]
Host: TypeAlias = Annotated[str, Field(pattern=rf"^{_HOST}$")]
PathText: TypeAlias = Annotated[str, Field(min_length=1, max_length=1024)]
Severity: TypeAlias = Literal["critical", "warning", "info"]
VALID_NODE_NAME = "1 to 63 of a-z, 0-9, - _ . that begin and end with a letter or digit"
#: Used in Ray labels (which must end in a letter or digit), file names and shell words.
NODE_NAME = r"^[a-z0-9](?:[a-z0-9_.-]{0,61}[a-z0-9])?$"
NodeName: TypeAlias = Annotated[str, Field(pattern=NODE_NAME)]


def _duration(value: object) -> object:
    parse_duration(value)
    return value


def _listen_address(text: str) -> str:
    """Refuse text that is no address of one network, where a member of a team could listen."""
    host, _, port = text.rpartition(":")
    try:
        address = ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise ValueError(f"{text!r} is not ADDRESS:PORT") from None
    if address.is_unspecified:
        raise ValueError(f"{host} would listen on every network of this PC")
    # Each further member on a PC uses the next port.
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= 65_000):
        raise ValueError(f"{text!r} has no port from 1 to 65000")
    return text


def _off_as_none(value: object) -> object:
    """Read `off` as `None`; YAML 1.1 reads an unquoted `off` as false."""
    return None if value is False or value == "off" else value


def _at_least_a_minute(value: float | str | None) -> float | str | None:
    if value is not None and parse_duration(value) < 60:
        raise ValueError("this is shorter than a minute")
    return value


def _not_an_address(text: str) -> str:
    """Refuse an address, which is a secret: a run copies its configuration into its records."""
    if "://" in text:
        raise ValueError("this is an address, not a file")
    return text


#: As typed: minutes, or text with units. Code reads the property in seconds beside the field.
Duration: TypeAlias = Annotated[
    float | str, BeforeValidator(_duration), Field(description=VALID_DURATION)
]
#: `None` is off.
Celsius: TypeAlias = Annotated[
    Annotated[float, Field(gt=-50, lt=150)] | None,
    BeforeValidator(_off_as_none),
    Field(description="degrees Celsius, or off"),
]


class Section(BaseModel):
    """Base of all sections: frozen; unknown keys are refused, and values are not converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ClusterConfig(Section):
    """Where the Ray cluster is, and how its nodes authenticate."""

    address: Annotated[
        str,
        Field(
            pattern=rf"^(?:auto|{_HOST}:{_PORT})$",
            description="auto, or HOST:PORT with a port from 1 to 65535",
        ),
    ] = "auto"
    head: Annotated[NodeName | None, Field(description=VALID_NODE_NAME)] = None
    """The node that runs the Ray head; `None` means the first of `nodes`."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 6379
    auth: Literal["token", "none"] = "token"


class NodeConfig(Section):
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
    """Overrides the card's profile; on a node without cards, the memory that its workers share."""
    host: Annotated[Host | None, Field(description="an IP address or a host name")] = None
    """How other PCs reach this one; `None` leaves the choice to Ray."""
    team_listen: Annotated[
        Annotated[str, Field(max_length=64), AfterValidator(_listen_address)] | None,
        Field(
            description="an address of this PC and a port up to 65000, such as 192.168.1.10:6390"
        ),
    ] = None
    """Where its member of `train.team` listens; `None`: where it joined the cluster, port 6390."""
    power_limit_w: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Set by `run --apply-power-limit` only; `None` keeps the card's own limit."""
    memory_offset_mhz: Annotated[int, Field(ge=-10_000, le=10_000)] | None = None
    """Set by `run --apply-power-limit --yes-really` only; `None` keeps the card's own offset."""

    @property
    def workers_per_card(self) -> int:
        """How many workers share the fullest card; all of them if there is no card."""
        return -(-self.workers // self.gpus) if self.gpus else self.workers

    @property
    def budget_bytes(self) -> int:
        """The budget of one worker, rounded down so that a sum never exceeds what was asked for."""
        return int(self.vram_per_worker_gib * GIB)

    @property
    def card_total_gib(self) -> float | None:
        """The memory of one card of the node; `None` if nothing says so."""
        is_known = self.vram_gib is None and self.gpus and self.gpu in PROFILES
        return PROFILES[self.gpu].shown_gib if is_known else self.vram_gib

    @property
    def card_allowed_bytes(self) -> int | None:
        """What the workers of one card may hold together: `memory_fraction` of the total."""
        total_gib = self.card_total_gib
        return None if total_gib is None else round(self.memory_fraction * total_gib * GIB)

    @property
    def overbooked(self) -> tuple[str, str] | None:
        """Why the budgets on one card exceed what its workers may hold, and what would fit; `None`
        if they fit or the memory is not known.
        """
        shared_by, each_bytes = self.workers_per_card, self.budget_bytes
        allowed_bytes = self.card_allowed_bytes
        if allowed_bytes is None or shared_by * each_bytes <= allowed_bytes:
            return None
        where = f"a {self.gpu}" if self.gpus else "its memory"
        asked = f"{shared_by} workers" if shared_by > 1 else "1 worker"
        asked += f" on the fullest of {self.gpus} cards" if self.gpus > 1 else ""
        text = (
            f"{asked} x {self.vram_per_worker_gib:.10g} GiB = "
            f"{shared_by * each_bytes / GIB:.10g} GiB, but {self.memory_fraction:.10g} of the "
            f"{self.card_total_gib:.10g} GiB of {where} is {allowed_bytes / GIB:.10g} GiB"
        )
        if allowed_bytes < shared_by:
            return text, "a larger memory_fraction"
        share_gib = allowed_bytes / shared_by / GIB
        # Rounded down to two digits after the point, or three in all.
        step_gib = 10.0 ** min(-2, math.floor(math.log10(share_gib)) - 2)
        valid = f"vram_per_worker_gib <= {math.floor(share_gib / step_gib) * step_gib:.6g}"
        # Each card needs a worker, so fewer workers than cards is not a valid plan.
        fitting = allowed_bytes // each_bytes * (self.gpus or 1)
        if fitting >= max(1, self.gpus):
            valid = f"at most {fitting} worker{'s' if fitting > 1 else ''}, or {valid}"
        return text, valid


class WorkersConfig(Section):
    """How worker processes share a card."""

    mps: bool = False
    """Use each PC's MPS daemon: `gpu_share` is then a share of processors, not of time."""


class WorkloadConfig(Section):
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


class MemoryConfig(Section):
    """Progressive allocation, and how workers back off; the defaults are from the guides."""

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


class ThermalConfig(Section):
    """The temperatures at which workers slow down and pause; the defaults are from the guides."""

    warm_c: Celsius = 70.0
    hot_c: Celsius = 78.0
    critical_c: Celsius = 83.0
    resume_c: Celsius = 75.0

    @model_validator(mode="after")
    def _ordered(self) -> ThermalConfig:
        """Refuse thresholds that contradict each other."""
        self.settings()
        return self

    def settings(self) -> ThermalSettings:
        """Return the settings of a worker's thermal governor."""
        return ThermalSettings(**self.model_dump())


class VerifyConfig(Section):
    """How results are checked for corruption."""

    share: Annotated[float, Field(ge=0, le=0.5)] = 0.01


class RunConfig(Section):
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
        PathText,
        # No character that controls a terminal, C1 codes and bidi marks included: runs print it.
        Field(pattern=r"^(?:[^\p{C}\p{Z}]| )*$"),
        Field(description="a folder of printable characters, made if it is not there"),
    ] = "runs"
    report: bool = False

    @property
    def duration_s(self) -> float:
        """Length of the run in seconds."""
        return parse_duration(self.duration)


class NotifyConfig(Section):
    """What `run` and `notify` send by mail or chat; addresses are secrets, in another file."""

    urls_file: Annotated[
        Annotated[PathText, AfterValidator(_not_an_address)] | None,
        Field(description="a file (chmod 600) with an address a line, or null"),
    ] = None
    every: Annotated[
        Duration | None,
        BeforeValidator(_off_as_none),
        AfterValidator(_at_least_a_minute),
        Field(description=f"{VALID_DURATION}, at least a minute, or off"),
    ] = "10m"
    """`None` sends no statuses."""
    severity: Severity = "warning"

    @property
    def every_s(self) -> float | None:
        """Seconds between two statuses; `None` if there are none."""
        return None if self.every is None else parse_duration(self.every)


class Config(Section):
    """All of cluster.yaml. Frozen; a changed copy is a new configuration and validated again."""

    cluster: ClusterConfig = ClusterConfig()
    nodes: Annotated[
        dict[NodeName, NodeConfig],
        Field(
            min_length=1,
            max_length=100,
            description="at least one node under its name, at most 100",
        ),
    ]
    workload: WorkloadConfig = WorkloadConfig()
    train: TrainSettings = TrainSettings()
    memory: MemoryConfig = MemoryConfig()
    compute_share_mode: Literal["duty", "none"] = "duty"
    workers: WorkersConfig = WorkersConfig()
    thermal: ThermalConfig = ThermalConfig()
    verify: VerifyConfig = VerifyConfig()
    notify: NotifyConfig = NotifyConfig()
    run: RunConfig = RunConfig()

    @property
    def head_node(self) -> str:
        """Name of the node that runs the Ray head."""
        return self.cluster.head or next(iter(self.nodes))
