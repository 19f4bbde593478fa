"""A node that is lost and comes back, again and again: what the workers of the other node do meanwhile.

One rehearsal of the reference pair; pc2's raylet is ended as by a power cut and started again, cycle after cycle. What
pc1's workers do per second in each cycle is compared with what they did before the first one, and each time all of
pc2's slots must be back before the next.

Real nodes share no processor, but these share the cores of one machine, and starting pc2's processes costs pc1's
workers theirs. That is the rehearsal's price and not the head's. So a step is a long rest and one small product of
always the same size, as of a processor that waits for its card: ten such workers leave most of the machine idle, steps
per second are work per second, and a head that keeps a worker waiting for longer than its queued slice is seen.
No duty: that makes a worker rest in proportion to the time its step took, and so doubles what the neighbours cost.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benches.common import Result, progress, spread
from benches.outside import RESTING, settings, watched
from orchestrator.watch.archive import StoredEvent, StoredRun, read_events
from orchestrator.watch.opening import reading

_STAYS, _GOES = "pc1", "pc2"
_TARGET = 0.95
_PAUSE_S = 8.0
"""How long the node is away; Ray itself would need longer to miss it."""

_SETTLING_S = 3.0
"""At the beginning, until claims and pace have settled."""


def run(cycles: int, quiet_s: float, cycle_s: float) -> Result:
    """Let the node go and come back so often.

    Args:
        cycles: How often.
        quiet_s: Before the first one: what it is compared with.
        cycle_s: From one end of the node to the next.
    """

    def judge(folder: Path, _stored: StoredRun, _rows: object, broken: list[str]) -> dict[str, Any]:
        rows = _cycles(folder, cycle_s, broken)
        if len(rows) != cycles:
            broken.append(f"{len(rows)} cycles happened, {cycles} were planned")
        return {"cycles_planned": cycles, **_figures(rows)}

    return watched("rejoin", _arguments(cycles, quiet_s, cycle_s), quiet_s + cycles * cycle_s, judge)


def _arguments(cycles: int, quiet_s: float, cycle_s: float) -> list[str]:
    moments_s = [_SETTLING_S + quiet_s + number * cycle_s for number in range(cycles)]
    return [
        "--rehearse", "--duration", f"{_SETTLING_S + quiet_s + cycles * cycle_s:.3f}s", "--workload", RESTING,
        "--chaos", ";".join(f"node:{_GOES}@{at_s:.2f}s+{_PAUSE_S:g}s" for at_s in moments_s),
        *settings(
            "compute_share_mode=none",
            "workload.size=1024",
            "run.slice_s=0.5",
            "run.min_success_rate=0",
        ),
    ]  # fmt: skip


def _cycles(folder: Path, cycle_s: float, broken: list[str]) -> list[dict[str, Any]]:
    """Return a line for each cycle."""
    events = read_events(folder, ("state", "counting", "chaos_node_ended", "chaos_node_started"))
    began_s = next((_unix_s(event) for event in events if event.event == "counting"), 0.0)
    ended_s = [_unix_s(event) for event in events if event.event == "chaos_node_ended"]
    steps = _steps(folder)
    slots = {event.slot for event in events if event.slot is not None and event.slot.startswith(f"{_GOES}/")}
    rows = []
    for number, end_s in enumerate(ended_s, start=1):
        next_s = ended_s[number] if number < len(ended_s) else end_s + cycle_s
        quiet = _rate(steps, began_s + _SETTLING_S, ended_s[0])
        mine = [event for event in events if end_s <= _unix_s(event) < next_s]
        started_s = next((_unix_s(event) for event in mine if event.event == "chaos_node_started"), None)
        lost_s = _all_in("LOST", mine, slots)
        back_s = None if started_s is None else _all_in("RUNNING", mine, slots, since_s=started_s)
        if back_s is None:
            broken.append(
                f"cycle {number}: not all of {_GOES}'s slots were RUNNING again within {next_s - end_s:.0f} s"
            )
        away_until_s = next_s if back_s is None else back_s
        row = {
            "cycle": number,
            "steps_per_s": _rate(steps, end_s, next_s),
            "quiet_steps_per_s": quiet,
            "ratio": _rate(steps, end_s, next_s) / quiet,
            "ratio_while_away": _rate(steps, end_s, away_until_s) / quiet,
            "lost_after_s": None if lost_s is None else lost_s - end_s,
            "back_after_s": None if back_s is None else back_s - end_s,
            "back_after_start_s": None if back_s is None or started_s is None else back_s - started_s,
        }
        rows.append(row)
        progress(f"{number}/{len(ended_s)}  ratio {row['ratio']:.3f}")
    return rows


def _all_in(state: str, events: Sequence[StoredEvent], slots: set[str], since_s: float = float("-inf")) -> float | None:
    """Return when the last of the slots was first in the state; `None` if one never was."""
    first: dict[str, float] = {}
    for event in events:
        if event.slot in slots and event.details.get("to_state") == state and _unix_s(event) >= since_s:
            first.setdefault(str(event.slot), _unix_s(event))
    return max(first.values()) if first.keys() == slots else None


def _steps(folder: Path) -> Mapping[str, list[tuple[float, int]]]:
    """Return the samples of the slots that stay: moments in Unix seconds, and steps counted by then."""
    steps: dict[str, list[tuple[float, int]]] = {}
    with reading(folder) as store:
        for line in store.execute("SELECT at_unix_s, slot, steps_ok FROM samples ORDER BY at_unix_s"):
            if line["slot"].startswith(f"{_STAYS}/"):
                steps.setdefault(line["slot"], []).append((line["at_unix_s"], line["steps_ok"]))
    return steps


def _rate(steps: Mapping[str, Sequence[tuple[float, int]]], from_s: float, to_s: float) -> float:
    """Return steps per second of all slots together, between two moments that may fall between two samples."""
    done = sum(_steps_at(samples, to_s) - _steps_at(samples, from_s) for samples in steps.values())
    return done / (to_s - from_s)


def _steps_at(samples: Sequence[tuple[float, int]], at_s: float) -> float:
    before, count = samples[0]
    for moment_s, steps_ok in samples:
        if moment_s >= at_s:
            share = (at_s - before) / (moment_s - before) if moment_s > before else 1.0
            return count + share * (steps_ok - count)
        before, count = moment_s, steps_ok
    return float(count)


def _unix_s(event: StoredEvent) -> float:
    return datetime.fromisoformat(event.at).timestamp()


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not rows:
        return {"cycles": 0}
    ratios = spread([row["ratio"] for row in rows])
    known = {
        name: [row[name] for row in rows if row[name] is not None]
        for name in ("lost_after_s", "back_after_s", "back_after_start_s")
    }
    overall = statistics.fmean(row["ratio"] for row in rows)
    return {
        "cycles": len(rows),
        "rounds": list(rows),
        "ratio_median": ratios["median"],
        "ratio_least": ratios["least"],
        "ratio_overall": overall,
        "ratio_while_away_least": min(row["ratio_while_away"] for row in rows),
        **{f"{name[:-2]}_median_s": statistics.median(values) for name, values in known.items() if values},
        "target": _TARGET,
        "target_met": overall >= _TARGET,
        "target_met_in_each": ratios["least"] >= _TARGET,
    }
