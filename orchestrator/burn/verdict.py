"""The verdict on a worker, a node and a phase: measurements in, findings out.

Covers the guides' success metrics (VRAM > 90 %, below 80 C sustained, zero errors) and what "sustained" and "stable"
mean here. Does not measure (`sampler.py`), and knows no clock: times are seconds since the work began. Pure.

A metric that could not be measured is not judged, and that is never a pass: a phase whose purpose could not be judged
has no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from statistics import fmean, median, pstdev

from orchestrator.burn.phases import Phase
from orchestrator.core.slot import HeadState, SlotState
from orchestrator.watch.model import Row
from workers.messages import WorkerState

#: What a worker must not be when its phase ends.
_FALLEN = frozenset(
    {
        HeadState.QUARANTINED,
        HeadState.LOST,
        HeadState.RESTARTING,
        HeadState.STARTING,
        WorkerState.EMERGENCY,
    }
)

_SLOWED = frozenset({WorkerState.THROTTLED, WorkerState.PAUSED})

#: A worker climbs to its cap and a card to its temperature first: so much of a phase is not judged for stability.
_WARM_UP_SHARE = 0.2
_WARM_UP_MOST_S = 120.0

#: Throughput in a sample is the mean of about the last ten seconds; samples closer than that say the same twice.
_WINDOW_S = 10.0
_WINDOWS_LEAST = 4


class Verdict(StrEnum):
    """What came out."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    NOT_JUDGED = "not_judged"


class Check(StrEnum):
    """What is judged of a worker."""

    MEMORY = "memory"
    ERRORS = "errors"
    RESULTS = "results"
    TEMPERATURE = "temperature"
    SLOWDOWN = "slowdown"
    THROUGHPUT = "throughput"


#: What a phase is there for: without a verdict on these it has none.
PURPOSE = {
    Phase.CAPS: frozenset({Check.MEMORY, Check.ERRORS, Check.RESULTS}),
    Phase.HEAT: frozenset({Check.ERRORS, Check.TEMPERATURE}),
    Phase.FULL_LOAD: frozenset({Check.MEMORY, Check.ERRORS}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where a pass ends. The first two are the guides' numbers."""

    vram_held_share: float = 0.90
    """A worker must hold more than this of its cap."""
    temperature_c: float = 80.0
    """A card must stay below this, sustained."""
    sustained_s: float = 30.0
    """At or above it for so long on end is sustained, however long the phase …"""
    sustained_share: float = 0.10
    """… and so is more than this share of the phase. Also the most that heat may slow a worker down."""
    throttle_share: float = 0.05
    """Of one minute: a card's complaint may be a mere change of clocks once in a while."""
    throughput_cv: float = 0.05
    """Most that the throughput may scatter, as standard deviation over mean …"""
    throughput_drop: float = 0.05
    """… and fall from the first half to the second; "rejected on second-half drop or spread" is how ml-engineering's
    mamf-finder determines what a card sustains."""


GUIDES = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One worker at one moment."""

    at_s: float
    """Since the planned time of the run began."""
    state: SlotState
    tflops: float | None = None
    reserved_bytes: int | None = None
    temperature_c: float | None = None
    throttle_pct: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One worker in one run of a phase."""

    row: Row
    """As the run ended."""
    length_s: float
    """Planned, of the run."""
    samples: Sequence[Sample]
    alarms: tuple[str, ...] = ()
    """Names of the alarms that its card raised."""
    unchecked: str | None = None
    """Why its results were checked no more, from some moment on; `None` if they were checked to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured of a worker; `None` is unknown."""

    vram_held_share: float | None = None
    """Of its cap, held by the worker's allocator: the median once it has warmed up."""
    emergency_share: float | None = None
    """Of the samples: how often there was no memory for any step."""
    temperature_max_c: float | None = None
    hot_longest_s: float | None = None
    """Longest time on end at or above the limit."""
    hot_share: float | None = None
    slowed_share: float | None = None
    """Of the samples: how often the worker did less because of heat or an alarm. `None` without a sensor."""
    throttle_max_pct: float | None = None
    tflops_mean: float | None = None
    tflops_cv: float | None = None
    tflops_drop: float | None = None
    """By how much the second half was below the first, as a share of the first; negative if it was above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The verdict on one metric, and why."""

    check: Check
    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One worker, judged."""

    row: Row
    figures: Figures
    findings: tuple[Finding, ...]
    """One for each check, in their order."""


def judge(measured: Measured, limits: Limits = GUIDES) -> Judged:
    """Return the verdict on each metric of a worker."""
    figures = _figures(measured, limits)
    findings = (
        _memory(measured, figures, limits),
        _errors(measured.row, figures),
        _results(measured.row, measured.unchecked),
        _temperature(figures, limits),
        _slowdown(measured, figures, limits),
        _throughput(measured.row, figures, limits),
    )
    return Judged(row=measured.row, figures=figures, findings=findings)


def verdict_of(phase: Phase, judged: Iterable[Judged], *, whole: bool = True) -> Verdict:
    """Return the verdict on some workers in a phase: all of it must be good, and its purpose judged.

    Args:
        phase: Which.
        judged: A worker, those of a node, or all.
        whole: The phase ran to its end.
    """
    findings = [finding for worker in judged for finding in worker.findings]
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        return Verdict.FAIL
    needed = [finding.verdict for finding in findings if finding.check in PURPOSE[phase]]
    passed = whole and needed and all(verdict is Verdict.PASS for verdict in needed)
    return Verdict.PASS if passed else Verdict.NOT_JUDGED


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict on several phases: one failure fails, and only passes pass."""
    known = list(verdicts)
    if Verdict.FAIL in known:
        return Verdict.FAIL
    return Verdict.PASS if known and set(known) == {Verdict.PASS} else Verdict.NOT_JUDGED


def error_count(row: Row, figures: Figures) -> int:
    """Return how many things went wrong with a worker, wrong results apart.

    An out-of-memory error that was survived does not count, nor the emergency product after it: finding the largest
    size that fits may cost one. A worker without memory for any step was not at work.
    """
    idle = row.state in _FALLEN or row.counts.steps_ok == 0 or bool(figures.emergency_share)
    return row.counts.steps_error + row.restarts + idle


def _figures(measured: Measured, limits: Limits) -> Figures:
    samples = measured.samples
    warm_up_s = min(_WARM_UP_SHARE * measured.length_s, _WARM_UP_MOST_S)
    settled = [sample for sample in samples if sample.at_s >= warm_up_s] or list(samples)
    held = [sample.reserved_bytes for sample in settled if sample.reserved_bytes is not None]
    told = [sample for sample in samples if sample.temperature_c is not None]
    hot = [(sample.at_s, (sample.temperature_c or 0.0) >= limits.temperature_c) for sample in told]
    throttled = [sample.throttle_pct for sample in samples if sample.throttle_pct is not None]
    windows = _windows(samples, warm_up_s)
    half = len(windows) // 2
    mean = fmean(windows) if windows else None
    first = fmean(windows[:half]) if half else 0.0
    cap_bytes = measured.row.cap_bytes
    return Figures(
        vram_held_share=median(held) / cap_bytes if held and cap_bytes else None,
        emergency_share=_share(sample.state is WorkerState.EMERGENCY for sample in samples),
        temperature_max_c=max((sample.temperature_c or 0.0 for sample in told), default=None),
        hot_longest_s=_longest_s(hot) if hot else None,
        hot_share=_share(is_hot for _, is_hot in hot),
        slowed_share=_share(sample.state in _SLOWED for sample in settled) if told or throttled else None,
        throttle_max_pct=max(throttled, default=None),
        tflops_mean=mean,
        tflops_cv=pstdev(windows) / mean if mean and len(windows) >= _WINDOWS_LEAST else None,
        tflops_drop=1.0 - fmean(windows[-half:]) / first if first and len(windows) >= _WINDOWS_LEAST else None,
    )


def _share(flags: Iterable[bool]) -> float | None:
    known = list(flags)
    return sum(known) / len(known) if known else None


def _windows(samples: Sequence[Sample], warm_up_s: float) -> list[float]:
    """Return means that do not overlap; a window without work has a mean of 0."""
    found: list[float] = []
    due_s = warm_up_s + _WINDOW_S
    known = any(sample.tflops is not None for sample in samples)
    for sample in samples:
        if known and sample.at_s >= due_s:
            found.append(sample.tflops or 0.0)
            due_s = sample.at_s + _WINDOW_S
    return found


def _longest_s(flags: Sequence[tuple[float, bool]]) -> float:
    """Return the longest time between the first and the last of neighbours that are all true."""
    longest_s = 0.0
    for is_hot, group in groupby(flags, key=lambda flag: flag[1]):
        times_s = [at_s for at_s, _ in group]
        longest_s = max(longest_s, times_s[-1] - times_s[0] if is_hot else 0.0)
    return longest_s


def _memory(measured: Measured, figures: Figures, limits: Limits) -> Finding:
    held, cap_bytes = figures.vram_held_share, measured.row.cap_bytes
    if held is None or cap_bytes is None:
        return _finding(Check.MEMORY, None, "the worker never reported its memory")
    most_bytes = max(sample.reserved_bytes or 0 for sample in measured.samples)
    if most_bytes > cap_bytes:
        return _finding(
            Check.MEMORY, False, f"held {most_bytes / 2**20:.0f} MiB, over its cap of {cap_bytes / 2**20:.0f} MiB"
        )
    text = f"held {_pct(held)} of its cap, more than {_pct(limits.vram_held_share)} is required"
    return _finding(Check.MEMORY, held > limits.vram_held_share, text)


def _errors(row: Row, figures: Figures) -> Finding:
    starved = figures.emergency_share
    said = [
        f"ended {row.state}: {row.reason}" if row.state in _FALLEN else "",
        "did no step" if row.counts.steps_ok == 0 else "",
        _times(row.counts.steps_error, "error of the workload", "errors of the workload"),
        f"without memory for any step for {_pct(starved)} of the time" if starved else "",
        _times(row.restarts, "restart"),
    ]
    told = ", ".join(text for text in said if text)
    return _finding(Check.ERRORS, error_count(row, figures) == 0, told or "none")


def _results(row: Row, unchecked: str | None) -> Finding:
    checks, wrong = row.counts.verify_checks, row.counts.verify_errors
    if wrong:
        return _finding(Check.RESULTS, False, f"{wrong} of {checks} checked results were wrong")
    if unchecked is not None:
        return _finding(Check.RESULTS, None, f"{checks} results checked, then no more: {unchecked}")
    if not checks:
        return _finding(Check.RESULTS, None, "no result was checked")
    return _finding(Check.RESULTS, True, f"{checks} results checked")


def _temperature(figures: Figures, limits: Limits) -> Finding:
    if figures.temperature_max_c is None or figures.hot_share is None or figures.hot_longest_s is None:
        return _finding(Check.TEMPERATURE, None, "no sensor tells it")
    text = f"{figures.temperature_max_c:.0f} C at most"
    if figures.hot_share:
        text += (
            f", at or above {limits.temperature_c:.0f} C for {figures.hot_longest_s:.0f} s on end and "
            f"{_pct(figures.hot_share)} of the time"
        )
    sustained = figures.hot_longest_s >= limits.sustained_s or figures.hot_share > limits.sustained_share
    return _finding(Check.TEMPERATURE, not sustained, text)


def _slowdown(measured: Measured, figures: Figures, limits: Limits) -> Finding:
    slowed, throttle_pct = figures.slowed_share, figures.throttle_max_pct
    said = [f"alarm: {name}" for name in measured.alarms]
    if throttle_pct is not None and throttle_pct > 100 * limits.throttle_share:
        said.append(f"the card slowed itself down for {throttle_pct:.0f} % of a minute")
    if slowed is not None and slowed > limits.sustained_share:
        said.append(f"slowed down by its heat or an alarm for {_pct(slowed)} of the time")
    if said:
        return _finding(Check.SLOWDOWN, False, ", ".join(said))
    return _finding(
        Check.SLOWDOWN, None if slowed is None else True, "no sensor tells it" if slowed is None else "none"
    )


def _throughput(row: Row, figures: Figures, limits: Limits) -> Finding:
    cv, drop = figures.tflops_cv, figures.tflops_drop
    if row.device != "cuda":
        return _finding(Check.THROUGHPUT, None, "a processor is never left to the workers alone")
    if cv is None or drop is None:
        return _finding(
            Check.THROUGHPUT, None, "too short, or the workload counts no operations: it takes a minute to tell"
        )
    text = f"scatters by {_pct(cv)}"
    text += f", fell by {_pct(drop)} in the second half" if drop > limits.throughput_drop else ""
    return _finding(Check.THROUGHPUT, cv <= limits.throughput_cv and drop <= limits.throughput_drop, text)


def _finding(check: Check, good: bool | None, text: str) -> Finding:
    verdict = Verdict.NOT_JUDGED if good is None else Verdict.PASS if good else Verdict.FAIL
    return Finding(check=check, verdict=verdict, text=text)


def _times(count: int, noun: str, nouns: str | None = None) -> str:
    return f"{count} {noun if count == 1 else nouns or noun + 's'}" if count else ""


def _pct(share: float) -> str:
    return f"{math.floor(1000 * share) / 10:g} %"  # down: 90 must not stand for 89.96
