"""What workers hold: the cap of one, recovery from running into it, and several workers side by
side.

The guides put seven and three workers on one card; each has to hold what it was promised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from benches import recovery as bench
from benches.bodies import Turn
from benches.common import ChildDiedError, amiss, percentile, status_bytes

from acceptance.crew import crew_of, in_child
from acceptance.machine import Machine
from acceptance.outcome import Outcome, Row
from workers import oom
from workers.devices import open_device
from workers.devices.base import Device
from workers.messages import Verdict, WorkerState
from workers.nvml import queries
from workers.settings import FailureKind, WorkerSpec
from workers.units import GIB, MIB

_LEAST, _MOST = 0.99, 1.01
CAP_MUST_HOLD = (
    "granted up to 0.99 of the cap at the least, refused at 1.01 at the most, and the "
    "process holds its budget"
)
#: One block. CUDA's allocator maps blocks of 10 MiB and more by themselves, in multiples of 2 MiB,
#: and smaller ones by twenties; a processor's caps are small.
_BLOCK_BYTES = {"cuda": 10 * MIB, "cpu": MIB // 4}
_SEGMENT_BYTES = {"cuda": 2 * MIB, "cpu": MIB // 4}


def up_to_the_wall(spec: WorkerSpec) -> Row:
    """Take blocks until one is refused, and return what was granted. The body of a child."""
    on_card = spec.device == "cuda"
    card = queries.visible_card()
    used_before_bytes = queries.card_used_bytes(card) if on_card else None
    device = open_device(spec)
    opened_bytes = 0 if on_card else status_bytes("VmData")
    cap_bytes = device.info.cap_bytes
    block_bytes, segment_bytes = _BLOCK_BYTES[spec.device], _SEGMENT_BYTES[spec.device]
    too_large_refused = False
    try:
        device.obtain(int(_MOST * cap_bytes))
    except RuntimeError as error:
        too_large_refused = oom.classify(error).kind is FailureKind.DEFINITE
    device.release()
    blocks: list[torch.Tensor] = []
    refusal = ""
    with device.enforced():
        while not refusal:
            try:
                blocks.append(
                    torch.empty(block_bytes, dtype=torch.uint8, device=device.torch_device)
                )
            except RuntimeError as error:
                refusal = oom.classify(error).kind.value
            if len(blocks) * block_bytes > 2 * cap_bytes:
                refusal = (
                    "none"  # nothing holds it: better found out here than by the whole machine
                )
        if blocks and segment_bytes < block_bytes:
            blocks.pop()
            blocks.append(_largest_left(device, block_bytes, segment_bytes))
    granted_bytes = device.memory().reserved_bytes
    device.emergency()  # raises if the device does not answer
    grown_bytes: int | None = None
    if on_card:
        used_now_bytes, used_bytes = queries.card_used_bytes(card), queries.process_used_bytes(card)
        if used_now_bytes is not None and used_before_bytes is not None:
            grown_bytes = used_now_bytes - used_before_bytes
    else:
        used_bytes = device.info.context_bytes + status_bytes("VmData") - opened_bytes
    return {
        "budget_mib": spec.budget_bytes / MIB,
        "context_mib": device.info.context_bytes / MIB,
        "cap_mib": cap_bytes / MIB,
        "granted_to_cap": granted_bytes / cap_bytes,
        "refused_at": (granted_bytes + segment_bytes)
        / cap_bytes,  # what it would have held with the next block
        "refusal": refusal,
        "one_block_of_1.01_refused": too_large_refused,
        # As the driver, or on a CPU the kernel, says.
        "process_to_budget": None if used_bytes is None else used_bytes / spec.budget_bytes,
        # By any process; the driver takes some for its first client.
        "card_grown_mib": None if grown_bytes is None else grown_bytes / MIB,
    }


def _largest_left(device: Device, block_bytes: int, segment_bytes: int) -> torch.Tensor:
    """Take the most that fits in one piece where a block has just been freed, and less than another
    one is left.
    """
    device.release()
    for size_bytes in range(2 * block_bytes - segment_bytes, block_bytes, -segment_bytes):
        with contextlib.suppress(RuntimeError):
            return torch.empty(size_bytes, dtype=torch.uint8, device=device.torch_device)
    return torch.empty(block_bytes, dtype=torch.uint8, device=device.torch_device)


def measure_cap(machine: Machine) -> Sequence[Row]:
    budgets = [
        machine.scale.large_budget_bytes,
        *([] if machine.quick else [machine.scale.small_budget_bytes]),
    ]
    fitting = [machine.fitting(1, budget_bytes)[0] for budget_bytes in budgets]
    return [
        in_child(machine.watch, up_to_the_wall, *machine.specs(1, budget_bytes))
        for budget_bytes in fitting
    ]


def judge_cap(rows: Sequence[Row]) -> Outcome:
    broken = []
    for row in rows:
        held = row["process_to_budget"]
        holds = {
            f"refused at {row['granted_to_cap']:.4f} of the cap": row["granted_to_cap"] >= _LEAST,
            f"granted more than {_MOST:.2f} of the cap": row["refused_at"] <= _MOST
            and row["one_block_of_1.01_refused"],
            f"the refusal was classified as {row['refusal']!r}": row["refusal"]
            == FailureKind.DEFINITE.value,
            f"the process holds {held or 0.0:.4f} of its budget": held is None
            or _LEAST <= held <= _MOST,
        }
        broken += amiss(holds, f"budget {row['budget_mib']:.0f} MiB: ")
    untold = any(row["process_to_budget"] is None for row in rows)
    return Outcome(
        figures={
            "granted_to_cap_least": min(row["granted_to_cap"] for row in rows),
            "refused_at_most": max(row["refused_at"] for row in rows),
        },
        rows=rows,
        broken=broken,
        notes=["the driver does not tell what a process holds: judged by the allocator alone"]
        if untold
        else [],
    )


_MOST_MS = 100.0
RECOVERY_MUST_HOLD = f"every out-of-memory error is survived, 99 % of them within {_MOST_MS:.0f} ms"


def measure_recovery(machine: Machine) -> Row:
    scale = machine.scale
    budget_bytes, _ = machine.fitting(1, scale.large_budget_bytes)
    result = in_child(
        machine.watch, bench.run, scale.errors, machine.device, budget_bytes / MIB, scale.size
    )
    found = result.figures
    # Under less memory: the step that fits at last is over sooner.
    specs = machine.specs(
        1, budget_bytes // 4, size=scale.too_large_size, policy="classic", label="descent"
    )
    with crew_of(specs, machine.watch) as crew:
        report = crew.first[0].last
    ooms = [event.detail for event in report.events if event.name == "oom"]
    # Of each error: release, emergency product, and the climb of progressive allocation.
    descent_ms = [1000.0 * float(detail["recovery_s"] or 0.0) for detail in ooms]
    times_s = {
        name: found.get(f"{name}_s") for name in ("recovery_p50", "recovery_p99", "good_step_p50")
    }
    return {
        "errors_asked": scale.errors,
        "errors": found.get("errors", 0),
        **{
            f"{name}_ms": None if value is None else 1000.0 * value
            for name, value in times_s.items()
        },
        "budget_bytes": found.get("budget_bytes"),
        "size": found.get("size"),
        "descent_from_size": scale.too_large_size,
        "descent_to_size": report.size,
        "descent_ended": f"{report.verdict.value} {report.state.value}, {report.counts.steps_ok} "
        "steps",
        "descent_errors": len(ooms),
        "descent_kinds": sorted({str(detail["kind"]) for detail in ooms}),
        "descent_recovery_p50_ms": percentile(descent_ms, 0.5) if ooms else None,
        "descent_recovery_most_ms": max(descent_ms, default=None),
        "unrecovered": list(result.broken),
    }


def judge_recovery(found: Row) -> Outcome:
    errors, p99_ms, asked = found["errors"], found["recovery_p99_ms"], found["descent_from_size"]
    holds = {
        f"{errors} of {found['errors_asked']} errors were provoked and survived": (
            errors >= found["errors_asked"] or found["unrecovered"]
        ),
        f"99 % of the recoveries took up to {p99_ms or 0.0:.1f} ms": p99_ms is None
        or p99_ms <= _MOST_MS,
        f"size {asked} was meant not to fit, and did": found["descent_errors"],
        f"from size {asked} the worker ended {found['descent_ended']}": found["descent_ended"]
        == "ok RUNNING, 1 steps",
        f"from size {asked}: errors classified as {found['descent_kinds']}": set(
            found["descent_kinds"]
        )
        <= {"definite"},
    }
    broken = [*found["unrecovered"], *amiss(holds)]
    return Outcome(
        figures={key: value for key, value in found.items() if key != "unrecovered"}, broken=broken
    )


_LEAST_HELD = 0.95
#: What the driver loads for a kernel that runs later is outside the allocator, and outside its cap.
_WORTH_TELLING = 1.01
SIDE_BY_SIDE_MUST_HOLD = (
    f"each worker holds {_LEAST_HELD:.0%} of its cap, no failure is left standing, no process ends"
)
_SUMMED = ("steps_ok", "steps_oom", "unrecovered", "tflops")
_GOOD_END = f"{Verdict.OK.value} {WorkerState.RUNNING.value}: "


def measure_side_by_side(machine: Machine) -> Sequence[Row]:
    scale = machine.scale
    asked = [(3, scale.small_budget_bytes, "adaptive"), (7, scale.large_budget_bytes, "adaptive")]
    if not machine.quick:
        asked.insert(1, (7, scale.large_budget_bytes, "classic"))
    scenes = []
    for workers, asked_bytes, policy in asked:
        budget_bytes, scaled = machine.fitting(workers, asked_bytes)
        stands: Sequence[Row] = ()
        died = None
        try:
            with crew_of(
                machine.specs(workers, budget_bytes, policy=policy), machine.watch
            ) as crew:
                stands = [_stand(turn, budget_bytes) for turn in crew.turn(scale.side_s)]
        except ChildDiedError as error:
            died = str(error)
        what = f"{workers} x {asked_bytes / GIB:.2f} GiB, {policy}"
        scene = {
            "what": what,
            "policy": policy,
            "workers": workers,
            "stands": stands,
            "scaled": scaled,
            "died": died,
        }
        scenes.append(scene)
    return scenes


def _stand(turn: Turn, budget_bytes: int) -> Row:
    last = turn.last
    cap_bytes = last.device.cap_bytes if last.device else 0
    reserved_bytes = last.memory.reserved_bytes if last.memory else 0
    used_bytes = turn.process_used_bytes
    return {
        "slot": last.slot,
        "ended": f"{last.verdict.value} {last.state.value}: "
        f"{last.reason if last.state.value != 'RUNNING' else ''}",
        "budget_mib": budget_bytes / MIB,
        "cap_mib": cap_bytes / MIB,
        "held_to_cap": reserved_bytes / cap_bytes if cap_bytes else 0.0,
        "process_to_budget": None if used_bytes is None else used_bytes / budget_bytes,
        "steps_ok": turn.counts.steps_ok,
        "steps_oom": turn.counts.steps_oom,
        "unrecovered": turn.counts.steps_error,
        "tflops": turn.flop_per_s / 1e12,
    }


def judge_side_by_side(scenes: Sequence[Row]) -> Outcome:
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    notes = [scene["scaled"] for scene in scenes if scene["scaled"] is not None]
    for scene in scenes:
        where, stands = scene["what"], scene["stands"]
        if scene["died"] is not None:
            broken.append(f"{where}: {scene['died']}")
        for stand in stands:
            holds = {
                f"ended {stand['ended']}": stand["ended"] == _GOOD_END,
                f"{stand['unrecovered']} failures left standing": not stand["unrecovered"],
                "no good step": stand["steps_ok"],
                f"holds {stand['held_to_cap']:.3f} of its cap": stand["held_to_cap"] >= _LEAST_HELD,
            }
            broken += amiss(holds, f"{where}, {stand['slot']}: ")
        of_budget = [
            stand["process_to_budget"] for stand in stands if stand["process_to_budget"] is not None
        ]
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
