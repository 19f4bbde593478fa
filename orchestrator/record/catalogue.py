"""The catalogue of what is known of a slot: one entry for each key of a row. Pure.

Says for each key which column of the table shows it, by which words a filter may name it, what its
unit is, whether the store samples it, and which metric it is. Does not format values (`columns.py`)
nor order or choose rows (`query.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from orchestrator.record.model import ROW_KEYS, Row, finite

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
        metric=_gauge("slot_train_saved_step", "Optimiser steps in the last checkpoint."),
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
