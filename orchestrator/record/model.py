"""What is known of a run at one moment: a `Snapshot` of `Row`s, and what each key of a row means.

Does not cover how it is made (`run.snapshot`), drawn or stored. Bytes, seconds, watts and degrees
Celsius throughout; shares are 0..1, names ending in `_pct` are 0..100, and `None` means unknown.
"""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args, get_type_hints

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


def finite(value: float | None) -> float | None:
    """Return the number, or `None` where it is unknown, infinite, not a number, or whole and too
    large for a float.
    """
    return value if value is not None and abs(value) <= sys.float_info.max else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One slot of the health table; `ROW_KEYS` are its keys in summary.json.

    Counts are the head's, over the whole run: they outlive the process in the slot and never go
    backwards. Progress does, when a process begins at a snapshot.
    """

    slot: str
    node: str
    gpu_name: str | None = None
    gpu_uuid: str | None = None
    device: str | None = None
    """`cuda` or `cpu`."""
    state: SlotState
    reason: str
    policy: str | None = None
    size: int | None = None
    batch: int | None = None
    dtype: str | None = None
    tflops: float | None = None
    baseline_pct: float | None = None
    """Share of the best that this card has done for such a worker."""
    peak_pct: float | None = None
    """Share of what the card is rated for at its present clock."""
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    claim_bytes: int | None = None
    cap_bytes: int | None = None
    budget_bytes: int | None = None
    device_used_bytes: int | None = None
    device_total_bytes: int | None = None
    alloc_retries: int | None = None
    counts: StepCounts = NO_COUNTS
    restarts: int = 0
    duty_requested: float | None = None
    duty_measured: float | None = None
    temperature_c: float | None = None
    temperature_of: str | None = None
    """`card`, or `processor` on a computer without one; `None` if no temperature is known."""
    margin_c: float | None = None
    """How much warmer the card may get before it slows itself down."""
    memory_temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    utilisation_pct: float | None = None
    """Share of a short time in which any program's kernel ran on the card: NVML does not divide it
    among workers.
    """
    fan_pct: float | None = None
    throttle_pct: float | None = None
    heartbeat_age_s: float | None = None
    progress: Progress = NO_PROGRESS

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON knows it: no enums, and `None` for a number that is not finite."""
        values = dict(zip(ROW_KEYS, _values_of(self), strict=True))
        values["state"] = self.state.value
        return {
            key: finite(value) if isinstance(value, float) else value
            for key, value in values.items()
        }

    def known(self) -> dict[str, Any]:
        """Return `to_dict` without what is unknown, which would be half of its text."""
        return {key: value for key, value in self.to_dict().items() if value is not None}

    def value(self, key: str) -> Any:  # noqa: ANN401 - the type of each field
        """Return the value of one of `ROW_KEYS`."""
        if key in _COUNT_KEYS:
            return getattr(self.counts, key)
        return getattr(self.progress if key in _PROGRESS_KEYS else self, key)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, lenient: bool = False) -> Row:
        """Rebuild a row from `to_dict`'s form, without unknown keys; `ValueError` if one lacks or
        has a wrong kind.

        If `lenient`, a value of a wrong kind is left unknown.
        """
        if missing := {"slot", "node", "state", "reason"} - values.keys():
            raise ValueError(f"a worker's row lacks {', '.join(sorted(missing))}")
        kinds = _row_kinds()
        known = {
            name: value
            for name, value in values.items()
            if name in kinds and type(value) in kinds[name]
        }
        for name in () if lenient else ROW_KEYS:
            if name in values and name not in known:
                raise ValueError(f"slot {values['slot']}: {name} cannot be {values[name]!r}")
        counts = StepCounts(**{name: known[name] for name in StepCounts.__slots__ if name in known})
        progress = Progress(**{name: known[name] for name in Progress.__slots__ if name in known})
        own = {name: known[name] for name in _OWN_KEYS if name in known}
        return cls(
            **{**own, "state": slot_state(known["state"]), "counts": counts, "progress": progress}
        )


#: Keys that follow another one, and are told by a row's counts.
_COUNTS_AFTER = {
    "device_total_bytes": (
        "steps_ok",
        "steps_oom",
        "steps_oom_probe",
        "steps_error",
        "success_rate",
        "oom_count",
    ),
    "alloc_retries": ("emergency_count",),
    "throttle_pct": ("verify_checks", "verify_errors"),
}

_COUNT_KEYS = frozenset(key for keys in _COUNTS_AFTER.values() for key in keys)

_PROGRESS_KEYS = frozenset(Progress.__slots__)
_OWN_KEYS = tuple(item.name for item in fields(Row) if item.name not in {"counts", "progress"})

#: The keys of a row in JSON, in the order of summary.json: its fields with its counts at their
#: places, its progress.
ROW_KEYS = (
    *(key for name in _OWN_KEYS for key in (name, *_COUNTS_AFTER.get(name, ()))),
    *Progress.__slots__,
)

_PLACES = {**dict.fromkeys(_COUNT_KEYS, "counts."), **dict.fromkeys(_PROGRESS_KEYS, "progress.")}
_values_of = attrgetter(*(_PLACES.get(key, "") + key for key in ROW_KEYS))


@cache
def _row_kinds() -> dict[str, frozenset[type]]:
    """Key of a row -> the types that its value has in JSON."""
    counted, progress = get_type_hints(StepCounts), get_type_hints(Progress)
    hints = {
        **counted,
        **progress,
        "success_rate": float | None,
        **get_type_hints(Row),
        "state": str,
    }
    kinds = {key: set(get_args(hints[key]) or (hints[key],)) for key in ROW_KEYS}
    # JSON writes 70.0 as 70 as often as not.
    return {
        key: frozenset(known | {int} if float in known else known) for key, known in kinds.items()
    }


def is_row_value(key: str, value: object) -> bool:
    """Say whether a key of summary.json's rows may have this value."""
    return type(value) in _row_kinds().get(key, ())


#: What sums and order need of a slot, its name, state and counts: a row, or the head's own slot.
Brief: TypeAlias = Row | Slot


class LazyRows(Sequence[Row]):
    """Rows that are made when they are asked for: of a thousand slots a table shows fifty."""

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


Value: TypeAlias = str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of Prometheus whose value is that of one key, in base units."""

    name: str
    """Without `_total`, which a counter gets when it is written."""
    kind: Literal["gauge", "counter"]
    help: str
    factor: float = 1.0
    """The value of the row, times this, is the value of the metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """What is to be known about one key of a row."""

    key: str
    column: str | None
    """The column of the table that shows it; `None` if none does."""
    words: tuple[str, ...]
    """Other names in filters, besides the key, the column and their beginnings."""
    unit: str
    """Of the value in a row: `bytes`, `s`, `C`, `W`, `MHz`, `%`, `ratio` (0..1, shown in per cent),
    or empty.
    """
    of: Literal["slot", "card"]
    """A key of the card has the same value in all slots of that card."""
    sampled: bool
    """Whether the store keeps its course, or only the last value."""
    metric: Metric | None

    def value(self, row: Row) -> Value:
        """Return what is sorted, compared and exported; `None` if it is unknown."""
        found = row.value(self.key)
        return finite(found) if isinstance(found, float) else found


def _gauge(name: str, text: str, factor: float = 1.0) -> Metric:
    return Metric(name=f"orchestrator_{name}", kind="gauge", help=text, factor=factor)


def _counter(name: str, text: str) -> Metric:
    return Metric(name=f"orchestrator_{name}", kind="counter", help=text)


def _field(
    key: str,
    column: str | None = None,
    unit: str = "",
    *words: str,
    of: Literal["slot", "card"] = "slot",
    sampled: bool = True,
    metric: Metric | None = None,
) -> Field:
    return Field(
        key=key, column=column, unit=unit, words=words, of=of, sampled=sampled, metric=metric
    )


_SLOT = (
    _field("slot", "slot", sampled=False),
    _field("node", None, "", "pc", sampled=False),
    _field("gpu_name", "card", "", "gpu", of="card", sampled=False),
    _field("gpu_uuid", None, "", "uuid", of="card", sampled=False),
    _field("device", None, sampled=False),
    _field("state", "state"),
    _field("reason", "reason", sampled=False),
    _field("policy", None, sampled=False),
    _field("size", "size", metric=_gauge("slot_size", "Size of the last step.")),
    _field("batch", None, metric=_gauge("slot_batch", "Batch of the last step.")),
    _field("dtype", "dtype", "", "type", sampled=False),
    _field("tflops", "tflops"),
    _field(
        "baseline_pct",
        "baseline",
        "%",
        metric=_gauge(
            "slot_baseline_ratio", "Throughput, of the best of such a worker on this card.", 0.01
        ),
    ),
    _field(
        "peak_pct",
        "peak",
        "%",
        metric=_gauge("slot_peak_ratio", "Throughput, of the rating at its clock.", 0.01),
    ),
)

_MEMORY = (
    _field(
        "allocated_bytes",
        "vram",
        "bytes",
        metric=_gauge("slot_allocated_bytes", "In live tensors."),
    ),
    _field(
        "reserved_bytes",
        "vram_bar",
        "bytes",
        metric=_gauge("slot_reserved_bytes", "Held by the allocator."),
    ),
    _field(
        "claim_bytes",
        None,
        "bytes",
        metric=_gauge("slot_claim_bytes", "Obtained by progressive allocation."),
    ),
    _field(
        "cap_bytes", None, "bytes", metric=_gauge("slot_cap_bytes", "Most that tensors may hold.")
    ),
    _field(
        "budget_bytes",
        None,
        "bytes",
        sampled=False,
        metric=_gauge("slot_budget_bytes", "Most that the whole process may hold on the device."),
    ),
    _field(
        "device_used_bytes",
        "card_memory",
        "bytes",
        of="card",
        metric=_gauge("card_memory_used_bytes", "Used on the card by all programs."),
    ),
    _field(
        "device_total_bytes",
        None,
        "bytes",
        of="card",
        sampled=False,
        metric=_gauge("card_memory_total_bytes", "Memory of the card."),
    ),
)

_COUNTS = (
    _field("steps_ok", None),
    _field("steps_oom", None),
    _field("steps_oom_probe", None),
    _field("steps_error", None, "", "errors"),
    _field("success_rate", "success", "ratio", "good", sampled=False),
    _field("oom_count", "oom", "", "ooms", metric=_counter("slot_ooms", "Out-of-memory errors.")),
    _field("alloc_retries", None, sampled=False),
    _field("emergency_count", None, metric=_counter("slot_emergencies", "Emergency products.")),
    _field(
        "restarts",
        "restarts",
        metric=_counter("slot_restarts", "Processes that died or were replaced."),
    ),
    _field(
        "duty_requested",
        None,
        "ratio",
        metric=_gauge("slot_duty_requested_ratio", "Share of time that the worker may use."),
    ),
    _field("duty_measured", "duty", "ratio"),
)

_SENSORS = (
    _field(
        "temperature_c",
        "temperature",
        "C",
        of="card",
        metric=_gauge("card_temperature_celsius", "Temperature of the die."),
    ),
    _field("temperature_of", None, of="card", sampled=False),
    _field(
        "margin_c",
        None,
        "C",
        of="card",
        metric=_gauge(
            "card_temperature_margin_celsius", "Degrees below the limit of the hardware."
        ),
    ),
    _field(
        "memory_temperature_c",
        "memory_temperature",
        "C",
        of="card",
        metric=_gauge("card_memory_temperature_celsius", "Temperature of the memory."),
    ),
    _field(
        "power_w",
        "power",
        "W",
        "watts",
        of="card",
        metric=_gauge("card_power_watts", "Power drawn."),
    ),
    _field(
        "power_limit_w",
        None,
        "W",
        of="card",
        metric=_gauge("card_power_limit_watts", "Power limit."),
    ),
    _field(
        "sm_clock_mhz",
        "clock",
        "MHz",
        of="card",
        metric=_gauge("card_sm_clock_hertz", "Clock of the multiprocessors.", 1e6),
    ),
    _field(
        "utilisation_pct",
        "utilisation",
        "%",
        "busy",
        of="card",
        metric=_gauge(
            "card_utilisation_ratio", "Share of time in which a kernel of any program ran.", 0.01
        ),
    ),
    _field(
        "fan_pct", None, "%", of="card", metric=_gauge("card_fan_ratio", "Speed of the fan.", 0.01)
    ),
    _field(
        "throttle_pct",
        "throttle",
        "%",
        "slowed",
        of="card",
        metric=_gauge(
            "card_slowed_ratio",
            "Share of the last minute in which heat or power slowed the card.",
            0.01,
        ),
    ),
    _field(
        "verify_checks", "verify", "", "checks", metric=_counter("slot_checks", "Results checked.")
    ),
    _field(
        "verify_errors",
        None,
        "",
        "wrong",
        metric=_counter("slot_wrong_results", "Results found wrong."),
    ),
    _field("heartbeat_age_s", "heartbeat", "s", "seen", sampled=False),
)

_TRAINING = (
    _field(
        "train_step",
        "train_step",
        "",
        "step",
        metric=_gauge("slot_train_step", "Optimiser steps done."),
    ),
    _field(
        "train_steps",
        None,
        sampled=False,
        metric=_gauge("slot_train_steps", "Optimiser steps to do."),
    ),
    _field("epoch", "epoch", metric=_gauge("slot_train_epoch", "Times the data was seen.")),
    _field("loss", "loss", metric=_gauge("slot_train_loss", "Loss of the last optimiser step.")),
    _field("first_loss", None, sampled=False),
    _field(
        "samples_per_s",
        "samples",
        metric=_gauge("slot_train_samples_per_second", "Samples a second."),
    ),
    _field(
        "tokens_per_s", "tokens", metric=_gauge("slot_train_tokens_per_second", "Tokens a second.")
    ),
    _field(
        "micro_batch", "micro", metric=_gauge("slot_train_micro_batch", "Samples computed at once.")
    ),
    _field("accumulation", None),
    _field("memory_level", "level"),
    _field(
        "saved_step",
        "saved",
        metric=_gauge("slot_train_saved_step", "Optimiser steps in the last snapshot."),
    ),
    _field(
        "redone_steps",
        "redone",
        metric=_counter("slot_train_redone_steps", "Optimiser steps done again."),
    ),
    _field(
        "data_wait_pct",
        "wait",
        "%",
        metric=_gauge("slot_train_data_wait_ratio", "Share of time without data.", 0.01),
    ),
    _field(
        "copies_pct",
        None,
        "%",
        metric=_gauge("slot_train_copies_ratio", "Share of time in copies.", 0.01),
    ),
    _field(
        "optimizer_pct",
        None,
        "%",
        metric=_gauge("slot_train_optimizer_ratio", "Share of time in updates.", 0.01),
    ),
    _field(
        "mfu_pct",
        "mfu",
        "%",
        metric=_gauge("slot_train_mfu_ratio", "Operations, of the rating.", 0.01),
    ),
    _field("eta_s", "eta", "s", sampled=False),
    _field("weights_sha256", None, "", "sha256", sampled=False),
)

_KNOWN = {field.key: field for field in (*_SLOT, *_MEMORY, *_COUNTS, *_SENSORS, *_TRAINING)}

#: By key, in the order of summary.json.
FIELDS: Final[Mapping[str, Field]] = MappingProxyType({key: _KNOWN[key] for key in ROW_KEYS})
