"""Side by side: the guides' seven and three workers on one card, each of which has to hold what it was promised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from acceptance.crew import SeatDiedError
from acceptance.ground import Ground
from acceptance.outcome import Outcome, Row
from acceptance.seats import Turn
from workers.messages import Verdict, WorkerState
from workers.units import GIB, MIB

_LEAST_HELD = 0.95
#: What the driver loads for a kernel that runs later is outside the allocator, and outside its cap.
_WORTH_TELLING = 1.01
MUST_HOLD = f"each worker holds {_LEAST_HELD:.0%} of its cap, no failure is left standing, no process ends"
_SUMMED = ("steps_ok", "steps_oom", "unrecovered", "tflops")
_GOOD_END = f"{Verdict.OK.value} {WorkerState.RUNNING.value}: "


def measure(ground: Ground) -> Sequence[Row]:
    """Play the scenes, one row each; the last crew stays for the next check."""
    scale = ground.scale
    asked = [(3, scale.small_budget_bytes, "adaptive"), (7, scale.large_budget_bytes, "adaptive")]
    if not ground.quick:
        asked.insert(1, (7, scale.large_budget_bytes, "classic"))
    scenes = []
    for workers, asked_bytes, policy in asked:
        budget_bytes, scaled = ground.fitting(workers, asked_bytes)
        stands: Sequence[Row] = ()
        died = None
        try:
            crew = ground.crews.have(ground.specs(workers, budget_bytes, policy=policy), ground.watch)
            stands = [_stand(turn, budget_bytes) for turn in crew.turn(scale.side_s)]
        except SeatDiedError as error:
            died = str(error)
        what = f"{workers} x {asked_bytes / GIB:.2f} GiB, {policy}"
        scene = {"what": what, "policy": policy, "workers": workers, "stands": stands, "scaled": scaled, "died": died}
        scenes.append(scene)
    return scenes


def _stand(turn: Turn, budget_bytes: int) -> Row:
    """Return how one worker stood when the scene was over."""
    last = turn.last
    cap_bytes = last.device.cap_bytes if last.device else 0
    reserved_bytes = last.memory.reserved_bytes if last.memory else 0
    used_bytes = turn.process_used_bytes
    return {
        "slot": last.slot,
        "ended": f"{last.verdict.value} {last.state.value}: {last.reason if last.state.value != 'RUNNING' else ''}",
        "budget_mib": budget_bytes / MIB,
        "cap_mib": cap_bytes / MIB,
        "held_to_cap": reserved_bytes / cap_bytes if cap_bytes else 0.0,
        "process_to_budget": None if used_bytes is None else used_bytes / budget_bytes,
        "steps_ok": sum(report.counts.steps_ok for report in turn.reports),
        "steps_oom": sum(report.counts.steps_oom for report in turn.reports),
        "unrecovered": sum(report.counts.steps_error for report in turn.reports),
        "tflops": turn.flop_per_s / 1e12,
    }


def judge(scenes: Sequence[Row]) -> Outcome:
    """Say whether all of them stood."""
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    notes = [scene["scaled"] for scene in scenes if scene["scaled"] is not None]
    for scene in scenes:
        where, stands = scene["what"], scene["stands"]
        if scene["died"] is not None:
            broken.append(f"{where}: {scene['died']}")
        broken += [f"{where}, {stand['slot']}: {words}" for stand in stands for words in _amiss(stand)]
        of_budget = [stand["process_to_budget"] for stand in stands if stand["process_to_budget"] is not None]
        most = max(of_budget, default=None)
        rows.append(
            {
                "workers": scene["workers"],
                "budget_mib": stands[0]["budget_mib"] if stands else None,
                "policy": scene["policy"],
                "cap_mib_least": min((stand["cap_mib"] for stand in stands), default=None),
                "held_to_cap_least": min((stand["held_to_cap"] for stand in stands), default=None),
                "process_to_budget_most": most,
                **{key: sum(stand[key] for stand in stands) for key in _SUMMED},
            }
        )
        if most is not None and most > _WORTH_TELLING:
            notes.append(f"{where}: a process holds {most:.3f} of its budget")
    held = [row["held_to_cap_least"] for row in rows if row["held_to_cap_least"] is not None]
    died = sum(scene["died"] is not None for scene in scenes)
    figures = {"held_to_cap_least": min(held, default=None), "processes_died": died}
    return Outcome(figures=figures, rows=rows, broken=broken, notes=notes)


def _amiss(stand: Row) -> list[str]:
    found = []
    if stand["ended"] != _GOOD_END:
        found.append(f"ended {stand['ended']}")
    if stand["unrecovered"]:
        found.append(f"{stand['unrecovered']} failures left standing")
    if not stand["steps_ok"]:
        found.append("no good step")
    if stand["held_to_cap"] < _LEAST_HELD:
        found.append(f"holds {stand['held_to_cap']:.3f} of its cap")
    return found
