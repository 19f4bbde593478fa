"""Side by side: the guides' seven and three workers on one card, each of which has to hold what it was promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from acceptance.crew import SeatDiedError
from acceptance.ground import GIB, MIB, Ground
from acceptance.outcome import Outcome
from acceptance.seats import Turn
from workers.messages import Verdict, WorkerState

_LEAST_HELD = 0.95
#: What the driver loads for a kernel that runs later is outside the allocator, and outside its cap.
_WORTH_TELLING = 1.01
MUST_HOLD = f"each worker holds {_LEAST_HELD:.0%} of its cap, no failure is left standing, no process ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """How one worker stood when the scene was over."""

    slot: str
    verdict: str
    state: str
    reason: str
    cap_bytes: int
    reserved_bytes: int
    budget_bytes: int
    process_used_bytes: int | None
    steps_ok: int
    steps_oom: int
    steps_error: int
    flop_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Some workers at once."""

    policy: str
    workers: int
    asked_budget_bytes: int
    stands: tuple[Stand, ...]
    scaled: str | None
    """A sentence if the card is too small for what was asked."""
    died: str | None
    """A sentence if a process ended."""


def measure(ground: Ground) -> list[Scene]:
    """Play the scenes; the last crew stays for the next check."""
    scale = ground.scale
    asked = [(3, scale.small_budget_bytes, "adaptive"), (7, scale.large_budget_bytes, "adaptive")]
    if not ground.quick:
        asked.insert(1, (7, scale.large_budget_bytes, "classic"))
    return [_play(ground, *one) for one in asked]


def _play(ground: Ground, workers: int, asked_budget_bytes: int, policy: str) -> Scene:
    budget_bytes, scaled = ground.fitting(workers, asked_budget_bytes)
    turns: Sequence[Turn] = ()
    died = None
    try:
        crew = ground.crews.have(ground.specs(workers, budget_bytes, policy=policy), ground.watch)
        turns = crew.turn(ground.watch, seconds=ground.scale.side_s)
    except SeatDiedError as error:
        died = str(error)
    return Scene(
        policy=policy,
        workers=workers,
        asked_budget_bytes=asked_budget_bytes,
        stands=tuple(_stand(turn, budget_bytes) for turn in turns),
        scaled=scaled,
        died=died,
    )


def _stand(turn: Turn, budget_bytes: int) -> Stand:
    last = turn.last
    return Stand(
        slot=last.slot,
        verdict=last.verdict.value,
        state=last.state.value,
        reason=last.reason,
        cap_bytes=last.device.cap_bytes if last.device else 0,
        reserved_bytes=last.memory.reserved_bytes if last.memory else 0,
        budget_bytes=budget_bytes,
        process_used_bytes=turn.process_used_bytes,
        steps_ok=sum(report.counts.steps_ok for report in turn.reports),
        steps_oom=sum(report.counts.steps_oom for report in turn.reports),
        steps_error=sum(report.counts.steps_error for report in turn.reports),
        flop_per_s=turn.flop_per_s,
    )


def judge(scenes: Sequence[Scene]) -> Outcome:
    """Say whether all of them stood."""
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    for scene in scenes:
        where = f"{scene.workers} x {scene.asked_budget_bytes / GIB:.2f} GiB, {scene.policy}"
        if scene.died is not None:
            broken.append(f"{where}: {scene.died}")
        broken += [f"{where}, {stand.slot}: {words}" for stand in scene.stands for words in _amiss(stand)]
        shares = [_held(stand) for stand in scene.stands]
        of_budget = [
            stand.process_used_bytes / stand.budget_bytes
            for stand in scene.stands
            if stand.process_used_bytes is not None
        ]
        rows.append(
            {
                "workers": scene.workers,
                "budget_mib": scene.stands[0].budget_bytes / MIB if scene.stands else None,
                "policy": scene.policy,
                "cap_mib_least": min((stand.cap_bytes / MIB for stand in scene.stands), default=None),
                "held_to_cap_least": min(shares, default=None),
                "process_to_budget_most": max(of_budget, default=None),
                "steps_ok": sum(stand.steps_ok for stand in scene.stands),
                "steps_oom": sum(stand.steps_oom for stand in scene.stands),
                "unrecovered": sum(stand.steps_error for stand in scene.stands),
                "tflops": sum(stand.flop_per_s for stand in scene.stands) / 1e12,
            }
        )
    notes = [scene.scaled for scene in scenes if scene.scaled is not None]
    notes += [
        f"{row['workers']} x {row['budget_mib']:.0f} MiB, {row['policy']}: a process holds "
        f"{row['process_to_budget_most']:.3f} of its budget"
        for row in rows
        if row["process_to_budget_most"] is not None and row["process_to_budget_most"] > _WORTH_TELLING
    ]
    held = [row["held_to_cap_least"] for row in rows if row["held_to_cap_least"] is not None]
    return Outcome(
        check="side_by_side",
        must_hold=MUST_HOLD,
        figures={"held_to_cap_least": min(held, default=None), "processes_died": sum(bool(s.died) for s in scenes)},
        rows=rows,
        broken=broken,
        notes=notes,
    )


def check(ground: Ground) -> Outcome:
    """Measure and judge."""
    return judge(measure(ground))


def _held(stand: Stand) -> float:
    return stand.reserved_bytes / stand.cap_bytes if stand.cap_bytes else 0.0


def _amiss(stand: Stand) -> list[str]:
    found = []
    if stand.verdict != Verdict.OK.value or stand.state != WorkerState.RUNNING.value:
        found.append(f"ended {stand.verdict} {stand.state}: {stand.reason}")
    if stand.steps_error:
        found.append(f"{stand.steps_error} failures left standing")
    if not stand.steps_ok:
        found.append("no good step")
    if _held(stand) < _LEAST_HELD:
        found.append(f"holds {_held(stand):.3f} of its cap")
    return found
