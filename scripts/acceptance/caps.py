"""The cap: what a process capped at X is really granted, where it is refused, and what the system says it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from benches.common import status_bytes

from acceptance.crew import in_child
from acceptance.ground import Ground
from acceptance.outcome import Outcome, Row
from workers import oom
from workers.devices.base import Device
from workers.devices.opening import open_device
from workers.nvml import queries
from workers.settings import FailureKind, WorkerSpec
from workers.units import MIB

_LEAST, _MOST = 0.99, 1.01
MUST_HOLD = "granted up to 0.99 of the cap at the least, refused at 1.01 at the most, and the process holds its budget"

#: One block. CUDA's allocator maps blocks of 10 MiB and more by themselves, in multiples of 2 MiB, and smaller ones by
#: twenties; a processor's caps are small.
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
    used_now_bytes = queries.card_used_bytes(card) if on_card else None
    used_bytes = (
        queries.process_used_bytes(card)
        if on_card
        else device.info.context_bytes + status_bytes("VmData") - opened_bytes
    )
    return {
        "budget_mib": spec.budget_bytes / MIB,
        "context_mib": device.info.context_bytes / MIB,
        "cap_mib": cap_bytes / MIB,
        "granted_to_cap": granted_bytes / cap_bytes,
        "refused_at": (granted_bytes + segment_bytes) / cap_bytes,  # what it would have held with the next block
        "refusal": refusal,
        "one_block_of_1.01_refused": too_large_refused,
        # As the driver, or on a CPU the kernel, says.
        "process_to_budget": None if used_bytes is None else used_bytes / spec.budget_bytes,
        # By whomever; the driver takes some for its first client.
        "card_grown_mib": None
        if used_now_bytes is None or used_before_bytes is None
        else (used_now_bytes - used_before_bytes) / MIB,
    }


def _largest_left(device: Device, block_bytes: int, segment_bytes: int) -> torch.Tensor:
    """Take the most that fits in one piece where a block has just been freed, and less than another one is left."""
    device.release()
    for size_bytes in range(2 * block_bytes - segment_bytes, block_bytes, -segment_bytes):
        with contextlib.suppress(RuntimeError):
            return torch.empty(size_bytes, dtype=torch.uint8, device=device.torch_device)
    return torch.empty(block_bytes, dtype=torch.uint8, device=device.torch_device)


def measure(ground: Ground) -> Sequence[Row]:
    """Run up to the wall under each budget."""
    budgets = [ground.scale.large_budget_bytes, *([] if ground.quick else [ground.scale.small_budget_bytes])]
    fitting = [ground.fitting(1, budget_bytes)[0] for budget_bytes in budgets]
    return [in_child(ground.watch, up_to_the_wall, *ground.specs(1, budget_bytes)) for budget_bytes in fitting]


def judge(rows: Sequence[Row]) -> Outcome:
    """Say whether each cap was kept to one percent."""
    broken = []
    for row in rows:
        who = f"budget {row['budget_mib']:.0f} MiB"
        held = row["process_to_budget"]
        if row["granted_to_cap"] < _LEAST:
            broken.append(f"{who}: refused at {row['granted_to_cap']:.4f} of the cap")
        if row["refused_at"] > _MOST or not row["one_block_of_1.01_refused"]:
            broken.append(f"{who}: granted more than {_MOST:.2f} of the cap")
        if row["refusal"] != FailureKind.DEFINITE.value:
            broken.append(f"{who}: the refusal was classified as {row['refusal']!r}")
        if held is not None and not _LEAST <= held <= _MOST:
            broken.append(f"{who}: the process holds {held:.4f} of its budget")
    untold = any(row["process_to_budget"] is None for row in rows)
    return Outcome(
        figures={
            "granted_to_cap_least": min(row["granted_to_cap"] for row in rows),
            "refused_at_most": max(row["refused_at"] for row in rows),
        },
        rows=rows,
        broken=broken,
        notes=["the driver does not tell what a process holds: judged by the allocator alone"] if untold else [],
    )
