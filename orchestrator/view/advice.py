"""Why the cards of a run were not busy, and which keys to change: a section of `report`.

The time in which a slot's worker reported is divided by its states and counters; the rest of it is
work. Pure: gets what was read of a run. Does not know what a change would bring, which `tune`
measures, nor tells of time without a worker, which the report does elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any, Final, TypeAlias

import yaml

from orchestrator.record.history import Buckets, Span
from orchestrator.record.model import Row, rows_by_card
from workers.messages import STARVED, WorkerState
from workers.units import MIB


class Cause(StrEnum):
    """What keeps a card from the work that it was given."""

    DATA = "data"
    COPIES = "copies"
    #: The card waits for the host between kernels: these are too small, or started too late.
    GAPS = "gaps"
    DUTY = "duty"
    HEAT = "heat"
    #: Another program uses the card.
    NEIGHBOUR = "neighbour"
    MEMORY = "memory"
    #: The worker waits for the processor.
    HEAD = "head"


#: Sampled values that the causes are told by.
SAMPLED: Final = ("duty_measured", "baseline_pct", "utilisation_pct", "device_used_bytes")

#: Less of the time is within what counters and sensors tell; NVML tells of long gaps only.
_LEAST_SHARE: Final = 0.05
_LEAST_GAPS: Final = 0.10

#: Less observed time is no ground for advice.
_LEAST_SEEN_S: Final = 10.0

#: More than a desktop takes while its user looks on.
_FOREIGN_LEAST_BYTES: Final = 768 * MIB

#: In these a worker has not begun, or has nothing to do.
_IDLE_STATES: Final = frozenset({WorkerState.WARMING, WorkerState.DONE, WorkerState.STOPPED})

#: Time in which another slot may use the card. Heat slows all slots of a card.
_IDLE: Final = frozenset({Cause.DATA, Cause.DUTY, Cause.MEMORY, Cause.HEAD})


@dataclass(frozen=True, slots=True)
class _Remedy:
    """What is seen of a cause, and what to do about it. Braces stand for facts of the card."""

    seen: str
    otherwise: str
    """What to do where no key helps."""
    by_key: str = ""
    """What the key does."""
    key: str = ""
    """For `--set`, where it has another value in the run."""


_REMEDIES: Final[Mapping[Cause, _Remedy]] = {
    Cause.DATA: _Remedy(
        "it waited for data",
        "make samples cheaper: smaller, decoded once, or kept in RAM by train.ram_cache",
        "prepare data in processes of their own",
        "train.loader_workers=auto",
    ),
    Cause.COPIES: _Remedy(
        "batches were copied to it",
        "send small number types, and larger parts of a batch",
        "copy while it computes",
        "train.non_blocking=true",
    ),
    Cause.GAPS: _Remedy(
        "it had work and waited for the host",
        "give it more at once, by a larger size or batch",
        "compile blocks into fewer and larger kernels",
        "train.compile=block",
    ),
    Cause.DUTY: _Remedy(
        "its workers rested, as their share of the card says",
        "plan one worker more",
        "let them use all of their time",
        "nodes.{node}.gpu_share=1.0",
    ),
    Cause.HEAT: _Remedy(
        "its workers paused or did less, because it was hot",
        "check dust, airflow and fans, then lower nodes.{node}.power_limit_w",
    ),
    Cause.NEIGHBOUR: _Remedy(
        "another program used it",
        "end that (nvidia-smi names it), or plan with less of the card",
    ),
    Cause.MEMORY: _Remedy(
        "not even the smallest step of a worker fitted",
        "raise nodes.{node}.vram_per_worker_gib",
        "start fewer workers",
        "nodes.{node}.workers={others}",
    ),
    Cause.HEAD: _Remedy("workers waited for the processor", "plan no more workers than cores"),
}

Config: TypeAlias = Mapping[str, Any]
"""The whole configuration of the run, as YAML gives it."""

Course: TypeAlias = Mapping[str, Buckets]
"""The sampled values of one slot, by key."""


def advice_lines(
    rows: Sequence[Row],
    courses: Mapping[str, Course],
    spans: Mapping[str, Sequence[Span]],
    ends_unix_s: float,
    config: Config,
) -> Iterator[str]:
    """Yield each card that was seen at work for 10 s and was less busy than it could be, and then a
    line for each cause, the largest share of its time first.

    Args:
        rows: Of all slots, as the run ended or is now.
        courses: Of each slot the values of `SAMPLED`, as `history.courses` returns them.
        spans: Of each slot its states, as `history.all_state_spans` returns them.
        ends_unix_s: Until when the last states lasted.
        config: The run's.
    """
    for (node, _), of_card in rows_by_card(rows).items():
        slots = [
            _Slot(row, courses.get(row.slot, {}), spans.get(row.slot, ()), ends_unix_s)
            for row in of_card
        ]
        slots = [slot for slot in slots if slot.seen_s >= _LEAST_SEEN_S]
        busy, shares = _divide(slots) if slots else (None, {})
        causes = sorted(shares, key=lambda cause: -shares[cause])
        causes = [cause for cause in causes if shares[cause] >= _LEAST_SHARE]
        if causes:
            known = "busy share unknown" if busy is None else f"busy {busy:.0%} of the time"
            yield f"{node}, {slots[0].row.gpu_name or 'CPU'}: {known}"
        for cause in causes:
            yield f"{shares[cause]:.0%} {cause}: {_remedy(cause, slots, config)}"


class _Slot:
    """One slot, in the time in which its worker reported."""

    def __init__(self, row: Row, course: Course, spans: Sequence[Span], ends_unix_s: float) -> None:
        self.row, self._course = row, course
        self._states_s = defaultdict[str, float](float)
        for span in spans:
            if span.state in set(WorkerState) - _IDLE_STATES:
                until_unix_s = ends_unix_s if span.to_unix_s is None else span.to_unix_s
                self._states_s[span.state] += max(0.0, until_unix_s - span.from_unix_s)
        self.seen_s = sum(self._states_s.values())
        duty = self.mean("duty_measured")
        self.got = None if duty is None else min(1.0, duty)
        """Share of the time in which its process kept the device, waits for data included."""

    def mean(self, key: str) -> float | None:
        """Return the mean of a sampled value."""
        values = self._course[key].mean if key in self._course else ()
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    def share_of(self, *states: WorkerState) -> float:
        """Return the share of the time in these states."""
        return sum(self._states_s[state] for state in states) / self.seen_s

    def shares(self, *, is_shared: bool) -> dict[Cause, float]:
        """Return the shares of the causes; `is_shared`: other programs use the card, too."""
        shares = dict.fromkeys(Cause, 0.0)
        starved, paused = self.share_of(*STARVED), self.share_of(WorkerState.PAUSED)
        shares[Cause.NEIGHBOUR if is_shared else Cause.MEMORY] = starved
        shares[Cause.HEAT] = paused
        if self.got is None:
            return shares
        duty = 1.0 if self.row.duty_requested is None else self.row.duty_requested
        could = max(0.0, 1.0 - paused - starved)
        idle = max(0.0, could - self.got)
        shares[Cause.DUTY] = min(idle, could * (1 - duty))
        by_heat = min(idle - shares[Cause.DUTY], self.share_of(WorkerState.THROTTLED) * duty)
        shares[Cause.HEAT] += by_heat
        shares[Cause.HEAD] = idle - shares[Cause.DUTY] - by_heat
        told = self.row.progress
        shares[Cause.DATA] = (told.data_wait_pct or 0.0) / 100
        shares[Cause.COPIES] = (told.copies_pct or 0.0) / 100
        of_best_pct = self.mean("baseline_pct")
        if is_shared and of_best_pct is not None:
            slower = self.got * (1 - min(100.0, of_best_pct) / 100) - by_heat - shares[Cause.DATA]
            shares[Cause.NEIGHBOUR] += max(0.0, slower)
        return shares


def _divide(slots: Sequence[_Slot]) -> tuple[float | None, dict[Cause, float]]:
    """Return the share of the time in which a card was busy, and the shares of the causes."""
    own_bytes = sum(slot.row.budget_bytes or 0 for slot in slots)
    foreign_bytes = (slots[0].mean("device_used_bytes") or 0.0) - own_bytes
    parts = [slot.shares(is_shared=foreign_bytes > _FOREIGN_LEAST_BYTES) for slot in slots]
    shares = {cause: min(1.0, fmean(part[cause] for part in parts)) for cause in Cause}
    works = [
        max(0.0, slot.got - part[Cause.DATA])
        for slot, part in zip(slots, parts, strict=True)
        if slot.got is not None
    ]
    if not works:
        return None, shares
    if slots[0].row.device == "cpu":  # the slots of a processor have cores of their own
        return fmean(works), shares
    busy = min(1.0, sum(works))
    # While one slot is idle another may use the card; only what all of them leave idle is lost.
    lost = min(1.0, (1 - busy) / (1 - fmean(works))) if fmean(works) < 1 else 0.0
    shares = {cause: share * (lost if cause in _IDLE else 1) for cause, share in shares.items()}
    used_pct = slots[0].mean("utilisation_pct")
    if used_pct is not None and busy - used_pct / 100 >= _LEAST_GAPS:
        shares[Cause.GAPS] = busy - used_pct / 100
        busy = used_pct / 100
    return busy, shares


def _remedy(cause: Cause, slots: Sequence[_Slot], config: Config) -> str:
    facts = {"node": slots[0].row.node, "others": len(slots) - 1}
    remedy = _REMEDIES[cause]
    key, trains = remedy.key.format(**facts), slots[0].row.progress.train_step is not None
    if not _helps(key, config, trains=trains):
        return f"{remedy.seen}; {remedy.otherwise.format(**facts)}"
    return f"{remedy.seen}; {remedy.by_key}; try --set {key}"


def _helps(key: str, config: Config, *, trains: bool) -> bool:
    """Say whether a key can be set to a value, and has another one."""
    path, _, value = key.partition("=")
    if value in {"", "0"} or (path.startswith("train.") and not trains):
        return False
    present: object = config
    for name in path.split("."):
        present = present.get(name) if isinstance(present, Mapping) else None
    return bool(present != yaml.safe_load(value))
