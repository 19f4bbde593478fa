"""Makes a configuration small enough to rehearse on one machine, and lists every number that
changed.

Bytes shrink by the scale, sizes by its square root, because a matrix of half the edge takes a
quarter of the bytes. Shares, batches and CPUs stay, so that placement and back-off work as in the
real run. Starts nothing. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from orchestrator.config.capacity import DEFAULT_SIZE, card_total_gib
from orchestrator.config.schema import Config
from orchestrator.errors import UsageError
from workers.units import GIB, MIB

#: A quarter of the edge of every matrix: both reference PCs then fit into 2 GiB of one ordinary
#: machine.
REHEARSAL_SCALE = 1 / 16

#: Number types of two bytes.
_HALVES = frozenset({"fp16", "bf16"})

#: Sizes stay multiples of this, which every tensor core's tile divides.
SIZE_STEP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A configuration made small, and how."""

    config: Config
    scale: float
    """What was really used: what was asked for, or less where memory is short."""
    lines: tuple[str, ...]
    """Each number that changed, as `nodes.pc1.size: 8192 -> 2048`."""


def scale_config(config: Config, scale: float, memory_limit_bytes: int | None) -> Scaled:
    """Return `config` with bytes times `scale`, and less where the budgets of all workers would
    exceed the limit.

    Raises:
        UsageError: the scale is not above 0 and at most 1, the limit is not above 0, or a worker
            would get less than 1 MiB.
    """
    if not 0 < scale <= 1:
        raise UsageError(
            f"a scale of {scale:g} is not possible; valid: above 0, at most 1, such as 0.0625"
        )
    if memory_limit_bytes is not None and memory_limit_bytes <= 0:
        raise UsageError(
            f"a memory limit of {memory_limit_bytes} bytes leaves nothing; valid: more than 0 bytes"
        )
    used, total_bytes = (
        scale,
        sum(node.workers * node.vram_per_worker_gib * GIB for node in config.nodes.values()),
    )
    if memory_limit_bytes is not None and total_bytes * scale > memory_limit_bytes:
        used = memory_limit_bytes / total_bytes
    smallest_bytes = min(node.vram_per_worker_gib for node in config.nodes.values()) * used * GIB
    if smallest_bytes < MIB:
        raise UsageError(
            f"at a scale of {used:.2g} a worker gets less than 1 MiB; valid: a larger scale or "
            "memory limit"
        )
    scaled = config if used == 1 else Config.model_validate(_shrunk(config, used))
    lines = []
    if used != scale and memory_limit_bytes is not None:
        fitting = f"so that all workers fit into {_text(memory_limit_bytes, 1)}"
        lines.append(f"scale: {scale:.4g} -> {used:.4g}, {fitting}")
    after = _numbers(scaled)
    for key, (number, unit_bytes) in _numbers(config).items():
        smaller, _ = after[key]
        if number is not None and smaller is not None and smaller != number:
            lines.append(f"{key}: {_text(number, unit_bytes)} -> {_text(smaller, unit_bytes)}")
    return Scaled(config=scaled, scale=used, lines=tuple(lines))


def in_fp32(config: Config) -> Config | None:
    """Return `config` with products of 16-bit numbers made products of fp32 in as many bytes;
    `None` without any.

    A matrix of fp32 takes twice the bytes, so each edge shrinks by the root of two.
    """
    data, floor, changed = config.model_dump(), config.memory.size_floor, False
    for name, node in config.nodes.items():
        if (node.dtype or config.workload.dtype) in _HALVES:
            changed = True
            small = data["nodes"][name]
            small["dtype"] = None if node.dtype is None else "fp32"
            if node.size is not None or config.workload.size is None:
                small["size"] = scaled_size(node.size or DEFAULT_SIZE, 0.5, floor)
    if config.workload.dtype in _HALVES:
        data["workload"]["dtype"] = "fp32"
        if config.workload.size is not None:
            data["workload"]["size"] = scaled_size(config.workload.size, 0.5, floor)
    return Config.model_validate(data) if changed else None


def scaled_size(size: int, scale: float, at_least: int) -> int:
    """Return the edge whose matrix takes about `scale` of the bytes: a multiple of 64, never above
    `size`.
    """
    steps = round(size * math.sqrt(scale) / SIZE_STEP)
    return min(size, max(SIZE_STEP, steps * SIZE_STEP, at_least))


def _shrunk(config: Config, scale: float) -> dict[str, Any]:
    data, memory = config.model_dump(), config.memory
    # The emergency product must stay the smallest thing a worker can run.
    floor = scaled_size(memory.size_floor, scale, memory.emergency_size)
    data["memory"]["size_floor"] = floor
    data["memory"]["leave_free_mib"] = memory.leave_free_mib * scale
    data["memory"]["floor_mib"] = max(memory.floor_mib * scale, 1 / MIB)
    if config.workload.size is not None:
        data["workload"]["size"] = scaled_size(config.workload.size, scale, floor)
    for name, node in config.nodes.items():
        small = data["nodes"][name]
        small["vram_per_worker_gib"] = node.vram_per_worker_gib * scale
        total_gib = card_total_gib(node)
        # Values from the card's profile must be written into the configuration: the profile itself
        # does not shrink.
        small["vram_gib"] = None if total_gib is None else total_gib * scale
        if node.size is not None or config.workload.size is None:
            small["size"] = scaled_size(node.size or DEFAULT_SIZE, scale, floor)
    return data


def _numbers(config: Config) -> dict[str, tuple[float | None, int | None]]:
    """Return what may shrink, by its key: the number, and the bytes of its unit or `None` for an
    edge.
    """
    memory = config.memory
    found: dict[str, tuple[float | None, int | None]] = {}
    for name, node in config.nodes.items():
        found[f"nodes.{name}.vram_per_worker_gib"] = (node.vram_per_worker_gib, GIB)
        found[f"nodes.{name}.vram_gib"] = (card_total_gib(node), GIB)
        found[f"nodes.{name}.size"] = (node.size or DEFAULT_SIZE, None)
    return {
        **found,
        "workload.size": (config.workload.size, None),
        "memory.floor_mib": (memory.floor_mib, MIB),
        "memory.leave_free_mib": (memory.leave_free_mib, MIB),
        "memory.size_floor": (memory.size_floor, None),
    }


def _text(number: float, unit_bytes: int | None) -> str:
    if unit_bytes is None:
        return str(number)
    count = number * unit_bytes
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / MIB:.0f} MiB" if count >= 100 * MIB else f"{count / MIB:.3g} MiB"
