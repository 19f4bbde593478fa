"""The one picture of a run that every watcher looks at: a `Snapshot` of `Row`s.

Covers the data, the sums over it, and the order "worst first". Does not cover how a snapshot is made
(`run.snapshot`) nor how it is drawn or stored (the other files of this folder). Bytes, seconds, watts and
degrees Celsius throughout; shares are 0..1, names ending in `_pct` are 0..100, and `None` means unknown.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, get_args, get_type_hints

from orchestrator.core.slot import HeadState, SlotState, slot_state
from workers.messages import WorkerState

#: States from worst to best: the order of the table, and of every list of states in words.
STATES_WORST_FIRST = (
    HeadState.QUARANTINED,
    HeadState.LOST,
    WorkerState.CORRUPT,
    HeadState.RESTARTING,
    WorkerState.EMERGENCY,
    WorkerState.PAUSED,
    WorkerState.THROTTLED,
    WorkerState.BACKOFF,
    WorkerState.WARMING,
    HeadState.STARTING,
    WorkerState.RUNNING,
    WorkerState.STOPPED,
)

_STATE_RANK = {state: rank for rank, state in enumerate(STATES_WORST_FIRST)}

#: A slot below this share of good steps moves up among its equals; the guides ask for "95%+ success rate".
LOW_SUCCESS_RATE = 0.95

_NO_TROUBLE = 2

#: Rank of the state, then of the trouble; the smallest is the worst.
Severity = tuple[int, int]


def finite(value: float | None) -> float | None:
    """Return the number, or `None` where it is unknown, infinite or not a number."""
    return value if value is not None and math.isfinite(value) else None


def success_rate(*, steps_ok: int, steps_oom: int, steps_error: int) -> float | None:
    """Return the share of steps that ended well, 0..1; `None` before the first step.

    A step that ran out of memory counts against it, as in the guides.
    """
    steps = steps_ok + steps_oom + steps_error
    return steps_ok / steps if steps else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One slot of the health table; its fields are the keys of a row in summary.json, in that order.

    Counters are the head's, over the whole run: they outlive the process in the slot and never go backwards.
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
    steps_ok: int = 0
    steps_oom: int = 0
    steps_error: int = 0
    success_rate: float | None = None
    oom_count: int = 0
    alloc_retries: int | None = None
    emergency_count: int = 0
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
    fan_pct: float | None = None
    throttle_pct: float | None = None
    verify_checks: int = 0
    verify_errors: int = 0
    heartbeat_age_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON knows it: no enums, and `None` for a number that is not finite."""
        values = asdict(self)
        values["state"] = self.state.value
        return {key: finite(value) if isinstance(value, float) else value for key, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        """Rebuild a row from `to_dict`'s form; keys this version does not know are passed over.

        Raises:
            ValueError: A needed key is missing, or a value is of the wrong kind.
        """
        known = {name: values[name] for name in _row_kinds() if name in values}
        if missing := {"slot", "node", "state", "reason"} - known.keys():
            raise ValueError(f"a worker's row lacks {', '.join(sorted(missing))}")
        for name, value in known.items():
            if type(value) not in _row_kinds()[name]:
                raise ValueError(f"slot {known['slot']}: {name} cannot be {value!r}")
        return cls(**{**known, "state": slot_state(known["state"])})


@cache
def _row_kinds() -> dict[str, frozenset[type]]:
    """Name of each field of a row -> the types its value has in JSON."""
    hints = get_type_hints(Row)
    kinds: dict[str, frozenset[type]] = {}
    for item in fields(Row):
        types = set(get_args(hints[item.name]) or (hints[item.name],))
        if WorkerState in types:
            types.add(str)
        if float in types:
            types.add(int)  # JSON writes 70.0 as 70 as often as not
        kinds[item.name] = frozenset(types)
    return kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment. Every planned slot has a row, also while its node is missing."""

    run_id: str
    started_at: float
    """Unix time, in seconds."""
    now_unix_s: float
    """The moment of the snapshot, which is later than `started_at + elapsed_s`: starting up does not count."""
    elapsed_s: float
    duration_s: float
    """Planned length of the run."""
    nodes_planned: tuple[str, ...]
    nodes_seen: tuple[str, ...]
    rows: tuple[Row, ...]
    notices: tuple[str, ...] = ()
    """One-line warnings shown with the header, such as "pc2 has not joined"."""
    restart_count: int = 0
    steps_lost_upper_bound: int | None = None
    """At most this many steps were done by processes that died before they could report them."""

    @property
    def remaining_s(self) -> float:
        """Seconds until the planned end; 0 once it has passed."""
        return max(0.0, self.duration_s - self.elapsed_s)

    @property
    def state_counts(self) -> dict[SlotState, int]:
        """How many slots are in each state, worst first; states without a slot are absent."""
        counts = Counter(row.state for row in self.rows)
        return {state: counts[state] for state in STATES_WORST_FIRST if counts[state]}

    @property
    def tflops_total(self) -> float | None:
        """Sum over the slots that report a throughput; `None` when none does."""
        known = [value for row in self.rows if (value := finite(row.tflops)) is not None]
        return finite(sum(known)) if known else None

    @property
    def steps_ok(self) -> int:
        """Steps that ended well."""
        return sum(row.steps_ok for row in self.rows)

    @property
    def steps_oom(self) -> int:
        """Steps that ran out of memory."""
        return sum(row.steps_oom for row in self.rows)

    @property
    def steps_error(self) -> int:
        """Steps that the workload itself failed."""
        return sum(row.steps_error for row in self.rows)

    @property
    def success_rate(self) -> float | None:
        """Share of all steps that ended well, 0..1; `None` before the first step."""
        return success_rate(steps_ok=self.steps_ok, steps_oom=self.steps_oom, steps_error=self.steps_error)

    @property
    def oom_count(self) -> int:
        """Every out-of-memory, those of progressive allocation included."""
        return sum(row.oom_count for row in self.rows)

    @property
    def emergency_count(self) -> int:
        """Times a worker had to run the small product that needs no memory."""
        return sum(row.emergency_count for row in self.rows)

    @property
    def verify_checks(self) -> int:
        """Results checked for correctness."""
        return sum(row.verify_checks for row in self.rows)

    @property
    def verify_errors(self) -> int:
        """Results that were wrong."""
        return sum(row.verify_errors for row in self.rows)


def severity(row: Row) -> Severity:
    """Return the sort key of a slot, smaller is worse: its state first, then wrong results, then failed steps.

    It is coarse on purpose. With the exact success rate, rows would change places at every redraw.
    """
    return _STATE_RANK[row.state], _trouble(row)


def in_trouble(row: Row) -> bool:
    """Say whether a slot has wrong results or too many failed steps, whatever its state."""
    return _trouble(row) < _NO_TROUBLE


def _trouble(row: Row) -> int:
    if row.verify_errors:
        return 0
    if row.steps_error or (row.success_rate is not None and row.success_rate < LOW_SUCCESS_RATE):
        return 1
    return _NO_TROUBLE


def worst_first(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows in the order of the table; equals in natural order of their slots (pc1/2 before pc1/10)."""
    return tuple(sorted(rows, key=lambda row: (severity(row), natural_order(row.slot))))


def natural_order(text: str) -> tuple[str | int, ...]:
    """Return a sorting key under which numbers inside names count as numbers.

    Text and numbers alternate, so that two keys never compare one with the other. At most 18 digits make a
    number: Python refuses to convert thousands of them.
    """
    parts = re.split(r"(\d{1,18})", text)
    return tuple(int(part) if index % 2 else part for index, part in enumerate(parts))
