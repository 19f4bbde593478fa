"""A node that is lost and comes back, again and again: what the workers of the other node do
meanwhile.

One rehearsal of the reference pair; pc2's raylet is ended as by a power cut and started again,
cycle after cycle. What pc1's workers do per second in each cycle is compared with what they did
before the first one, and each time all of pc2's slots must be back before the next.

These nodes share one machine's cores, and starting pc2's processes costs pc1's workers theirs. So a
step is a long rest and one small product of always the same size: ten such workers leave most of
the machine idle, and a head that keeps a worker waiting for longer than its queued slice is seen.
No duty: that would double what the neighbours cost.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benches.common import Result, progress, spread
from benches.outside import RESTING, settings, unix_s, watched
from orchestrator.record.archive import StoredEvent, StoredRun, read_events, reading

_STAYS, _GOES = "pc1", "pc2"
_TARGET = 0.95
_PAUSE_S = 8.0  # how long the node is away; Ray itself would need longer to miss it
_SETTLING_S = 3.0  # at the beginning, until claims and pace have settled


def run(cycles: int, quiet_s: float, cycle_s: float) -> Result:
    def judge(folder: Path, _stored: StoredRun, _rows: object, broken: list[str]) -> dict[str, Any]:
        rows = _cycles(folder, cycle_s, broken)
        if len(rows) != cycles:
            broken.append(f"{len(rows)} cycles happened, {cycles} were planned")
        return {"cycles_planned": cycles, **_figures(rows)}

    moments_s = [_SETTLING_S + quiet_s + number * cycle_s for number in range(cycles)]
    arguments = [
        "--rehearse", "--duration", f"{_SETTLING_S + quiet_s + cycles * cycle_s:.3f}s", "--workload", RESTING,
        "--chaos", ";".join(f"node:{_GOES}@{at_s:.2f}s+{_PAUSE_S:g}s" for at_s in moments_s),
        *settings(
            "compute_share_mode=none",
            "workload.size=1024",
            "run.slice_s=0.5",
            "run.min_success_rate=0",
        ),
    ]  # fmt: skip
    return watched("rejoin", arguments, quiet_s + cycles * cycle_s, judge)


def _cycles(folder: Path, cycle_s: float, broken: list[str]) -> list[dict[str, Any]]:
    events = read_events(folder, ("state", "counting", "chaos_node_ended", "chaos_node_started"))
    began_s = next((unix_s(event) for event in events if event.event == "counting"), 0.0)
    ended_s = [unix_s(event) for event in events if event.event == "chaos_node_ended"]
    steps = _steps(folder)
    slots = {
        event.slot
        for event in events
        if event.slot is not None and event.slot.startswith(f"{_GOES}/")
    }
    rows = []
    for number, end_s in enumerate(ended_s, start=1):
        next_s = ended_s[number] if number < len(ended_s) else end_s + cycle_s
        quiet = _rate(steps, began_s + _SETTLING_S, ended_s[0])
        mine = [event for event in events if end_s <= unix_s(event) < next_s]
        started_s = next(
            (unix_s(event) for event in mine if event.event == "chaos_node_started"), None
        )
        lost_s = _all_in("LOST", mine, slots)
        back_s = None if started_s is None else _all_in("RUNNING", mine, slots, since_s=started_s)
        if back_s is None:
            broken.append(
                f"cycle {number}: not all of {_GOES}'s slots were RUNNING again within "
                f"{next_s - end_s:.0f} s"
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
            "back_after_start_s": None
            if back_s is None or started_s is None
            else back_s - started_s,
        }
        rows.append(row)
        progress(f"{number}/{len(ended_s)}  ratio {row['ratio']:.3f}")
    return rows


def _all_in(
    state: str, events: Sequence[StoredEvent], slots: set[str], since_s: float = float("-inf")
) -> float | None:
    """Return when the last of the slots was first in the state; `None` if one never was."""
    first: dict[str, float] = {}
    for event in events:
        if (
            event.slot in slots
            and event.details.get("to_state") == state
            and unix_s(event) >= since_s
        ):
            first.setdefault(str(event.slot), unix_s(event))
    return max(first.values()) if first.keys() == slots else None


def _steps(folder: Path) -> list[tuple[float, int]]:
    """Return the samples of the slots that stay: the moment in Unix seconds, and steps counted by
    then in all.
    """
    query = (
        "SELECT at_unix_s, SUM(steps_ok) FROM samples WHERE slot LIKE ? GROUP BY at_unix_s "
        "ORDER BY at_unix_s"
    )
    with reading(folder) as store:
        return [
            (at_unix_s, steps_ok) for at_unix_s, steps_ok in store.execute(query, (f"{_STAYS}/%",))
        ]


def _rate(steps: Sequence[tuple[float, int]], from_s: float, to_s: float) -> float:
    """Return steps per second between two moments that may fall between two samples."""
    return (_steps_at(steps, to_s) - _steps_at(steps, from_s)) / (to_s - from_s)


def _steps_at(steps: Sequence[tuple[float, int]], at_s: float) -> float:
    for (before_s, count), (after_s, more) in itertools.pairwise(steps):
        if before_s <= at_s <= after_s:
            return count + (at_s - before_s) / (after_s - before_s) * (more - count)
    return float(steps[0 if at_s < steps[0][0] else -1][1])


def _figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not rows:
        return {"cycles": 0}
    ratios = [row["ratio"] for row in rows]
    overall = statistics.fmean(ratios)
    figures = {
        "cycles": len(rows),
        "rounds": list(rows),
        **spread("ratio", ratios),
        "ratio_overall": overall,
        "ratio_while_away_least": min(row["ratio_while_away"] for row in rows),
    }
    for name in ("lost_after", "back_after", "back_after_start"):
        known = [row[f"{name}_s"] for row in rows if row[f"{name}_s"] is not None]
        figures |= {f"{name}_median_s": statistics.median(known)} if known else {}
    return figures | {
        "target": _TARGET,
        "target_met": overall >= _TARGET,
        "target_met_in_each": min(ratios) >= _TARGET,
    }
