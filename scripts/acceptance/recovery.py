"""Recovery: real out-of-memory errors at the cap by the hundred, and from a size far too large to one that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benches import recovery as bench
from benches.common import percentile

from acceptance.crew import crew_of, in_child
from acceptance.ground import Ground
from acceptance.outcome import Outcome
from workers.messages import Report, Verdict, WorkerState

_MOST_S = 0.100
MUST_HOLD = f"every out-of-memory error is survived, 99 % of them within {1000 * _MOST_S:.0f} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Descent:
    """A worker that was asked for a size far too large."""

    asked_size: int
    ended_size: int | None
    state: str
    verdict: str
    steps_ok: int
    recoveries_s: tuple[float, ...]
    """Of each error: release, emergency product, and the climb of progressive allocation."""
    kinds: tuple[str, ...]
    """What each error was classified as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What both parts found."""

    figures: dict[str, Any]
    """Of the recovery bench: `errors`, `recovery_p50_s`, `recovery_p99_s` and more."""
    asked_errors: int
    unrecovered: Sequence[str]
    descent: Descent


def storm(errors: int, device: str, budget_bytes: int, size: int) -> tuple[dict[str, Any], list[str]]:
    """Run the recovery bench. The body of a child."""
    result = bench.run(errors, device, budget_bytes, size)
    return dict(result.figures), list(result.broken)


def measure(ground: Ground) -> Recovered:
    """Run the storm and the descent, one after the other."""
    scale = ground.scale
    budget_bytes, _ = ground.fitting(1, scale.large_budget_bytes)
    figures, broken = in_child(ground.watch, storm, scale.errors, ground.device, budget_bytes, scale.size)
    specs = ground.specs(1, budget_bytes, size=scale.too_large_size, policy="classic", label="descent")
    with crew_of(specs, ground.watch) as (_, (first,)):
        descent = _descent(first.last, scale.too_large_size)
    return Recovered(figures=figures, asked_errors=scale.errors, unrecovered=broken, descent=descent)


def _descent(report: Report, asked_size: int) -> Descent:
    ooms = [event.detail for event in report.events if event.name == "oom"]
    return Descent(
        asked_size=asked_size,
        ended_size=report.size,
        state=report.state.value,
        verdict=report.verdict.value,
        steps_ok=report.counts.steps_ok,
        recoveries_s=tuple(float(detail["recovery_s"] or 0.0) for detail in ooms),
        kinds=tuple(str(detail["kind"]) for detail in ooms),
    )


def judge(found: Recovered) -> Outcome:
    """Say whether every error was survived in time."""
    figures, descent = found.figures, found.descent
    broken = list(found.unrecovered)
    if figures.get("errors", 0) < found.asked_errors and not broken:
        broken.append(f"{figures.get('errors', 0)} of {found.asked_errors} errors were provoked and survived")
    p99_s = figures.get("recovery_p99_s")
    if p99_s is not None and p99_s > _MOST_S:
        broken.append(f"99 % of the recoveries took up to {1000 * p99_s:.1f} ms")
    if not descent.recoveries_s:
        broken.append(f"size {descent.asked_size} was meant not to fit, and did")
    if (descent.verdict, descent.state, descent.steps_ok) != (Verdict.OK.value, WorkerState.RUNNING.value, 1):
        broken.append(f"from size {descent.asked_size} the worker ended {descent.verdict} {descent.state}")
    if set(descent.kinds) - {"definite"}:
        broken.append(f"from size {descent.asked_size}: errors classified as {sorted(set(descent.kinds))}")
    return Outcome(
        check="recovery",
        must_hold=MUST_HOLD,
        figures={
            "errors": figures.get("errors"),
            "recovery_p50_ms": _ms(figures.get("recovery_p50_s")),
            "recovery_p99_ms": _ms(p99_s),
            "good_step_p50_ms": _ms(figures.get("good_step_p50_s")),
            "budget_bytes": figures.get("budget_bytes"),
            "size": figures.get("size"),
            "descent_from_size": descent.asked_size,
            "descent_to_size": descent.ended_size,
            "descent_errors": len(descent.recoveries_s),
            "descent_recovery_p50_ms": _ms(percentile(descent.recoveries_s, 0.5)) if descent.recoveries_s else None,
            "descent_recovery_most_ms": _ms(max(descent.recoveries_s, default=None)),
        },
        broken=broken,
    )


def check(ground: Ground) -> Outcome:
    """Measure and judge."""
    return judge(measure(ground))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000.0 * seconds
