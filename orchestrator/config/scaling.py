"""Makes a configuration small enough to rehearse on one machine, and lists every number that changed.

Covers the arithmetic: bytes shrink by the scale, sizes by its square root, because a matrix of half the edge
takes a quarter of the bytes. Does not cover how the rehearsal's nodes are started. Shares, batches and CPUs stay
as they are, so that placement and back-off work as in the real run. Pure: no clock, no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.config.capacity import DEFAULT_SIZE, card_total_gib
from orchestrator.errors import UsageError
from workers.units import GIB, MIB

if TYPE_CHECKING:
    from orchestrator.config.schema import Config, NodeConfig

#: A quarter of the edge of every matrix: both reference PCs then fit into 2 GiB of one ordinary machine.
REHEARSAL_SCALE = 1 / 16

#: Sizes stay multiples of this, which every tensor core's tile divides.
SIZE_STEP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLine:
    """One number that changed, for people."""

    key: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A configuration made small, and how."""

    config: Config
    scale: float
    """What was really used: what was asked for, or less where memory is short."""
    lines: tuple[ScaleLine, ...]


def scale_config(config: Config, scale: float, memory_limit_bytes: int | None) -> Scaled:
    """Return `config` with bytes times `scale`, and less where all workers together would exceed the limit.

    Args:
        config: as loaded, overrides included.
        scale: above 0, at most 1.
        memory_limit_bytes: what the budgets of all workers of all nodes may add up to; `None` for no limit.

    Raises:
        UsageError: the scale is not in its range, the limit is not above zero, or a worker would get less than 1 MiB.
    """
    if not 0 < scale <= 1:
        raise UsageError(f"a scale of {scale:g} is not possible; valid: above 0, at most 1, such as 0.0625")
    if memory_limit_bytes is not None and memory_limit_bytes <= 0:
        raise UsageError(f"a memory limit of {memory_limit_bytes} bytes leaves nothing; valid: more than 0 bytes")
    used = _fitting(config, scale, memory_limit_bytes)
    smallest_bytes = min(node.vram_per_worker_gib for node in config.nodes.values()) * used * GIB
    if smallest_bytes < MIB:
        raise UsageError(
            f"at a scale of {used:.2g} a worker gets less than 1 MiB; valid: a larger scale or memory limit"
        )
    data = config.model_dump()
    if used != 1:
        _shrink(data, config, used)
    scaled = type(config).model_validate(data)
    lines = [*_lowered(scale, used, memory_limit_bytes), *_changes(config, scaled)]
    return Scaled(config=scaled, scale=used, lines=tuple(lines))


def scaled_size(size: int, scale: float, at_least: int) -> int:
    """Return the edge whose matrix takes about `scale` of the bytes: a multiple of 64, never above `size`."""
    steps = round(size * math.sqrt(scale) / SIZE_STEP)
    return min(size, max(SIZE_STEP, steps * SIZE_STEP, at_least))


def _fitting(config: Config, scale: float, memory_limit_bytes: int | None) -> float:
    total_bytes = sum(node.workers * node.vram_per_worker_gib * GIB for node in config.nodes.values())
    if memory_limit_bytes is None or total_bytes * scale <= memory_limit_bytes:
        return scale
    return memory_limit_bytes / total_bytes


def _shrink(data: dict[str, Any], config: Config, scale: float) -> None:
    """Put the smaller numbers into `data`, the dump of `config`."""
    memory = config.memory
    # The emergency product must stay the smallest thing a worker can run.
    floor = scaled_size(memory.size_floor, scale, memory.emergency_size)
    data["memory"]["size_floor"] = floor
    data["memory"]["leave_free_mib"] = memory.leave_free_mib * scale
    data["memory"]["floor_mib"] = max(memory.floor_mib * scale, 1 / MIB)
    if config.workload.size is not None:
        data["workload"]["size"] = scaled_size(config.workload.size, scale, floor)
    for name, node in config.nodes.items():
        _shrink_node(data["nodes"][name], node, config, scale, floor)


def _shrink_node(data: dict[str, Any], node: NodeConfig, config: Config, scale: float, floor: int) -> None:
    data["vram_per_worker_gib"] = node.vram_per_worker_gib * scale
    total_gib = card_total_gib(node)
    # Values from the card's profile must be written into the configuration: the profile itself does not shrink.
    data["vram_gib"] = None if total_gib is None else total_gib * scale
    if node.size is not None or config.workload.size is None:
        data["size"] = scaled_size(node.size or DEFAULT_SIZE, scale, floor)


def _lowered(asked: float, used: float, memory_limit_bytes: int | None) -> Iterator[ScaleLine]:
    if used != asked and memory_limit_bytes is not None:
        why = f"{used:.4g}, so that all workers fit into {_bytes_text(memory_limit_bytes)}"
        yield ScaleLine(key="scale", before=f"{asked:.4g}", after=why)


def _changes(before: Config, after: Config) -> Iterator[ScaleLine]:
    """Yield a line for every number that is not what it was."""
    for name, node in before.nodes.items():
        key, small = f"nodes.{name}", after.nodes[name]
        yield from _line(f"{key}.vram_per_worker_gib", node.vram_per_worker_gib, small.vram_per_worker_gib, GIB)
        yield from _line(f"{key}.vram_gib", card_total_gib(node), small.vram_gib, GIB)
        yield from _line(f"{key}.size", node.size or DEFAULT_SIZE, small.size or DEFAULT_SIZE, None)
    yield from _line("workload.size", before.workload.size, after.workload.size, None)
    yield from _line("memory.floor_mib", before.memory.floor_mib, after.memory.floor_mib, MIB)
    yield from _line("memory.leave_free_mib", before.memory.leave_free_mib, after.memory.leave_free_mib, MIB)
    yield from _line("memory.size_floor", before.memory.size_floor, after.memory.size_floor, None)


def _line(key: str, before: float | None, after: float | None, unit_bytes: int | None) -> Iterator[ScaleLine]:
    """Yield the line of one number, in bytes where it has a unit; nothing where it did not change."""
    if before is None or after is None or before == after:
        return
    if unit_bytes is None:
        yield ScaleLine(key=key, before=str(before), after=str(after))
    else:
        yield ScaleLine(key=key, before=_bytes_text(before * unit_bytes), after=_bytes_text(after * unit_bytes))


def _bytes_text(count: float) -> str:
    """Return bytes for people, with three or four digits."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / MIB:.0f} MiB" if count >= 100 * MIB else f"{count / MIB:.3g} MiB"
