"""The verdict on a worker, a node and a phase: measurements in, findings out.

Covers memory (VRAM > 90 %), heat (below 80 C sustained), errors, and what "sustained" and "stable"
mean here. Does not measure (`phases.py`), and knows no clock: times are seconds since the work
began. Pure.

A metric that could not be measured is not judged, and that is never a pass: a phase whose purpose
could not be judged has no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import groupby
from statistics import fmean, median, pstdev
from typing import TypeAlias

from orchestrator.core.slot import HeadState
from orchestrator.record.model import Row
from orchestrator.view.cells import mean
from orchestrator.view.phrases import counted
from workers.messages import STARVED, WorkerState
from workers.units import MIB

#: What a worker must not be when its phase ends.
_FALLEN = frozenset(
    {HeadState.QUARANTINED, HeadState.LOST, HeadState.RESTARTING, HeadState.STARTING, *STARVED}
)

_SLOWED = frozenset({WorkerState.THROTTLED, WorkerState.PAUSED})

#: A worker climbs to its cap and a card to its temperature first: so much of a phase is not judged
#: for stability.
_WARM_UP_SHARE = 0.2
_WARM_UP_MOST_S = 120.0

#: Throughput in a row is the mean of about the last ten seconds; rows closer than that say
#: the same twice.
_WINDOW_S = 10.0
_WINDOWS_LEAST = 4


class BurnPhase(IntEnum):
    """Which of the three."""

    CAPS = 1
    HEAT = 2
    FULL_LOAD = 3

    @property
    def title(self) -> str:
        """In words."""
        return {1: "caps and precision", 2: "heat", 3: "full load"}[self.value]


class BurnVerdict(StrEnum):
    """What came out."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    NOT_JUDGED = "not_judged"


class BurnCheck(StrEnum):
    """What is judged of a worker."""

    MEMORY = "memory"
    ERRORS = "errors"
    RESULTS = "results"
    TEMPERATURE = "temperature"
    SLOWDOWN = "slowdown"
    THROUGHPUT = "throughput"


#: What a phase is there for: without a verdict on these it has none.
PURPOSE = {
    BurnPhase.CAPS: frozenset({BurnCheck.MEMORY, BurnCheck.ERRORS, BurnCheck.RESULTS}),
    BurnPhase.HEAT: frozenset({BurnCheck.ERRORS, BurnCheck.TEMPERATURE}),
    BurnPhase.FULL_LOAD: frozenset({BurnCheck.MEMORY, BurnCheck.ERRORS}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where a pass ends.

    The first two are from docs/guides.md. The names are those of the JSON result.
    """

    vram_held_least_pct: float = 90.0
    """A worker must hold more than this of its cap."""
    temperature_limit_c: float = 80.0
    """A card must stay below this, sustained."""
    sustained_s: float = 30.0
    """At or above it for so long on end is sustained, however long the phase …"""
    sustained_pct: float = 10.0
    """… and so is more than this share of the phase. Also the most that heat may slow it."""
    throughput_cv_most_pct: float = 5.0
    """Most that the throughput may scatter, as standard deviation over mean …"""
    throughput_drop_most_pct: float = 5.0
    """… and fall from the first half to the second; "rejected on second-half drop or spread" is how
    ml-engineering's mamf-finder determines what a card sustains."""


LIMITS = Limits()

#: Of one minute: a card's complaint may be a mere change of clocks once in a while.
_THROTTLE_MOST_PCT = 5.0


Look: TypeAlias = tuple[float, Row]
"""A worker at one moment, in seconds since the planned time of the run began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One worker in one run of a phase."""

    row: Row
    """As the run ended."""
    length_s: float
    """Planned, of the run."""
    looks: Sequence[Look]
    alarms: tuple[str, ...] = ()
    """Names of the alarms that its card raised."""
    unchecked: str | None = None
    """Why checks of its results ended early; `None` if they did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured of a worker; `None` is unknown. The names are those of the JSON result."""

    vram_held_pct: float | None = None
    """Of its cap, held by the worker's allocator: the median once it has warmed up."""
    emergency_pct: float | None = None
    """Of the samples: how often there was no memory for any step."""
    temperature_max_c: float | None = None
    hot_longest_s: float | None = None
    """Longest time on end at or above the limit."""
    hot_pct: float | None = None
    slowed_pct: float | None = None
    """Of the samples: how often heat or an alarm slowed it. `None` without a sensor."""
    throttle_max_pct: float | None = None
    tflops_mean: float | None = None
    tflops_cv_pct: float | None = None
    tflops_drop_pct: float | None = None
    """How much less the second half was than the first, of the first; negative if it was more."""
    power_w_mean: float | None = None
    """Of the worker's card, once it has warmed up; so are the next two."""
    samples_per_s_mean: float | None = None
    tflops_settled_mean: float | None = None
    """Of all samples, also of a run that is too short for windows."""


@dataclass(frozen=True, slots=True)
class BurnFinding:
    """The verdict on one metric, and why."""

    verdict: BurnVerdict
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedWorker:
    """One worker, judged."""

    row: Row
    figures: Figures
    findings: Mapping[BurnCheck, BurnFinding]
    """One for each check, in their order."""
    alarms: tuple[str, ...] = ()
    """Names of the alarms that its card raised."""


def judge(measured: Measured) -> JudgedWorker:
    """Return the verdict on each metric of a worker."""
    figures = _figures(measured)
    opinions = {check: ask(measured, figures) for check, ask in _JUDGES.items()}
    findings = {
        check: BurnFinding(_VERDICTS[is_good], text) for check, (is_good, text) in opinions.items()
    }
    return JudgedWorker(
        row=measured.row, figures=figures, findings=findings, alarms=measured.alarms
    )


def verdict_of(
    phase: BurnPhase, judged: Iterable[JudgedWorker], *, whole: bool = True
) -> BurnVerdict:
    """Return the verdict on workers in a phase: all good, its purpose judged, and ended."""
    workers = list(judged)
    if any(
        finding.verdict is BurnVerdict.FAIL
        for worker in workers
        for finding in worker.findings.values()
    ):
        return BurnVerdict.FAIL
    needed = [worker.findings[check].verdict for worker in workers for check in PURPOSE[phase]]
    passed = whole and needed and all(verdict is BurnVerdict.PASS for verdict in needed)
    return BurnVerdict.PASS if passed else BurnVerdict.NOT_JUDGED


def overall(verdicts: Iterable[BurnVerdict]) -> BurnVerdict:
    """Return the verdict on several phases: one failure fails, and only passes pass."""
    present = list(verdicts)
    if BurnVerdict.FAIL in present:
        return BurnVerdict.FAIL
    return (
        BurnVerdict.PASS
        if present and set(present) == {BurnVerdict.PASS}
        else BurnVerdict.NOT_JUDGED
    )


def error_count(row: Row, figures: Figures) -> int:
    """Return how many things went wrong with a worker, wrong results apart.

    An out-of-memory error that was survived does not count, nor the emergency product after it:
    finding the largest size that fits may cost one. A worker without memory for any step was not at
    work.
    """
    idle = row.state in _FALLEN or row.counts.steps_ok == 0 or bool(figures.emergency_pct)
    return row.counts.steps_error + row.restarts + idle


def _figures(measured: Measured) -> Figures:
    looks, cap_bytes = measured.looks, measured.row.cap_bytes
    rows = [row for _, row in looks]
    warm_up_s = min(_WARM_UP_SHARE * measured.length_s, _WARM_UP_MOST_S)
    settled = [row for at_s, row in looks if at_s >= warm_up_s] or rows
    held = [row.reserved_bytes for row in settled if row.reserved_bytes is not None]
    # Temperatures that are hot for a card are normal for a processor.
    warmth = [
        (at_s, row.temperature_c)
        for at_s, row in looks
        if row.temperature_c is not None and row.temperature_of == "card"
    ]
    hot = [(at_s, temperature_c >= LIMITS.temperature_limit_c) for at_s, temperature_c in warmth]
    throttled = [row.throttle_pct for row in rows if row.throttle_pct is not None]
    windows = _windows(looks, warm_up_s)
    half = len(windows) // 2
    average = mean(windows)
    first = fmean(windows[:half]) if half else 0.0
    is_long = len(windows) >= _WINDOWS_LEAST
    return Figures(
        vram_held_pct=100 * median(held) / cap_bytes if held and cap_bytes else None,
        emergency_pct=_pct_of(row.state in STARVED for row in rows),
        temperature_max_c=max((temperature_c for _, temperature_c in warmth), default=None),
        hot_longest_s=_longest_s(hot) if hot else None,
        hot_pct=_pct_of(is_hot for _, is_hot in hot),
        slowed_pct=_pct_of(row.state in _SLOWED for row in settled)
        if warmth or throttled
        else None,
        throttle_max_pct=max(throttled, default=None),
        tflops_mean=average,
        tflops_cv_pct=100 * pstdev(windows) / average if average and is_long else None,
        tflops_drop_pct=100 * (1.0 - fmean(windows[-half:]) / first) if first and is_long else None,
        power_w_mean=mean(row.power_w for row in settled),
        samples_per_s_mean=mean(row.progress.samples_per_s for row in settled),
        tflops_settled_mean=mean(row.tflops for row in settled),
    )


def _pct_of(flags: Iterable[bool]) -> float | None:
    present = list(flags)
    return 100 * sum(present) / len(present) if present else None


def _windows(looks: Sequence[Look], warm_up_s: float) -> list[float]:
    """Return means that do not overlap; a window without work has a mean of 0."""
    means: list[float] = []
    due_s = warm_up_s + _WINDOW_S
    counts_work = any(row.tflops is not None for _, row in looks)
    for at_s, row in looks:
        if counts_work and at_s >= due_s:
            means.append(row.tflops or 0.0)
            due_s = at_s + _WINDOW_S
    return means


def _longest_s(flags: Sequence[tuple[float, bool]]) -> float:
    """Return the longest time between the first and the last of neighbours that are all true."""
    runs = [
        [at_s for at_s, _ in group]
        for is_hot, group in groupby(flags, key=lambda flag: flag[1])
        if is_hot
    ]
    return max((times_s[-1] - times_s[0] for times_s in runs), default=0.0)


#: Whether a metric is good, or `None` if it could not be judged; and why.
_Opinion: TypeAlias = tuple[bool | None, str]

_VERDICTS = {True: BurnVerdict.PASS, False: BurnVerdict.FAIL, None: BurnVerdict.NOT_JUDGED}


def _memory(measured: Measured, figures: Figures) -> _Opinion:
    held_pct, cap_bytes = figures.vram_held_pct, measured.row.cap_bytes
    if held_pct is None or cap_bytes is None:
        return None, "the worker never reported its memory"
    most_bytes = max(row.reserved_bytes or 0 for _, row in measured.looks)
    if most_bytes > cap_bytes:
        return False, f"held {most_bytes / MIB:.0f} MiB, over its cap of {cap_bytes / MIB:.0f} MiB"
    text = (
        f"held {_pct(held_pct)} of its cap, more than {_pct(LIMITS.vram_held_least_pct)} is "
        "required"
    )
    return held_pct > LIMITS.vram_held_least_pct, text


def _errors(measured: Measured, figures: Figures) -> _Opinion:
    row, starved_pct = measured.row, figures.emergency_pct
    said = {
        f"ended {row.state}: {row.reason}": row.state in _FALLEN,
        "did no step": row.counts.steps_ok == 0,
        counted(
            row.counts.steps_error, "error of the workload", "errors of the workload"
        ): row.counts.steps_error,
        f"without memory for any step for {_pct(starved_pct or 0.0)} of the time": starved_pct,
        counted(row.restarts, "restart"): row.restarts,
    }
    reasons = ", ".join(text for text, is_so in said.items() if is_so)
    return error_count(row, figures) == 0, reasons or "none"


def _results(measured: Measured, _figures: Figures) -> _Opinion:
    checks, wrong = measured.row.counts.verify_checks, measured.row.counts.verify_errors
    if wrong:
        return False, f"{wrong} of {checks} checked results were wrong"
    if measured.unchecked is not None:
        return None, f"{checks} results checked, then no more: {measured.unchecked}"
    return (True, f"{checks} results checked") if checks else (None, "no result was checked")


def _temperature(_measured: Measured, figures: Figures) -> _Opinion:
    if (
        figures.temperature_max_c is None
        or figures.hot_pct is None
        or figures.hot_longest_s is None
    ):
        return None, "no sensor tells it"
    text = f"{figures.temperature_max_c:.0f} C at most"
    if figures.hot_pct:
        text += (
            f", at or above {LIMITS.temperature_limit_c:.0f} C for {figures.hot_longest_s:.0f} s "
            "on end and "
            f"{_pct(figures.hot_pct)} of the time"
        )
    return (
        figures.hot_longest_s < LIMITS.sustained_s and figures.hot_pct <= LIMITS.sustained_pct,
        text,
    )


def _slowdown(measured: Measured, figures: Figures) -> _Opinion:
    slowed_pct, throttle_pct = figures.slowed_pct, figures.throttle_max_pct
    said = [f"alarm: {name}" for name in measured.alarms]
    if throttle_pct is not None and throttle_pct > _THROTTLE_MOST_PCT:
        said.append(f"the card slowed itself down for {throttle_pct:.0f} % of a minute")
    if slowed_pct is not None and slowed_pct > LIMITS.sustained_pct:
        said.append(f"slowed down by its heat or an alarm for {_pct(slowed_pct)} of the time")
    if said:
        return False, ", ".join(said)
    return (None, "no sensor tells it") if slowed_pct is None else (True, "none")


def _throughput(measured: Measured, figures: Figures) -> _Opinion:
    cv_pct, drop_pct = figures.tflops_cv_pct, figures.tflops_drop_pct
    if measured.row.device != "cuda":
        return None, "a processor is never left to the workers alone"
    if cv_pct is None or drop_pct is None:
        return (
            None,
            "too short, or the workload counts no operations: it takes a minute to tell",
        )
    fell = drop_pct > LIMITS.throughput_drop_most_pct
    text = f"scatters by {_pct(cv_pct)}" + (
        f", fell by {_pct(drop_pct)} in the second half" if fell else ""
    )
    return cv_pct <= LIMITS.throughput_cv_most_pct and not fell, text


_JUDGES: dict[BurnCheck, Callable[[Measured, Figures], _Opinion]] = {
    BurnCheck.MEMORY: _memory,
    BurnCheck.ERRORS: _errors,
    BurnCheck.RESULTS: _results,
    BurnCheck.TEMPERATURE: _temperature,
    BurnCheck.SLOWDOWN: _slowdown,
    BurnCheck.THROUGHPUT: _throughput,
}


def _pct(pct: float) -> str:
    return f"{math.floor(10 * pct) / 10:g} %"  # down: 90 must not stand for 89.96
