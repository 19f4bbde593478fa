"""How many workers and bytes a node of the configuration holds, and the refusal of what cannot fit,
with the sum.

Does not cover what each worker gets (`core.placement`). Pure: no clock, no files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from orchestrator.config.gpu_specs import PROFILES
from orchestrator.config.schema import NodeConfig
from workers.units import GIB

#: Up to here a card holds exactly as many workers as planned. Beyond, Ray's steps are too coarse:
#: of 150 planned workers each gets 66 steps, and 151 of those fit.
MAX_WORKERS_PER_CARD = 100

#: Edge of the square matrices where neither the workload nor the node says: the 3070 guide's size.
DEFAULT_SIZE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Overbooked:
    """Workers of one card ask for more than it may give: the sum, and what would fit."""

    text: str
    valid: str


def workers_per_card(workers: int, gpus: int) -> int:
    """Return how many workers share the fullest card; all of them where there is none."""
    return -(-workers // gpus) if gpus else workers


def card_total_gib(node: NodeConfig) -> float | None:
    """Return what one card of the node shows, or `None` where nothing says so."""
    if node.vram_gib is not None:
        return node.vram_gib
    profile = PROFILES.get(node.gpu) if node.gpus else None
    return None if profile is None else profile.shown_gib


def budget_bytes(node: NodeConfig) -> int:
    """Return the bytes of one worker, rounded down so that a sum never exceeds what
    was asked for.
    """
    return int(node.vram_per_worker_gib * GIB)


def overbooked(node: NodeConfig) -> Overbooked | None:
    """Return the sum that does not fit on a card of the node, or `None` when all fits or nothing is
    known.
    """
    total_gib = card_total_gib(node)
    if total_gib is None:
        return None
    each_bytes = budget_bytes(node)
    allowed_bytes = round(node.memory_fraction * total_gib * GIB)
    shared_by = workers_per_card(node.workers, node.gpus)
    if shared_by * each_bytes <= allowed_bytes:
        return None
    where = f"a {node.gpu}" if node.gpus else "its memory"
    asked = f"{shared_by} workers" if shared_by > 1 else "1 worker"
    asked += f" on the fullest of {node.gpus} cards" if node.gpus > 1 else ""
    text = (
        f"{asked} x {node.vram_per_worker_gib:.10g} GiB = {shared_by * each_bytes / GIB:.10g} GiB, "
        f"but {node.memory_fraction:.10g} of the {total_gib:.10g} GiB of {where} is "
        f"{allowed_bytes / GIB:.10g} GiB"
    )
    fitting = allowed_bytes // each_bytes * (node.gpus or 1)
    if allowed_bytes < shared_by:
        return Overbooked(text=text, valid="a larger memory_fraction")
    share_gib = allowed_bytes / shared_by / GIB
    # Rounded down to two digits after the point, or three in all.
    step_gib = 10.0 ** min(-2, math.floor(math.log10(share_gib)) - 2)
    valid = f"vram_per_worker_gib <= {math.floor(share_gib / step_gib) * step_gib:.6g}"
    # Each card needs a worker, so fewer workers than cards is not a valid plan.
    if fitting >= max(1, node.gpus):
        valid = f"at most {fitting} worker{'s' if fitting > 1 else ''}, or {valid}"
    return Overbooked(text=text, valid=valid)
