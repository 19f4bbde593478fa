"""Checks of memory: the cap of one worker, recovery from out-of-memory errors at the cap, and
several workers side by side.

The guides run seven and three workers on one card; each worker must get its whole budget.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from benches.common import ChildDiedError, amiss, percentile, status_bytes

from acceptance.bodies import Turn
from acceptance.crew import crew_of, in_child
from acceptance.machine import Check, Machine
from acceptance.outcome import Outcome, Row
from acceptance.recovery import survive
from workers import oom
from workers.devices import open_device
from workers.devices.base import Device
from workers.messages import Verdict, WorkerState
from workers.nvml import queries
from workers.settings import FailureKind, WorkerSpec
from workers.units import GIB, MIB

_LEAST, _MOST = 0.99, 1.01
#: Size of a block, and the step of smaller sizes. CUDA's allocator maps blocks of 10 MiB and more
#: separately in multiples of 2 MiB, and smaller ones in 20 MiB segments. Caps on a CPU are small.
_BLOCK_BYTES = {"cuda": 10 * MIB, "cpu": MIB // 4}
_SEGMENT_BYTES = {"cuda": 2 * MIB, "cpu": MIB // 4}


def up_to_the_wall(spec: WorkerSpec) -> Row:
    """Allocate blocks until one is refused; return the granted memory. Runs in a child process."""
    on_card, card = spec.device == "cuda", queries.visible_card()
    used_before_bytes = queries.card_used_bytes(card) if on_card else None
    device = open_device(spec)
    opened_bytes = 0 if on_card else status_bytes("VmData")
    cap_bytes, block_bytes = device.info.cap_bytes, _BLOCK_BYTES[spec.device]
    segment_bytes = _SEGMENT_BYTES[spec.device]
    too_large_refused = False
    try:
        with device.enforced():
            _block(device, int(_MOST * cap_bytes))
    except RuntimeError as error:
        too_large_refused = oom.classify(error).kind is FailureKind.DEFINITE
    device.release()
    blocks: list[torch.Tensor] = []
    refusal = ""
    with device.enforced():
        while not refusal:
            try:
                blocks.append(_block(device, block_bytes))
            except RuntimeError as error:
                refusal = oom.classify(error).kind.value
            if len(blocks) * block_bytes > 2 * cap_bytes:
                refusal = "none"  # there is no cap: stop before the machine runs out of memory
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
        # The share that the process would hold with one more segment.
        "refused_at": (granted_bytes + segment_bytes) / cap_bytes,
        "refusal": refusal,
        "one_block_of_1.01_refused": too_large_refused,
        # From the driver, or on a CPU from the kernel.
        "process_to_budget": None if used_bytes is None else used_bytes / spec.budget_bytes,
        # Growth by any process, and by the driver for its first client.
        "card_grown_mib": None if grown_bytes is None else grown_bytes / MIB,
    }


def _block(device: Device, size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=device.torch_device)


def _largest_left(device: Device, block_bytes: int, segment_bytes: int) -> torch.Tensor:
    """Allocate the largest block that fits after one block was freed and less than one is left."""
    device.release()
    for size_bytes in range(2 * block_bytes - segment_bytes, block_bytes, -segment_bytes):
        with contextlib.suppress(RuntimeError):
            return _block(device, size_bytes)
    return _block(device, block_bytes)


def measure_cap(machine: Machine) -> Sequence[Row]:
    scale = machine.scale
    budgets = (scale.large_budget_bytes, scale.small_budget_bytes)[: 1 if machine.quick else 2]
    return [
        in_child(machine.watch, up_to_the_wall, *machine.specs(1, machine.fitting(1, budget)[0]))
        for budget in budgets
    ]


def judge_cap(rows: Sequence[Row]) -> Outcome:
    broken = []
    for row in rows:
        held, granted, refusal = (
            row[key] for key in ("process_to_budget", "granted_to_cap", "refusal")
        )
        is_refused = row["refused_at"] <= _MOST and row["one_block_of_1.01_refused"]
        holds = {
            f"refused at {granted:.4f} of the cap": granted >= _LEAST,
            f"granted more than {_MOST:.2f} of the cap": is_refused,
            f"the refusal was classified as {refusal!r}": refusal == FailureKind.DEFINITE.value,
            f"the process holds {held or 0.0:.4f} of its budget": held is None
            or _LEAST <= held <= _MOST,
        }
        broken += amiss(holds, f"budget {row['budget_mib']:.0f} MiB: ")
    untold = any(row["process_to_budget"] is None for row in rows)
    note = "the driver does not tell what a process holds: judged by the allocator alone"
    figures = {
        "granted_to_cap_least": min(row["granted_to_cap"] for row in rows),
        "refused_at_most": max(row["refused_at"] for row in rows),
    }
    return Outcome(figures=figures, rows=rows, broken=broken, notes=[note] * untold)


_MOST_MS = 100.0


def measure_recovery(machine: Machine) -> Row:
    scale = machine.scale
    budget_bytes, _ = machine.fitting(1, scale.large_budget_bytes)
    arguments = (scale.errors, machine.device, budget_bytes, scale.size)
    found = in_child(machine.watch, survive, *arguments)
    # With less memory, so that the step that finally fits is shorter.
    specs = machine.specs(
        1, budget_bytes // 4, size=scale.too_large_size, policy="classic", label="descent"
    )
    with crew_of(specs, machine.watch) as crew:
        report = crew.first[0].last
    ooms = [event.detail for event in report.events if event.name == "oom"]
    # The release of memory and the emergency product of each error.
    descent_ms = [1000.0 * float(detail["recovery_s"] or 0.0) for detail in ooms]
    ended = f"{report.verdict.value} {report.state.value}, {report.counts.steps_ok} steps"
    times = dict.fromkeys(("recovery_p50_ms", "recovery_p99_ms", "good_step_p50_ms"))
    return {
        "errors_asked": scale.errors, **times, **found, "budget_bytes": budget_bytes,
        "size": scale.size,
        "descent_from_size": scale.too_large_size, "descent_to_size": report.size,
        "descent_ended": ended, "descent_errors": len(ooms),
        "descent_kinds": sorted({str(detail["kind"]) for detail in ooms}),
        "descent_recovery_p50_ms": percentile(descent_ms, 0.5) if ooms else None,
        "descent_recovery_most_ms": max(descent_ms, default=None),
    }  # fmt: skip


def judge_recovery(found: Row) -> Outcome:
    errors, asked, p99_ms = found["errors"], found["errors_asked"], found["recovery_p99_ms"]
    ended, kinds = found["descent_ended"], found["descent_kinds"]
    size = f"size {found['descent_from_size']}"
    holds = {
        f"{errors} of {asked} errors were provoked and survived": (
            errors >= asked or found["unrecovered"]
        ),
        f"99 % of the recoveries took up to {p99_ms or 0.0:.1f} ms": p99_ms is None
        or p99_ms <= _MOST_MS,
        f"{size} was meant not to fit, and did": found["descent_errors"],
        f"from {size} the worker ended {ended}": ended == "ok RUNNING, 1 steps",
        f"from {size}: errors classified as {kinds}": set(kinds) <= {"definite"},
    }
    figures = {key: value for key, value in found.items() if key != "unrecovered"}
    return Outcome(figures=figures, broken=[*found["unrecovered"], *amiss(holds)])


_LEAST_HELD = 0.95
#: A process may exceed its budget this far without a note: the driver loads code of later kernels
#: outside the allocator and its cap.
_WORTH_TELLING = 1.01
_GOOD_END = f"{Verdict.OK.value} {WorkerState.RUNNING.value}: "


def measure_side_by_side(machine: Machine) -> Sequence[Row]:
    scale = machine.scale
    asked = [(3, scale.small_budget_bytes, "adaptive"), (7, scale.large_budget_bytes, "adaptive")]
    if not machine.quick:
        asked.insert(1, (7, scale.large_budget_bytes, "classic"))
    scenes = []
    for workers, asked_bytes, policy in asked:
        budget_bytes, scaled = machine.fitting(workers, asked_bytes)
        specs = machine.specs(workers, budget_bytes, policy=policy)
        scene: dict[str, Any] = {
            "what": f"{workers} x {asked_bytes / GIB:.2f} GiB, {policy}", "policy": policy,
            "workers": workers, "stands": (), "scaled": scaled, "died": None,
        }  # fmt: skip
        try:
            with crew_of(specs, machine.watch) as crew:
                turns = crew.turn(scale.side_s)
            scene["stands"] = [_stand(turn, budget_bytes) for turn in turns]
        except ChildDiedError as error:
            scene["died"] = str(error)
        scenes.append(scene)
    return scenes


def _stand(turn: Turn, budget_bytes: int) -> Row:
    last = turn.last
    cap_bytes = last.device.cap_bytes if last.device else 0
    reserved_bytes = last.memory.reserved_bytes if last.memory else 0
    used_bytes = turn.process_used_bytes
    reason = last.reason if last.state is not WorkerState.RUNNING else ""
    return {
        "slot": last.slot, "ended": f"{last.verdict.value} {last.state.value}: {reason}",
        "budget_mib": budget_bytes / MIB, "cap_mib": cap_bytes / MIB,
        "held_to_cap": reserved_bytes / cap_bytes if cap_bytes else 0.0,
        "process_to_budget": None if used_bytes is None else used_bytes / budget_bytes,
        "steps_ok": turn.counts.steps_ok, "steps_oom": turn.counts.steps_oom,
        "unrecovered": turn.counts.steps_error, "tflops": turn.flop_per_s / 1e12,
    }  # fmt: skip


def judge_side_by_side(scenes: Sequence[Row]) -> Outcome:
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    notes = [scene["scaled"] for scene in scenes if scene["scaled"] is not None]
    for scene in scenes:
        where, stands = scene["what"], scene["stands"]
        broken += [f"{where}: {scene['died']}"] * (scene["died"] is not None)
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
        summed = ("steps_ok", "steps_oom", "unrecovered", "tflops")
        least = {
            f"{key}_least": min((stand[key] for stand in stands), default=None)
            for key in ("cap_mib", "held_to_cap")
        }
        rows.append(
            {
                "workers": scene["workers"],
                "budget_mib": stands[0]["budget_mib"] if stands else None,
                "policy": scene["policy"], **least, "process_to_budget_most": most,
                **{key: sum(stand[key] for stand in stands) for key in summed},
            }
        )  # fmt: skip
        if most is not None and most > _WORTH_TELLING:
            notes.append(f"{where}: a process holds {most:.3f} of its budget")
    held = [row["held_to_cap_least"] for row in rows if row["held_to_cap_least"] is not None]
    died = sum(scene["died"] is not None for scene in scenes)
    figures = {"held_to_cap_least": min(held, default=None), "processes_died": died}
    return Outcome(figures=figures, rows=rows, broken=broken, notes=notes)


CHECKS = {
    "cap": Check(
        "granted up to 0.99 of the cap at the least, refused at 1.01 at the most, and the process "
        "holds its budget", measure_cap, judge_cap,
    ),
    "recovery": Check(
        f"every out-of-memory error is survived, 99 % of them within {_MOST_MS:.0f} ms",
        measure_recovery, judge_recovery,
    ),
    "side_by_side": Check(
        f"each worker holds {_LEAST_HELD:.0%} of its cap, no failure is left standing, no process "
        "ends", measure_side_by_side, judge_side_by_side,
    ),
}  # fmt: skip
