"""The cap: what a process capped at X is really granted, where it is refused, and what the system says it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from acceptance.crew import in_child
from acceptance.ground import MIB, Ground
from acceptance.outcome import Outcome
from workers import oom
from workers.devices.base import Device
from workers.devices.opening import open_device
from workers.nvml import queries
from workers.settings import FailureKind, WorkerSpec

_LEAST, _MOST = 0.99, 1.01
MUST_HOLD = "granted up to 0.99 of the cap at the least, refused at 1.01 at the most, and the process holds its budget"

#: One block. CUDA's allocator maps blocks of 10 MiB and more by themselves, in multiples of 2 MiB, and smaller ones by
#: twenties; a processor's caps are small.
_BLOCK_BYTES = {"cuda": 10 * MIB, "cpu": MIB // 4}
_SEGMENT_BYTES = {"cuda": 2 * MIB, "cpu": MIB // 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wall:
    """One process that took all it got."""

    budget_bytes: int
    cap_bytes: int
    context_bytes: int
    granted_bytes: int
    """Held by the allocator when the next block was refused."""
    refused_bytes: int
    """What it would have held with that block."""
    refusal: str
    """What the failure was classified as."""
    too_large_refused: bool
    """One block of 1.01 of the cap, with nothing else there."""
    process_used_bytes: int | None
    """What the driver, or on a CPU the kernel, says of the whole process."""
    card_grown_bytes: int | None
    """What the card's use grew by meanwhile, by whomever; the driver takes some for its first client."""


def up_to_the_wall(spec: WorkerSpec) -> Wall:
    """Take blocks until one is refused. The body of a child."""
    card = queries.visible_card()
    used_before_bytes = queries.card_used_bytes(card) if spec.device == "cuda" else None
    device = open_device(spec)
    opened_bytes = _data_bytes()
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
                blocks.append(torch.empty(block_bytes, dtype=torch.uint8, device=device.torch_device))
            except RuntimeError as error:
                refusal = oom.classify(error).kind.value
            if len(blocks) * block_bytes > 2 * cap_bytes:
                refusal = "none"  # nothing holds it: better found out here than by the whole machine
        if blocks and segment_bytes < block_bytes:
            blocks.pop()
            blocks.append(_largest_left(device, block_bytes, segment_bytes))
    granted_bytes = device.held_bytes()
    device.clear_pending_error()
    device.emergency()  # raises if the device does not answer
    card_grown_bytes = None
    if spec.device == "cuda":
        used_bytes = queries.process_used_bytes(card)
        used_now_bytes = queries.card_used_bytes(card)
        if used_now_bytes is not None and used_before_bytes is not None:
            card_grown_bytes = used_now_bytes - used_before_bytes
    else:
        used_bytes = device.info.context_bytes + _data_bytes() - opened_bytes
    return Wall(
        budget_bytes=spec.budget_bytes,
        cap_bytes=cap_bytes,
        context_bytes=device.info.context_bytes,
        granted_bytes=granted_bytes,
        refused_bytes=granted_bytes + segment_bytes,
        refusal=refusal,
        too_large_refused=too_large_refused,
        process_used_bytes=used_bytes,
        card_grown_bytes=card_grown_bytes,
    )


def _largest_left(device: Device, block_bytes: int, segment_bytes: int) -> torch.Tensor:
    """Take the most that fits in one piece where a block has just been freed, and less than another one is left."""
    device.release()
    for size_bytes in range(2 * block_bytes - segment_bytes, block_bytes, -segment_bytes):
        with contextlib.suppress(RuntimeError):
            return torch.empty(size_bytes, dtype=torch.uint8, device=device.torch_device)
    return torch.empty(block_bytes, dtype=torch.uint8, device=device.torch_device)


def measure(ground: Ground) -> list[Wall]:
    """Run up to the wall under each budget."""
    budgets = [ground.scale.large_budget_bytes]
    if not ground.quick:
        budgets.append(ground.scale.small_budget_bytes)
    walls = []
    for budget_bytes in budgets:
        fits, _ = ground.fitting(1, budget_bytes)
        (spec,) = ground.specs(1, fits)
        walls.append(in_child(ground.watch, up_to_the_wall, spec))
    return walls


def judge(walls: Sequence[Wall]) -> Outcome:
    """Say whether each cap was kept to one percent."""
    rows: list[dict[str, Any]] = []
    broken = []
    for wall in walls:
        granted, refused = wall.granted_bytes / wall.cap_bytes, wall.refused_bytes / wall.cap_bytes
        held = None if wall.process_used_bytes is None else wall.process_used_bytes / wall.budget_bytes
        who = f"budget {wall.budget_bytes / MIB:.0f} MiB"
        rows.append(
            {
                "budget_mib": wall.budget_bytes / MIB,
                "context_mib": wall.context_bytes / MIB,
                "cap_mib": wall.cap_bytes / MIB,
                "granted_to_cap": granted,
                "refused_at": refused,
                "refusal": wall.refusal,
                "one_block_of_1.01_refused": wall.too_large_refused,
                "process_to_budget": held,
                "card_grown_mib": None if wall.card_grown_bytes is None else wall.card_grown_bytes / MIB,
            }
        )
        if granted < _LEAST:
            broken.append(f"{who}: refused at {granted:.4f} of the cap")
        if refused > _MOST or not wall.too_large_refused:
            broken.append(f"{who}: granted more than {_MOST:.2f} of the cap")
        if wall.refusal != FailureKind.DEFINITE.value:
            broken.append(f"{who}: the refusal was classified as {wall.refusal!r}")
        if held is not None and not _LEAST <= held <= _MOST:
            broken.append(f"{who}: the process holds {held:.4f} of its budget")
    notes = []
    if any(wall.process_used_bytes is None for wall in walls):
        notes.append("the driver does not tell what a process holds: judged by the allocator alone")
    return Outcome(
        check="cap",
        must_hold=MUST_HOLD,
        figures={
            "granted_to_cap_least": min(row["granted_to_cap"] for row in rows),
            "refused_at_most": max(row["refused_at"] for row in rows),
        },
        rows=rows,
        broken=broken,
        notes=notes,
    )


def check(ground: Ground) -> Outcome:
    """Measure and judge."""
    return judge(measure(ground))


def _data_bytes() -> int:
    """Private writable memory of this process, VmData; 0 where there is no /proc, and no CPU device either."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), 0)
