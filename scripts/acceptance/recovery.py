"""Recovery: real out-of-memory errors at the cap by the hundred, and from a size far too large to one that fits."""

from __future__ import annotations

from typing import Any

from benches import recovery as bench
from benches.common import percentile

from acceptance.crew import crew_of, in_child
from acceptance.ground import Ground
from acceptance.outcome import Outcome, Row
from workers.units import MIB

_MOST_MS = 100.0
MUST_HOLD = f"every out-of-memory error is survived, 99 % of them within {_MOST_MS:.0f} ms"


def storm(errors: int, device: str, budget_bytes: int, size: int) -> tuple[dict[str, Any], list[str]]:
    """Run the recovery bench. The body of a child."""
    result = bench.run(errors, device, budget_bytes / MIB, size)
    return dict(result.figures), list(result.broken)


def measure(ground: Ground) -> Row:
    """Run the storm and the descent, one after the other; return the figures and what was not survived."""
    scale = ground.scale
    budget_bytes, _ = ground.fitting(1, scale.large_budget_bytes)
    found, unrecovered = in_child(ground.watch, storm, scale.errors, ground.device, budget_bytes, scale.size)
    specs = ground.specs(1, budget_bytes, size=scale.too_large_size, policy="classic", label="descent")
    with crew_of(specs, ground.watch) as crew:
        report = crew.first[0].last
    ooms = [event.detail for event in report.events if event.name == "oom"]
    # Of each error: release, emergency product, and the climb of progressive allocation.
    descent_ms = [1000.0 * float(detail["recovery_s"] or 0.0) for detail in ooms]
    times_s = {name: found.get(f"{name}_s") for name in ("recovery_p50", "recovery_p99", "good_step_p50")}
    return {
        "errors_asked": scale.errors,
        "errors": found.get("errors", 0),
        **{f"{name}_ms": None if value is None else 1000.0 * value for name, value in times_s.items()},
        "budget_bytes": found.get("budget_bytes"),
        "size": found.get("size"),
        "descent_from_size": scale.too_large_size,
        "descent_to_size": report.size,
        "descent_ended": f"{report.verdict.value} {report.state.value}, {report.counts.steps_ok} steps",
        "descent_errors": len(ooms),
        "descent_kinds": sorted({str(detail["kind"]) for detail in ooms}),
        "descent_recovery_p50_ms": percentile(descent_ms, 0.5) if ooms else None,
        "descent_recovery_most_ms": max(descent_ms, default=None),
        "unrecovered": unrecovered,
    }


def judge(found: Row) -> Outcome:
    """Say whether every error was survived in time."""
    broken = list(found["unrecovered"])
    if found["errors"] < found["errors_asked"] and not broken:
        broken.append(f"{found['errors']} of {found['errors_asked']} errors were provoked and survived")
    p99_ms = found["recovery_p99_ms"]
    if p99_ms is not None and p99_ms > _MOST_MS:
        broken.append(f"99 % of the recoveries took up to {p99_ms:.1f} ms")
    asked = found["descent_from_size"]
    if not found["descent_errors"]:
        broken.append(f"size {asked} was meant not to fit, and did")
    if found["descent_ended"] != "ok RUNNING, 1 steps":
        broken.append(f"from size {asked} the worker ended {found['descent_ended']}")
    if set(found["descent_kinds"]) - {"definite"}:
        broken.append(f"from size {asked}: errors classified as {found['descent_kinds']}")
    return Outcome(figures={key: value for key, value in found.items() if key != "unrecovered"}, broken=broken)
