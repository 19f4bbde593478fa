"""What is known of a run at one moment: a `Snapshot` of `Row`s, and what each key of a row means.

Does not cover how it is made (`run.snapshot`), drawn or stored. Bytes, seconds, watts and degrees
Celsius throughout; shares are 0..1, names ending in `_pct` are 0..100, and `None` means unknown.
"""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from orchestrator.core.slot import HeadState, Slot, SlotState, slot_state
from workers.messages import NO_COUNTS, NO_PROGRESS, Progress, StepCounts, WorkerState

#: States from worst to best: the order of the table, and of every list of states in words. Their
#: colours repeat what the word says; no information is in the colour alone.
STATE_STYLES: dict[SlotState, str] = {
    HeadState.QUARANTINED: "bold red",
    HeadState.LOST: "bold red",
    WorkerState.CORRUPT: "bold red",
    HeadState.RESTARTING: "magenta",
    WorkerState.EMERGENCY: "bold yellow",
    WorkerState.PARKED: "bold yellow",
    WorkerState.PAUSED: "yellow",
    WorkerState.THROTTLED: "yellow",
    WorkerState.BACKOFF: "yellow",
    WorkerState.WARMING: "cyan",
    HeadState.STARTING: "cyan",
    HeadState.HELD: "cyan",
    WorkerState.RUNNING: "green",
    WorkerState.DONE: "bold green",
    WorkerState.STOPPED: "dim",
}
STATES_WORST_FIRST = tuple(STATE_STYLES)

_STATE_RANK = {state: rank for rank, state in enumerate(STATES_WORST_FIRST)}

#: A slot below this share of good steps moves up among its equals; the guides ask for "95%+ success
#: rate".
LOW_SUCCESS_RATE = 0.95

AnyBrief = TypeVar("AnyBrief", bound="Brief")

Value: TypeAlias = str | int | float | None


def finite(value: float | None) -> float | None:
    """Return the number, or `None` where it is unknown, infinite, not a number, or whole and too
    large for a float.
    """
    return value if value is not None and abs(value) <= sys.float_info.max else None


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of Prometheus whose value is that of one key, in base units."""

    name: str
    """Without `_total`, which a counter gets when it is written."""
    help: str
    factor: float = 1.0
    """The value of the row, times this, is the value of the metric."""
    kind: Literal["gauge", "counter"] = "gauge"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table. It is sorted by the key that it is declared with."""

    name: str
    title: str
    unit: str = ""
    """The second line of the heading."""
    keep: int = 0
    """A narrow terminal drops the columns with the highest of these first."""
    shows: tuple[str, ...] = ()
    """Keys with slashes between them; by default the one that it is declared with."""
    digits: int = 0
    """Significant digits of the largest number; 0 shows whole numbers."""
    cells: int | None = None
    """Width of words, which are aligned to the left; `None`: numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """What is to be known about one key of a row."""

    key: str = ""
    part: Literal["", "counts", "progress"] = ""
    """Which part of a row has it; empty: the row itself."""
    kinds: frozenset[type] = frozenset()
    """Types that its value has in JSON."""
    unit: str = ""
    """Of the value in a row: `bytes`, `s`, `C`, `W`, `MHz`, `%`, `ratio` (0..1, shown in per cent),
    or empty.
    """
    column: Column | None = None
    """The column of the table that shows it; `None` if none does, or another key's."""
    words: tuple[str, ...] = ()
    """Other names in filters, besides the key, the column and their beginnings."""
    of: Literal["slot", "card"] = "slot"
    """A key of the card has the same value in all slots of that card."""
    sampled: bool = True
    """Whether the store keeps its course, or only the last value."""
    metric: Metric | None = None

    @property
    def name(self) -> str:
        """What it is called on the screen: its column, else its key."""
        return self.key if self.column is None else self.column.name

    def value(self, row: Row) -> Value:
        """Return what is sorted, compared and exported; `None` if it is unknown."""
        value = row.value(self.key)
        return finite(value) if isinstance(value, float) else value


def _counter(name: str, text: str) -> Metric:
    return Metric(name, text, kind="counter")


#: Beside `progress`, whose fields they are.
_PROGRESS_FIELDS = {
    "train_step": Field(
        column=Column("train_step", "step", "/of", 11, shows=("train_step", "train_steps")),
        words=("step",),
        metric=Metric("slot_train_step", "Optimiser steps done."),
    ),
    "train_steps": Field(
        sampled=False, metric=Metric("slot_train_steps", "Optimiser steps to do.")
    ),
    "epoch": Field(
        column=Column("epoch", "epoch", "", 52, digits=3),
        metric=Metric("slot_train_epoch", "Times the data was seen."),
    ),
    "loss": Field(
        column=Column("loss", "loss", "/first", 12, shows=("loss", "first_loss"), digits=4),
        metric=Metric("slot_train_loss", "Loss of the last optimiser step."),
    ),
    "first_loss": Field(sampled=False),
    "samples_per_s": Field(
        column=Column("samples", "samples", "/s", 13, digits=3),
        metric=Metric("slot_train_samples_per_second", "Samples a second."),
    ),
    "tokens_per_s": Field(
        column=Column("tokens", "tokens", "/s", 51, digits=3),
        metric=Metric("slot_train_tokens_per_second", "Tokens a second."),
    ),
    "micro_batch": Field(
        column=Column("micro", "micro", "x acc", 15, shows=("micro_batch", "accumulation")),
        metric=Metric("slot_train_micro_batch", "Samples computed at once."),
    ),
    "accumulation": Field(),
    "memory_level": Field(column=Column("level", "level", "", 17)),
    "saved_step": Field(
        column=Column("saved", "saved", "step", 16),
        metric=Metric("slot_train_saved_step", "Optimiser steps in the last checkpoint."),
    ),
    "redone_steps": Field(
        column=Column("redone", "redone", "steps", 53),
        metric=_counter("slot_train_redone_steps", "Optimiser steps done again."),
    ),
    "data_wait_pct": Field(
        unit="%",
        column=Column("wait", "data", "wait %", 18, digits=2),
        metric=Metric("slot_train_data_wait_ratio", "Share of time without data.", 0.01),
    ),
    "copies_pct": Field(
        unit="%", metric=Metric("slot_train_copies_ratio", "Share of time in copies.", 0.01)
    ),
    "optimizer_pct": Field(
        unit="%", metric=Metric("slot_train_optimizer_ratio", "Share of time in updates.", 0.01)
    ),
    "mfu_pct": Field(
        unit="%",
        column=Column("mfu", "MFU", "%", 19, digits=3),
        metric=Metric("slot_train_mfu_ratio", "Operations, of the rating.", 0.01),
    ),
    "eta_s": Field(unit="s", column=Column("eta", "ETA", "", 14), sampled=False),
    "weights_sha256": Field(words=("sha256",), sampled=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One slot of the health table; `FIELDS` are its keys, in the order of summary.json.

    What there is to know of a key stands beside it. Counts are the head's, over the whole run: they
    outlive the process in the slot and never go backwards. Progress does, when a process begins at
    a checkpoint.
    """

    slot: Annotated[str, Field(column=Column("slot", "slot", keep=0, cells=32), sampled=False)]
    node: Annotated[str, Field(words=("pc",), sampled=False)]
    gpu_name: Annotated[
        str | None,
        Field(
            column=Column("card", "card", keep=110, cells=16),
            words=("gpu",),
            of="card",
            sampled=False,
        ),
    ] = None
    gpu_uuid: Annotated[str | None, Field(words=("uuid",), of="card", sampled=False)] = None
    device: Annotated[str | None, Field(sampled=False)] = None
    """`cuda` or `cpu`."""
    state: Annotated[SlotState, Field(column=Column("state", "state", keep=10, cells=12))]
    reason: Annotated[
        str, Field(column=Column("reason", "reason", keep=170, cells=32), sampled=False)
    ]
    policy: Annotated[str | None, Field(sampled=False)] = None
    size: Annotated[
        int | None,
        Field(
            column=Column("size", "size", "/batch", 20, shows=("size", "batch")),
            metric=Metric("slot_size", "Size of the last step."),
        ),
    ] = None
    batch: Annotated[int | None, Field(metric=Metric("slot_batch", "Batch of the last step."))] = (
        None
    )
    dtype: Annotated[
        str | None,
        Field(column=Column("dtype", "type", keep=180, cells=10), words=("type",), sampled=False),
    ] = None
    tflops: Annotated[float | None, Field(column=Column("tflops", "TFLOP/s", "", 30, digits=4))] = (
        None
    )
    baseline_pct: Annotated[
        float | None,
        Field(
            unit="%",
            column=Column("baseline", "base", "%", 60),
            metric=Metric(
                "slot_baseline_ratio",
                "Throughput, of the best of such a worker on this card.",
                0.01,
            ),
        ),
    ] = None
    """Share of the best that this card has done for such a worker."""
    peak_pct: Annotated[
        float | None,
        Field(
            unit="%",
            column=Column("peak", "peak", "%", 160),
            metric=Metric("slot_peak_ratio", "Throughput, of the rating at its clock.", 0.01),
        ),
    ] = None
    """Share of what the card is rated for at its present clock."""
    allocated_bytes: Annotated[
        int | None,
        Field(
            unit="bytes",
            column=Column(
                "vram",
                "allocated",
                "/reserved/cap",
                40,
                shows=("allocated_bytes", "reserved_bytes", "cap_bytes"),
            ),
            metric=Metric("slot_allocated_bytes", "In live tensors."),
        ),
    ] = None
    reserved_bytes: Annotated[
        int | None,
        Field(
            unit="bytes",
            column=Column("vram_bar", "VRAM", "of cap", 120, cells=10),
            metric=Metric("slot_reserved_bytes", "Held by the allocator."),
        ),
    ] = None
    claim_bytes: Annotated[
        int | None,
        Field(
            unit="bytes", metric=Metric("slot_claim_bytes", "Obtained by progressive allocation.")
        ),
    ] = None
    cap_bytes: Annotated[
        int | None,
        Field(unit="bytes", metric=Metric("slot_cap_bytes", "Most that tensors may hold.")),
    ] = None
    budget_bytes: Annotated[
        int | None,
        Field(
            unit="bytes",
            sampled=False,
            metric=Metric(
                "slot_budget_bytes", "Most that the whole process may hold on the device."
            ),
        ),
    ] = None
    device_used_bytes: Annotated[
        int | None,
        Field(
            unit="bytes",
            column=Column(
                "card_memory",
                "card GiB",
                "used/all",
                200,
                shows=("device_used_bytes", "device_total_bytes"),
            ),
            of="card",
            metric=Metric("card_memory_used_bytes", "Used on the card by all programs."),
        ),
    ] = None
    device_total_bytes: Annotated[
        int | None,
        Field(
            unit="bytes",
            of="card",
            sampled=False,
            metric=Metric("card_memory_total_bytes", "Memory of the card."),
        ),
    ] = None
    counts: StepCounts = NO_COUNTS
    steps_ok: ClassVar[Field] = Field()
    steps_oom: ClassVar[Field] = Field()
    steps_oom_probe: ClassVar[Field] = Field()
    steps_error: ClassVar[Field] = Field(words=("errors",))
    success_rate: ClassVar[Field] = Field(
        unit="ratio", column=Column("success", "good", "%", 90), words=("good",), sampled=False
    )
    oom_count: ClassVar[Field] = Field(
        column=Column("oom", "OOM", "/emerg", 50, shows=("oom_count", "emergency_count")),
        words=("ooms",),
        metric=_counter("slot_ooms", "Out-of-memory errors."),
    )
    alloc_retries: Annotated[int | None, Field(sampled=False)] = None
    emergency_count: ClassVar[Field] = Field(
        metric=_counter("slot_emergencies", "Emergency products.")
    )
    restarts: Annotated[
        int,
        Field(
            column=Column("restarts", "re-", "starts", 190),
            metric=_counter("slot_restarts", "Processes that died or were replaced."),
        ),
    ] = 0
    duty_requested: Annotated[
        float | None,
        Field(
            unit="ratio",
            metric=Metric("slot_duty_requested_ratio", "Share of time that the worker may use."),
        ),
    ] = None
    duty_measured: Annotated[
        float | None,
        Field(
            unit="ratio",
            column=Column(
                "duty", "duty %", "ask/got", 140, shows=("duty_requested", "duty_measured")
            ),
        ),
    ] = None
    temperature_c: Annotated[
        float | None,
        Field(
            unit="C",
            column=Column(
                "temperature", "temp C", "/margin", 70, shows=("temperature_c", "margin_c")
            ),
            of="card",
            metric=Metric("card_temperature_celsius", "Temperature of the die."),
        ),
    ] = None
    temperature_of: Annotated[str | None, Field(of="card", sampled=False)] = None
    """`card`, or `processor` on a computer without one; `None` if no temperature is known."""
    margin_c: Annotated[
        float | None,
        Field(
            unit="C",
            of="card",
            metric=Metric(
                "card_temperature_margin_celsius", "Degrees below the limit of the hardware."
            ),
        ),
    ] = None
    """How much warmer the card may get before it slows itself down."""
    memory_temperature_c: Annotated[
        float | None,
        Field(
            unit="C",
            column=Column("memory_temperature", "VRAM", "C", 230),
            of="card",
            metric=Metric("card_memory_temperature_celsius", "Temperature of the memory."),
        ),
    ] = None
    power_w: Annotated[
        float | None,
        Field(
            unit="W",
            column=Column("power", "power", "/cap W", 150, shows=("power_w", "power_limit_w")),
            words=("watts",),
            of="card",
            metric=Metric("card_power_watts", "Power drawn."),
        ),
    ] = None
    power_limit_w: Annotated[
        float | None,
        Field(unit="W", of="card", metric=Metric("card_power_limit_watts", "Power limit.")),
    ] = None
    sm_clock_mhz: Annotated[
        int | None,
        Field(
            unit="MHz",
            column=Column("clock", "clock", "SM MHz", 220),
            of="card",
            metric=Metric("card_sm_clock_hertz", "Clock of the multiprocessors.", 1000000.0),
        ),
    ] = None
    utilisation_pct: Annotated[
        float | None,
        Field(
            unit="%",
            column=Column("utilisation", "card", "busy %", 210),
            words=("busy",),
            of="card",
            metric=Metric(
                "card_utilisation_ratio",
                "Share of time in which a kernel of any program ran.",
                0.01,
            ),
        ),
    ] = None
    """Share of a short time in which any program's kernel ran on the card: NVML does not divide it
    among workers.
    """
    fan_pct: Annotated[
        float | None,
        Field(unit="%", of="card", metric=Metric("card_fan_ratio", "Speed of the fan.", 0.01)),
    ] = None
    throttle_pct: Annotated[
        float | None,
        Field(
            unit="%",
            column=Column("throttle", "slowed", "% time", 130),
            words=("slowed",),
            of="card",
            metric=Metric(
                "card_slowed_ratio",
                "Share of the last minute in which heat or power slowed the card.",
                0.01,
            ),
        ),
    ] = None
    verify_checks: ClassVar[Field] = Field(
        column=Column("verify", "checks", "/wrong", 80, shows=("verify_checks", "verify_errors")),
        words=("checks",),
        metric=_counter("slot_checks", "Results checked."),
    )
    verify_errors: ClassVar[Field] = Field(
        words=("wrong",), metric=_counter("slot_wrong_results", "Results found wrong.")
    )
    heartbeat_age_s: Annotated[
        float | None,
        Field(
            unit="s",
            column=Column("heartbeat", "seen", "s ago", 100),
            words=("seen",),
            sampled=False,
        ),
    ] = None
    progress: Annotated[Progress, _PROGRESS_FIELDS] = NO_PROGRESS

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON knows it: no enums, and `None` for a number that is not finite."""
        values = dict(zip(FIELDS, _values_of(self), strict=True))
        values["state"] = self.state.value
        return {
            key: finite(value) if isinstance(value, float) else value
            for key, value in values.items()
        }

    def known(self) -> dict[str, Any]:
        """Return `to_dict` without what is unknown, which would be half of its text."""
        values = {
            key: value
            for key, value in zip(FIELDS, _values_of(self), strict=True)
            if value is not None and (type(value) is not float or finite(value) is not None)
        }
        values["state"] = self.state.value
        return values

    def value(self, key: str) -> Any:  # noqa: ANN401 - the type of each field
        """Return the value of one of `FIELDS`."""
        part = FIELDS[key].part
        return getattr(getattr(self, part) if part else self, key)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, lenient: bool = False) -> Row:
        """Rebuild a row from `to_dict`'s form, without unknown keys; `ValueError` if one lacks or
        has a wrong kind.

        If `lenient`, a value of a wrong kind is left unknown.
        """
        if missing := {"slot", "node", "state", "reason"} - values.keys():
            raise ValueError(f"a worker's row lacks {', '.join(sorted(missing))}")
        parts: dict[str, dict[str, Any]] = {"": {}, "counts": {}, "progress": {}}
        for key, field in FIELDS.items():
            if key in values and type(values[key]) in field.kinds:
                parts[field.part][key] = values[key]
            elif key in values and not lenient:
                raise ValueError(f"slot {values['slot']}: {key} cannot be {values[key]!r}")
        parts["counts"].pop("success_rate", None)  # which follows from the others
        own = parts[""]
        return cls(
            **{**own, "state": slot_state(own["state"])},
            counts=StepCounts(**parts["counts"]),
            progress=Progress(**parts["progress"]),
        )


def _declared() -> Iterator[Field]:
    """Yield what is declared beside the fields of a row."""
    of_parts = {**get_type_hints(StepCounts), "success_rate": float | None}
    of_parts |= get_type_hints(Progress)
    for name, hint in get_type_hints(Row, include_extras=True).items():
        if get_origin(hint) is ClassVar:
            yield _of(name, of_parts[name], replace(getattr(Row, name), part="counts"))
        elif name == "progress":
            for key, field in hint.__metadata__[0].items():
                yield _of(key, of_parts[key], replace(field, part="progress"))
        elif name != "counts":
            kind = str if name == "state" else hint.__origin__
            yield _of(name, kind, hint.__metadata__[0])


def _of(key: str, kind: Any, field: Field) -> Field:  # noqa: ANN401 - a type or a union
    kinds = set(get_args(kind) or (kind,))
    # JSON writes 70.0 as 70 as often as not.
    kinds |= {int} if float in kinds else set()
    metric = field.metric and replace(field.metric, name=f"orchestrator_{field.metric.name}")
    return replace(field, key=key, kinds=frozenset(kinds), metric=metric)


#: By key, in the order of summary.json.
FIELDS: Final[Mapping[str, Field]] = MappingProxyType({field.key: field for field in _declared()})
_values_of = attrgetter(*(f"{field.part}.{key}".lstrip(".") for key, field in FIELDS.items()))


def is_row_value(key: str, value: object) -> bool:
    """Say whether a key of summary.json's rows may have this value."""
    return key in FIELDS and type(value) in FIELDS[key].kinds


#: What sums and order need of a slot, its name, state and counts: a row, or the head's own slot.
Brief: TypeAlias = Row | Slot


class LazyRows(Sequence[Row]):
    """Rows that are made when they are asked for: of a thousand slots a table shows fifty.

    With all rows made at each look, a head of 1,000 workers takes 11 % of a core and not 6, and
    with the table 14 % and not 8 (docs/results/watching.md).
    """

    @abstractmethod
    def briefs(self) -> Sequence[Brief]:
        """Return what is known of every slot without making its row, in the order of the rows."""

    @abstractmethod
    def tflops(self) -> Iterable[float | None]:
        """Return the throughput in every row."""

    @abstractmethod
    def of(self, brief: Brief) -> Row:
        """Return the row of one of the briefs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment. Every planned slot has a row, also while its node is missing."""

    run_id: str
    started_at: float
    """Unix time, in seconds."""
    now_unix_s: float
    """The moment of the snapshot, which is later than `started_at + elapsed_s`: starting up does
    not count.
    """
    elapsed_s: float
    duration_s: float
    """Planned length of the run."""
    starting_s: float | None = None
    """How long workers have been starting; `None` once the planned time has begun."""
    nodes_planned: tuple[str, ...]
    nodes_seen: tuple[str, ...]
    rows: Sequence[Row]
    notices: tuple[str, ...] = ()
    """One-line warnings shown with the header, such as "pc2 has not joined"."""
    restart_count: int = 0
    steps_lost_upper_bound: int | None = None
    jobs: str | None = None
    """How the jobs of a queue stand, in a line; `None`: the run is no queue."""

    @property
    def remaining_s(self) -> float:
        """Seconds until the planned end; 0 once it has passed."""
        return max(0.0, self.duration_s - self.elapsed_s)

    @property
    def state_counts(self) -> dict[SlotState, int]:
        """How many slots are in each state, worst first; states without a slot are absent."""
        counts = Counter(brief.state for brief in self.briefs)
        return {state: counts[state] for state in STATES_WORST_FIRST if counts[state]}

    @property
    def tflops_total(self) -> float | None:
        """Sum over the slots that report a throughput; `None` when none does."""
        values = (
            self.rows.tflops()
            if isinstance(self.rows, LazyRows)
            else (row.tflops for row in self.rows)
        )
        known = [known for value in values if (known := finite(value)) is not None]
        return finite(sum(known)) if known else None

    @property
    def counts(self) -> StepCounts:
        """Sum over all slots."""
        return StepCounts.total(brief.counts for brief in self.briefs)

    @property
    def briefs(self) -> Sequence[Brief]:
        """What is known of every slot without making its row, in the order of the rows."""
        return self.rows.briefs() if isinstance(self.rows, LazyRows) else self.rows

    def row(self, brief: Brief) -> Row:
        """Return the row of one of the `briefs`."""
        if isinstance(brief, Row):
            return brief
        assert isinstance(self.rows, LazyRows)  # noqa: S101 - else the briefs are the rows
        return self.rows.of(brief)


def rows_by_card(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Return the rows of each card, by its node and what is known of its name."""
    by_card: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        card = row.gpu_uuid or row.gpu_name or row.device or ""
        by_card.setdefault((row.node, card), []).append(row)
    return by_card


def trouble(row: Brief) -> int:
    """Return 2 for a slot with wrong results, 1 for one with too many failed steps, whatever its
    state; else 0.
    """
    counts = row.counts
    if counts.verify_errors:
        return 2
    failed = counts.steps_oom - counts.steps_oom_probe
    is_low = failed > 0 and counts.steps_ok < LOW_SUCCESS_RATE * counts.steps_judged
    return int(bool(counts.steps_error or is_low))


def worst_first(rows: Iterable[AnyBrief]) -> tuple[AnyBrief, ...]:
    """Return the rows in the order of the table: by state, by trouble, and equals in natural order
    of their slots.

    It is coarse on purpose. With the exact success rate, rows would change places at every redraw.
    """
    return tuple(
        sorted(
            rows, key=lambda row: (_STATE_RANK[row.state], -trouble(row), natural_order(row.slot))
        )
    )


@lru_cache(maxsize=20_000)
def natural_order(text: str) -> tuple[str | int, ...]:
    """Return a sorting key under which numbers inside names count as numbers.

    Text and numbers alternate, so that two keys never compare one with the other. At most 18 digits
    make a number: Python refuses to convert thousands of them.
    """
    parts = re.split(r"(\d{1,18})", text)
    return tuple(int(part) if index % 2 else part for index, part in enumerate(parts))
