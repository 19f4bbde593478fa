"""Why the cards of a run were not busy, and which keys to change: a section of `report`.

A slot's time, from its first report on, is divided by its states; the time in which it reported is
divided further by its counters. Shares need not add up to 1: the rest is work. Pure: gets what was
read of a run. Does not know what a change would bring; `tune` measures that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any, Final, TypeAlias

from orchestrator.core.slot import HeadState, SlotState, slot_state
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
    RESTARTS = "restarts"
    LOST = "lost"
    HELD = "held"
    QUARANTINED = "quarantined"
    #: The worker waits for its next slice.
    HEAD = "head"


#: Sampled values that the causes are told by.
SAMPLED: Final = (
    "duty_measured",
    "baseline_pct",
    "utilisation_pct",
    "device_used_bytes",
    "temperature_c",
)

#: Less of the time is within what counters and sensors tell; NVML tells of long gaps only.
_LEAST_SHARE: Final = 0.05
_LEAST_GAPS: Final = 0.10

#: Less observed time is no ground for advice.
_LEAST_SEEN_S: Final = 10.0

#: More than a desktop takes while its user looks on.
_FOREIGN_LEAST_BYTES: Final = 768 * MIB

_OF_STATE: Final = {
    HeadState.STARTING: Cause.RESTARTS,
    HeadState.RESTARTING: Cause.RESTARTS,
    HeadState.LOST: Cause.LOST,
    HeadState.HELD: Cause.HELD,
    HeadState.QUARANTINED: Cause.QUARANTINED,
}
#: In these a slot has not begun, or has nothing to do.
_BEFORE: Final = frozenset({HeadState.STARTING, WorkerState.WARMING})
_OVER: Final = frozenset({WorkerState.DONE, WorkerState.STOPPED})

#: Time in which another slot may use the card. Heat slows all slots of a card.
_IDLE: Final = frozenset(
    {Cause.DATA, Cause.DUTY, Cause.MEMORY, Cause.HEAD, *_OF_STATE.values()},
)

_SEEN: Final = {
    Cause.DATA: "it waited for data",
    Cause.COPIES: "batches were copied to it",
    Cause.OPTIMIZER: "gradients were clipped and weights updated",
    Cause.GAPS: "it had work and ran no kernel, waiting for the host",
    Cause.DUTY: "its workers rested, as their share of the card says",
    Cause.HEAT: "its workers paused or did less, because it was hot",
    Cause.NEIGHBOUR: "another program used it",
    Cause.MEMORY: "not even the smallest step of a worker fitted into its memory",
    Cause.RESTARTS: "workers were started again",
    Cause.LOST: "its node was not in the cluster",
    Cause.HELD: "its slots were held",
    Cause.QUARANTINED: "its slots were given up",
    Cause.HEAD: "workers waited for their next slice, or for the processor",
}

Config: TypeAlias = Mapping[str, Any]
"""The configuration of the run as YAML gives it."""

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
            _Slot(row, courses.get(row.slot, {}), _states_s(spans.get(row.slot, ()), ends_unix_s))
            for row in of_card
        ]
        slots = [slot for slot in slots if slot.seen_s >= _LEAST_SEEN_S]
        if slots:
            busy, shares = _divide(slots)
            causes = sorted(shares.items(), key=lambda pair: -pair[1])
            advice = [
                _advice(cause, share, slots, config)
                for cause, share in causes
                if share >= _LEAST_SHARE
            ]
            name = slots[0].row.gpu_name or "CPU"
            made.append(CardAdvice(node=node, name=name, busy=busy, advice=tuple(advice)))
    return tuple(made)


def advice_lines(cards: Sequence[CardAdvice]) -> Iterator[str]:
    """Yield the advice in words: each card, and below it a line for each cause."""
    for card in cards:
        if not card.advice:
            continue
        busy = "busy share unknown" if card.busy is None else f"busy {card.busy:.0%} of the time"
        yield f"{card.node}, {card.name}: {busy}"
        for each in card.advice:
            key = "" if each.key is None else f"; try --set {each.key}"
            yield f"{each.share:.0%} {each.cause}: {each.text}{key}"


class _Slot:
    """One slot, from its first report on."""

    def __init__(self, row: Row, course: Course, states_s: Mapping[SlotState, float]) -> None:
        self.row, self.course, self.states_s = row, course, states_s
        self.seen_s = sum(states_s.values())

    def mean(self, key: str) -> float | None:
        """Return the mean of a sampled value."""
        known = [each for each in self.course[key].mean if each is not None] if self.course else []
        return fmean(known) if known else None

    def share_of(self, states: frozenset[SlotState]) -> float:
        """Return the share of the time in these states."""
        return sum(self.states_s.get(state, 0.0) for state in states) / self.seen_s

    @property
    def reported(self) -> float:
        """Share of the time in which a process reported."""
        return self.share_of(frozenset(WorkerState))

    @property
    def got(self) -> float | None:
        """Share of the time in which its process kept the device, waits for data included."""
        duty = self.mean("duty_measured")
        return None if duty is None else min(1.0, duty) * self.reported

    @property
    def foreign_bytes(self) -> float:
        """What the card holds beyond this slot's budget; 0 where that is unknown."""
        return (self.mean("device_used_bytes") or 0.0) - (self.row.budget_bytes or 0)


def _states_s(spans: Sequence[Span], ends_unix_s: float) -> dict[SlotState, float]:
    seconds: dict[SlotState, float] = {}
    has_begun = False
    for span in spans:
        state = slot_state(span.state)
        has_begun = has_begun or state not in _BEFORE
        until_unix_s = ends_unix_s if span.to_unix_s is None else span.to_unix_s
        if has_begun and state not in _OVER and until_unix_s > span.from_unix_s:
            seconds[state] = seconds.get(state, 0.0) + until_unix_s - span.from_unix_s
    return seconds


def _divide(slots: Sequence[_Slot]) -> tuple[float | None, dict[Cause, float]]:
    """Return the share of the time in which a card was busy, and the shares of the causes."""
    held_bytes = sum(slot.row.budget_bytes or 0 for slot in slots[1:])
    is_shared = slots[0].foreign_bytes - held_bytes > _FOREIGN_LEAST_BYTES
    parts = [_of_slot(slot, is_shared=is_shared) for slot in slots]
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


def _of_slot(slot: _Slot, *, is_shared: bool) -> dict[Cause, float]:
    shares = dict.fromkeys(Cause, 0.0)
    for state, seconds in slot.states_s.items():
        if isinstance(state, HeadState):
            shares[_OF_STATE[state]] += seconds / slot.seen_s
    starved = slot.share_of(frozenset(STARVED))
    paused = slot.share_of(frozenset({WorkerState.PAUSED}))
    throttled = slot.share_of(frozenset({WorkerState.THROTTLED}))
    shares[Cause.NEIGHBOUR if is_shared else Cause.MEMORY] += starved
    shares[Cause.HEAT] += paused
    if slot.got is None:
        return shares
    duty = 1.0 if slot.row.duty_requested is None else slot.row.duty_requested
    could = max(0.0, slot.reported - paused - starved)
    idle = max(0.0, could - slot.got)
    shares[Cause.DUTY] = min(idle, could * (1 - duty))
    by_heat = min(idle - shares[Cause.DUTY], throttled * duty)
    shares[Cause.HEAT] += by_heat
    shares[Cause.HEAD] = idle - shares[Cause.DUTY] - by_heat
    told = slot.row.progress
    for cause, pct in (
        (Cause.DATA, told.data_wait_pct),
        (Cause.COPIES, told.copies_pct),
        (Cause.OPTIMIZER, told.optimizer_pct),
    ):
        shares[cause] = slot.reported * (pct or 0.0) / 100
    of_best_pct = slot.mean("baseline_pct")
    if is_shared and of_best_pct is not None:
        slower = slot.got * (1 - min(100.0, of_best_pct) / 100) - by_heat - shares[Cause.DATA]
        shares[Cause.NEIGHBOUR] += max(0.0, slower)
    return shares


def _advice(cause: Cause, share: float, slots: Sequence[_Slot], config: Config) -> Advice:
    train, node, others = config.get("train") or {}, slots[0].row.node, len(slots) - 1
    remedies = (one for one in _REMEDIES if one.cause is cause and one.helps(train, others))
    remedy = next(remedies)
    names = " ".join(slot.row.slot for slot in slots)
    text, key = (
        None if each is None else each.format(node=node, slots=names, others=others)
        for each in (remedy.text, remedy.key)
    )
    return Advice(cause=cause, share=share, text=f"{_SEEN[cause]}; {text}", key=key)


@dataclass(frozen=True, slots=True)
class _Remedy:
    """What to do about a cause."""

    cause: Cause
    text: str
    """With places for `{node}` and `{slots}`."""
    key: str | None = None
    """The same with `{others}`: how many other workers the card has."""
    helps: Callable[[Mapping[str, Any], int], bool] = lambda _train, _others: True
    """Whether it does with this section `train:` and so many other workers."""


#: The first that helps.
_REMEDIES: Final = (
    _Remedy(
        Cause.DATA,
        "prepare data in processes of their own",
        "train.loader_workers=auto",
        lambda train, _: not train.get("loader_workers"),
    ),
    _Remedy(
        Cause.DATA,
        "keep the data in RAM",
        "train.ram_cache=true",
        lambda train, _: not train.get("ram_cache"),
    ),
    _Remedy(Cause.DATA, "make samples cheaper: smaller files, decoded once and stored so"),
    _Remedy(
        Cause.COPIES,
        "copy while the card computes",
        "train.non_blocking=true",
        lambda train, _: train.get("non_blocking") is False,
    ),
    _Remedy(
        Cause.COPIES,
        "keep batches in pinned memory",
        "train.pin=true",
        lambda train, _: train.get("pin") is False,
    ),
    _Remedy(Cause.COPIES, "send fewer bytes: small number types that become floats on the card"),
    _Remedy(
        Cause.OPTIMIZER,
        "keep the optimiser's states on the card, if they fit",
        "train.states_on_host=0",
        lambda train, _: bool(train.get("states_on_host")),
    ),
    _Remedy(
        Cause.OPTIMIZER,
        "update all weights in one kernel",
        "train.optimizer=adamw-fused",
        lambda train, _: train.get("optimizer") != "adamw-fused",
    ),
    _Remedy(Cause.OPTIMIZER, "a larger train.batch updates less often; it changes the training"),
    _Remedy(
        Cause.GAPS,
        "compile blocks: fewer and larger kernels",
        "train.compile=block",
        lambda train, _: bool(train) and train.get("compile", "off") == "off",
    ),
    _Remedy(Cause.GAPS, "give it more at once: a larger size or batch"),
    _Remedy(Cause.DUTY, "let its workers use all of their time", "nodes.{node}.gpu_share=1.0"),
    _Remedy(Cause.HEAT, "check dust, airflow and fans; then lower nodes.{node}.power_limit_w"),
    _Remedy(Cause.NEIGHBOUR, "end that program (nvidia-smi names it), or use less of the card"),
    _Remedy(
        Cause.MEMORY,
        "start fewer workers",
        "nodes.{node}.workers={others}",
        lambda _, others: others > 0,
    ),
    _Remedy(Cause.MEMORY, "give its worker more memory: nodes.{node}.vram_per_worker_gib"),
    _Remedy(Cause.RESTARTS, "why is told under: what happened"),
    _Remedy(Cause.LOST, "type there: python -m orchestrator up {node} --exec --stay"),
    _Remedy(Cause.HELD, "type: python -m orchestrator unpause {slots}"),
    _Remedy(Cause.QUARANTINED, "see why, then type: python -m orchestrator reinstate {slots}"),
    _Remedy(Cause.HEAD, "report less often, and plan no more workers than cores", "run.slice_s=2"),
)
