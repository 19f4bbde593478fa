"""Why the cards of a run were not busy, and which keys to change: a section of `report`.

The time in which a slot's worker reported is divided by its states and counters; the rest of it is
work. Pure: gets what was read of a run. Does not know what a change would bring, which `tune`
measures, nor tells of time without a worker, which the report does elsewhere.
"""

from __future__ import annotations

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
    OPTIMIZER = "optimizer"
    #: The card waits for the host between kernels: these are too small, or started too late.
    GAPS = "gaps"
    DUTY = "duty"
    HEAT = "heat"
    #: Another program uses the card.
    NEIGHBOUR = "neighbour"
    MEMORY = "memory"
    #: The worker waits for its next slice.
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

#: Of each cause what is seen, and what to do with the key that does it: the first whose key has
#: another value in the run.
_REMEDIES: Final[Mapping[Cause, tuple[str, tuple[tuple[str, str | None], ...]]]] = {
    Cause.DATA: (
        "it waited for data",
        (
            ("prepare data in processes of their own", "train.loader_workers=auto"),
            ("keep the data in RAM", "train.ram_cache=true"),
            ("make samples cheaper: smaller, and decoded once", None),
        ),
    ),
    Cause.COPIES: (
        "batches were copied to it",
        (
            ("copy while it computes", "train.non_blocking=true"),
            ("send small number types, and larger parts of a batch", None),
        ),
    ),
    Cause.OPTIMIZER: (
        "weights were updated",
        (
            ("update all of them in one kernel", "train.optimizer=adamw-fused"),
            ("a larger train.batch updates less often, and changes the training", None),
        ),
    ),
    Cause.GAPS: (
        "it had work and waited for the host",
        (
            ("compile blocks into fewer and larger kernels", "train.compile=block"),
            ("give it more at once, by a larger size or batch", None),
        ),
    ),
    Cause.DUTY: (
        "its workers rested, as their share of the card says",
        (("let them use all of their time", "nodes.{node}.gpu_share=1.0"),),
    ),
    Cause.HEAT: (
        "its workers paused or did less, because it was hot",
        (("check dust, airflow and fans, then lower nodes.{node}.power_limit_w", None),),
    ),
    Cause.NEIGHBOUR: (
        "another program used it",
        (("end that (nvidia-smi names it), or plan with less of the card", None),),
    ),
    Cause.MEMORY: (
        "not even the smallest step of a worker fitted",
        (
            ("start fewer workers", "nodes.{node}.workers={others}"),
            ("raise nodes.{node}.vram_per_worker_gib", None),
        ),
    ),
    Cause.HEAD: (
        "workers waited for their next slice, or for the processor",
        (
            ("report less often, and plan no more workers than cores", "run.slice_s=2.0"),
            ("plan no more workers than cores", None),
        ),
    ),
}

Config: TypeAlias = Mapping[str, Any]
"""The whole configuration of the run, as YAML gives it."""

Course: TypeAlias = Mapping[str, Buckets]
"""The sampled values of one slot, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing that kept a card from work, and what to do about it."""

    cause: Cause
    share: float
    """Of the time, 0..1."""
    text: str
    """What was seen, and what to do."""
    key: str | None = None
    """For `--set`, such as `train.loader_workers=auto`; `None`: no key does it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardAdvice:
    """One card, or the processor of a node without one."""

    node: str
    name: str
    busy: float | None
    """Share of the time in which it worked for this run; `None` if that is unknown."""
    advice: tuple[Advice, ...]
    """The largest share first."""


def advice_of(
    rows: Sequence[Row],
    courses: Mapping[str, Course],
    spans: Mapping[str, Sequence[Span]],
    ends_unix_s: float,
    config: Config,
) -> tuple[CardAdvice, ...]:
    """Return what to change, for each card that was seen at work for 10 s.

    Args:
        rows: Of all slots, as the run ended or is now.
        courses: Of each slot the values of `SAMPLED`, as `history.courses` returns them.
        spans: Of each slot its states, as `history.all_state_spans` returns them.
        ends_unix_s: Until when the last states lasted.
        config: The run's.
    """
    made = []
    for (node, _), of_card in rows_by_card(rows).items():
        slots = [
            _Slot(row, courses.get(row.slot, {}), spans.get(row.slot, ()), ends_unix_s)
            for row in of_card
        ]
        slots = [slot for slot in slots if slot.seen_s >= _LEAST_SEEN_S]
        if slots:
            busy, shares = _divide(slots)
            causes = sorted(shares.items(), key=lambda pair: -pair[1])
            advice = tuple(
                _advice(cause, share, slots, config)
                for cause, share in causes
                if share >= _LEAST_SHARE
            )
            name = slots[0].row.gpu_name or "CPU"
            made.append(CardAdvice(node=node, name=name, busy=busy, advice=advice))
    return tuple(made)


def advice_lines(cards: Sequence[CardAdvice]) -> Iterator[str]:
    """Yield the advice in words: each card, and then a line for each cause."""
    for card in cards:
        if not card.advice:
            continue
        busy = "busy share unknown" if card.busy is None else f"busy {card.busy:.0%} of the time"
        yield f"{card.node}, {card.name}: {busy}"
        for each in card.advice:
            key = "" if each.key is None else f"; try --set {each.key}"
            yield f"{each.share:.0%} {each.cause}: {each.text}{key}"


class _Slot:
    """One slot, in the time in which its worker reported."""

    def __init__(self, row: Row, course: Course, spans: Sequence[Span], ends_unix_s: float) -> None:
        self.row, self._course = row, course
        self._states_s: dict[str, float] = {}
        for span in spans:
            until_unix_s = ends_unix_s if span.to_unix_s is None else span.to_unix_s
            if span.state in frozenset(WorkerState) - _IDLE_STATES:
                lasted_s = max(0.0, until_unix_s - span.from_unix_s)
                self._states_s[span.state] = self._states_s.get(span.state, 0.0) + lasted_s
        self.seen_s = sum(self._states_s.values())
        duty = self.mean("duty_measured")
        self.got = None if duty is None else min(1.0, duty)
        """Share of the time in which its process kept the device, waits for data included."""

    def mean(self, key: str) -> float | None:
        """Return the mean of a sampled value."""
        known = (
            [each for each in self._course[key].mean if each is not None] if self._course else []
        )
        return fmean(known) if known else None

    def share_of(self, *states: WorkerState) -> float:
        """Return the share of the time in these states."""
        return sum(self._states_s.get(state, 0.0) for state in states) / self.seen_s

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
        shares[Cause.OPTIMIZER] = (told.optimizer_pct or 0.0) / 100
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


def _advice(cause: Cause, share: float, slots: Sequence[_Slot], config: Config) -> Advice:
    names = {"node": slots[0].row.node, "others": len(slots) - 1}
    trains = slots[0].row.progress.train_step is not None
    seen, remedies = _REMEDIES[cause]
    made = [(text, None if key is None else key.format(**names)) for text, key in remedies]
    helpful = [one for one in made if one[1] is None or _helps(one[1], config, trains=trains)]
    text, key = helpful[0] if helpful else (made[0][0], None)
    return Advice(cause=cause, share=share, text=f"{seen}; {text.format(**names)}", key=key)


def _helps(key: str, config: Config, *, trains: bool) -> bool:
    """Say whether a key can be set to a value, and has another one."""
    path, _, value = key.partition("=")
    section, *rest = path.split(".")
    if (section == "train" and not trains) or value == "0":
        return False
    present = config.get(section)
    for name in rest:
        present = present.get(name) if isinstance(present, Mapping) else None
    return bool(present != yaml.safe_load(value))
