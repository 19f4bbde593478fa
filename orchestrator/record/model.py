"""The state of a run at one moment: a `Snapshot` of `Row`s, and the meaning of each key of a row.

`FIELDS` has the unit and metric of each key, and whether its values over time are kept. Does not
make rows (`run/snapshot.py`), store them, or show them (`view/slots.py` has the columns). Units are
bytes, seconds, watts and degrees Celsius; shares are 0..1, names ending in `_pct` are 0..100, and
`None` means unknown.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Final, Literal, TypeAlias

from orchestrator.core.slot import HeadState, SlotState
from workers.messages import (
    NO_COUNTS,
    NO_PROGRESS,
    MemoryInfo,
    Progress,
    StepCounts,
    TeamState,
    WorkerState,
)
from workers.readings import SensorReading

#: The order of states in the table and in sentences.
STATES_WORST_FIRST: Final[tuple[SlotState, ...]] = (
    HeadState.QUARANTINED,
    HeadState.LOST,
    WorkerState.CORRUPT,
    HeadState.RESTARTING,
    WorkerState.EMERGENCY,
    WorkerState.PARKED,
    WorkerState.PAUSED,
    WorkerState.THROTTLED,
    WorkerState.BACKOFF,
    WorkerState.WARMING,
    HeadState.STARTING,
    HeadState.HELD,
    WorkerState.RUNNING,
    WorkerState.DONE,
    WorkerState.STOPPED,
)

#: A slot with a smaller share of good steps is listed before others in the same state; the guides
#: ask for "95%+ success rate".
LOW_SUCCESS_RATE = 0.95

Value: TypeAlias = str | int | float | None


def finite(value: float | None) -> float | None:
    """Return `value`, or `None` if it is unknown, not finite, or too large for a float."""
    return value if value is not None and abs(value) <= sys.float_info.max else None


@dataclass(frozen=True, slots=True)
class Field:
    """The properties of one key of a row."""

    key: str
    unit: str = ""
    """Unit of the value in a row: `bytes`, `s`, `C`, `W`, `MHz`, `%`, `ratio` (0..1, shown in per
    cent), or empty.
    """
    metric: str = ""
    """Stem of the Prometheus metric, which is in base units: `size` for `orchestrator_slot_size`. A
    card's metric has `card` for `slot`, and a counter gets `_total`. Empty: no metric.
    """
    help: str = ""
    """Help text of the metric."""
    _: KW_ONLY
    of: Literal["slot", "card"] = "slot"
    """A key of a card has the same value in all slots of that card."""
    sampled: bool = True
    """Whether the store keeps the values over time, or only the last one."""
    counter: bool = False
    """Whether the metric only grows, and stays valid after the head has ended."""

    @property
    def factor(self) -> float:
        """Factor from the value of the row to the value of the metric."""
        return {"%": 0.01, "MHz": 1e6}.get(self.unit, 1.0)

    def value(self, row: Row) -> Value:
        """Return the value for sorting, comparison and export; `None` if it is unknown."""
        value = row.value(self.key)
        return finite(value) if isinstance(value, float) else value


#: `_card`: a key of a card. `_kept`: only the last value is stored.
_card, _kept = partial(Field, of="card"), partial(Field, sampled=False)

#: All keys, in the order of summary.json.
_DECLARED = (
    _kept("slot"),
    _kept("node"),
    _card("gpu_name", sampled=False),
    _card("gpu_uuid", sampled=False),
    _kept("device"),
    Field("state"),
    _kept("reason"),
    _kept("policy"),
    Field("size", "", "size", "Size of the last step."),
    Field("batch", "", "batch", "Batch of the last step."),
    _kept("dtype"),
    Field("tflops"),
    Field("baseline_pct", "%", "baseline_ratio", "Throughput, of the card's best."),
    Field("peak_pct", "%", "peak_ratio", "Throughput, of the rating at its clock."),
    Field("allocated_bytes", "bytes", "allocated_bytes", "In live tensors."),
    Field("reserved_bytes", "bytes", "reserved_bytes", "Held by the allocator."),
    Field("claim_bytes", "bytes", "claim_bytes", "Obtained by progressive allocation."),
    Field("cap_bytes", "bytes", "cap_bytes", "Most that tensors may hold."),
    _kept("budget_bytes", "bytes", "budget_bytes", "Most that the process holds."),
    _card("device_used_bytes", "bytes", "memory_used_bytes", "Used by all programs."),
    _card(
        "device_total_bytes", "bytes", "memory_total_bytes", "Memory of the card.", sampled=False
    ),
    Field("steps_ok"),
    Field("steps_oom"),
    Field("steps_oom_probe"),
    Field("steps_error"),
    Field("parts_further"),
    _kept("success_rate", "ratio"),
    Field("oom_count", "", "ooms", "Out-of-memory errors.", counter=True),
    _kept("alloc_retries"),
    Field("emergency_count", "", "emergencies", "Emergency products.", counter=True),
    Field("restarts", "", "restarts", "Processes that were replaced.", counter=True),
    Field("duty_requested", "ratio", "duty_requested_ratio", "Share of time that it may use."),
    Field("duty_measured", "ratio"),
    _card("temperature_c", "C", "temperature_celsius", "Temperature of the die."),
    _card("temperature_of", sampled=False),
    _card("margin_c", "C", "temperature_margin_celsius", "Degrees below the limit."),
    _card("memory_temperature_c", "C", "memory_temperature_celsius", "Temperature of the memory."),
    _card("power_w", "W", "power_watts", "Power drawn."),
    _card("power_limit_w", "W", "power_limit_watts", "Power limit."),
    _card("sm_clock_mhz", "MHz", "sm_clock_hertz", "Clock of multiprocessors."),
    _card(
        "utilisation_pct",
        "%",
        "utilisation_ratio",
        "Share of time in which a kernel of any program ran.",
    ),
    _card("fan_pct", "%", "fan_ratio", "Speed of the fan."),
    _card("throttle_pct", "%", "slowed_ratio", "Share of a minute that it was slowed."),
    Field("verify_checks", "", "checks", "Results checked.", counter=True),
    Field("verify_errors", "", "wrong_results", "Results found wrong.", counter=True),
    _kept("heartbeat_age_s", "s"),
    Field("train_step", "", "train_step", "Optimiser steps done."),
    _kept("train_steps", "", "train_steps", "Optimiser steps to do."),
    Field("epoch", "", "train_epoch", "Times the data was seen."),
    Field("loss", "", "train_loss", "Loss of the last optimiser step."),
    _kept("first_loss"),
    Field("samples_per_s", "", "train_samples_per_second", "Samples a second."),
    Field("tokens_per_s", "", "train_tokens_per_second", "Tokens a second."),
    Field("micro_batch", "", "train_micro_batch", "Samples computed at once."),
    Field("accumulation"),
    Field("memory_level"),
    Field("saved_step", "", "train_saved_step", "Steps in the last checkpoint."),
    Field("redone_steps", "", "train_redone_steps", "Steps done again.", counter=True),
    Field("data_wait_pct", "%", "train_data_wait_ratio", "Share of time without data."),
    Field("copies_pct", "%", "train_copies_ratio", "Share of time in copies."),
    Field("optimizer_pct", "%", "train_optimizer_ratio", "Share of time in updates."),
    Field("mfu_pct", "%", "train_mfu_ratio", "Operations, of the rating."),
    _kept("eta_s", "s"),
    _kept("weights_sha256"),
    _kept("team_state"),
    _kept("team_share_pct", "%", "team_share_ratio", "Of a step's samples, computed here."),
    _kept("team_wire_s", "s", "team_wire_seconds", "Of a step, for sums on the wire."),
)
FIELDS: Final[Mapping[str, Field]] = {field.key: field for field in _DECLARED}


_NO_SENSORS: Final = SensorReading()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One slot of the health table. Its fields, and those of its parts from `memory` on, are the
    keys in `FIELDS`.

    Counts cover the whole run and all processes of the slot, and never decrease. Progress decreases
    when a process begins at a checkpoint.
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
    """Throughput relative to the best of this card for such a worker."""
    peak_pct: float | None = None
    """Throughput relative to the card's rating at its present clock."""
    claim_bytes: int | None = None
    cap_bytes: int | None = None
    budget_bytes: int | None = None
    restarts: int = 0
    duty_requested: float | None = None
    duty_measured: float | None = None
    temperature_of: str | None = None
    """`card`, or `processor` on a computer without one; `None` if no temperature is known."""
    heartbeat_age_s: float | None = None
    shares_steps: bool = False
    """Whether the slot is a member of a team, so that its steps are those of the other members."""
    team_state: TeamState | None = None
    """How its process takes part in the team; `None`: no process, or no report yet."""
    team_share_pct: float | None = None
    """Share of a step's samples that it computes."""
    team_wire_s: float | None = None
    """Time of a step in which sums are on the wire."""
    memory: MemoryInfo | None = None
    """Memory of its process; `None`: no process, or no report yet."""
    sensors: SensorReading = _NO_SENSORS
    counts: StepCounts = NO_COUNTS
    progress: Progress = NO_PROGRESS

    def value(self, key: str) -> Any:  # noqa: ANN401 - the type of each field
        """Return the value of one of `FIELDS`."""
        for part in (self, self.counts, self.progress, self.sensors, self.memory):
            if hasattr(part, key):
                return getattr(part, key)
        if key in FIELDS:
            return None  # a key of its memory, which is unknown
        raise KeyError(key)

    def to_dict(self) -> dict[str, Any]:
        """Return the row for JSON: no enums, and `None` for a number that is not finite."""
        values = {key: field.value(self) for key, field in FIELDS.items()}
        return {**values, "state": self.state.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment. Every planned slot has a row, even while its node is missing."""

    run_id: str
    now_unix_s: float
    """Time of the snapshot."""
    elapsed_s: float
    duration_s: float
    """Planned length of the run."""
    starting_s: float | None = None
    """How long workers have been starting; `None` once the planned time has begun."""
    nodes_planned: tuple[str, ...] = ()
    nodes_seen: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    notices: tuple[str, ...] = ()
    """One-line warnings shown with the header, such as "pc2 has not joined"."""
    jobs: str | None = None
    """A line about the states of the jobs; `None`: the run has no queue."""

    @property
    def restart_count(self) -> int:
        """Number of replaced processes of all slots."""
        return sum(row.restarts for row in self.rows)

    @property
    def remaining_s(self) -> float:
        """Seconds until the planned end; 0 once it has passed."""
        return max(0.0, self.duration_s - self.elapsed_s)

    @property
    def state_counts(self) -> dict[SlotState, int]:
        """Number of slots in each state, worst first; states without a slot are absent."""
        counts = Counter(row.state for row in self.rows)
        return {state: counts[state] for state in STATES_WORST_FIRST if counts[state]}

    @property
    def tflops_total(self) -> float | None:
        """Sum over the slots that report a throughput; `None` when none does."""
        known = [tflops for row in self.rows if (tflops := finite(row.tflops)) is not None]
        return finite(sum(known)) if known else None

    @property
    def counts(self) -> StepCounts:
        """Sum over all slots; a step of a team counts once for all its members."""
        total = StepCounts.total(row.counts for row in self.rows)
        steps: dict[str, int] = {}
        for row in self.rows:
            if row.shares_steps:  # a slot JOB/NODE/INDEX, or NODE/INDEX outside of a queue
                team = row.slot.rpartition("/")[0].rpartition("/")[0]
                steps[team] = max(steps.get(team, 0), row.progress.train_step or 0)
        alone = sum(row.counts.steps_ok for row in self.rows if not row.shares_steps)
        return replace(total, steps_ok=alone + sum(steps.values()))


def rows_by_card(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    """Return the rows of each card, keyed by node and the best known identifier of the card."""
    by_card: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        card = row.gpu_uuid or row.gpu_name or row.device or ""
        by_card.setdefault((row.node, card), []).append(row)
    return by_card


def trouble(row: Row) -> int:
    """Return 2 for a slot with wrong results, 1 for one with too many failed steps, else 0."""
    counts = row.counts
    if counts.verify_errors:
        return 2
    rate = counts.success_rate
    is_low = rate is not None and rate < LOW_SUCCESS_RATE
    return int(bool(counts.steps_error or is_low))


def worst_first(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows in the order of the table: by state, by `trouble`, then in natural order of
    their slots.

    The order is coarse: by the exact success rate, rows would move at every redraw.
    """
    rank = STATES_WORST_FIRST.index
    return tuple(
        sorted(rows, key=lambda row: (rank(row.state), -trouble(row), natural_order(row.slot)))
    )


def natural_order(text: str) -> tuple[str | int, ...]:
    """Return a sorting key that orders numbers inside names by value.

    Text and numbers alternate, so a text is never compared with a number. A number has at most 18
    digits, because Python refuses to convert thousands of digits.
    """
    parts = re.split(r"(\d{1,18})", text)
    return tuple(int(part) if index % 2 else part for index, part in enumerate(parts))
