"""Makes a configuration small enough to rehearse on one machine, and lists every number that
changed.

Bytes shrink by the scale, sizes by its square root, because a matrix of half the edge takes a
quarter of the bytes. Shares, batches and CPUs stay, so that placement and back-off work as in the
real run. Starts nothing. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.config.schema import DEFAULT_SIZE, Config, MemoryConfig
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


def scale_config(
    config: Config, scale: float, memory_limit_bytes: int | None, *, in_fp32: bool = False
) -> Scaled:
    """Return `config` with bytes times `scale`, and less where the budgets of all workers would
    exceed the limit.

    `in_fp32`: products of 16-bit numbers become products of fp32 in as many bytes. A matrix of fp32
    takes twice the bytes, so each edge shrinks by the root of two.

    Raises:
        UsageError: a worker would get less than 1 MiB.
    """
    nodes = config.nodes.values()
    total_bytes = sum(node.workers * node.vram_per_worker_gib * GIB for node in nodes)
    used, lines = scale, []
    if memory_limit_bytes is not None and total_bytes * scale > memory_limit_bytes:
        used = memory_limit_bytes / total_bytes
        fitting = f"so that all workers fit into {_text(memory_limit_bytes)}"
        lines.append(f"scale: {scale:.4g} -> {used:.4g}, {fitting}")
    if min(node.vram_per_worker_gib for node in nodes) * used * GIB < MIB:
        raise UsageError(f"at a scale of {used:.2g} a worker gets less than 1 MiB of what is free")
    if used == 1 and not in_fp32:
        return Scaled(config=config, scale=used, lines=())
    # Values from the card's profile are written out: the profile itself does not shrink.
    before, small = _written_out(config), _written_out(config)
    _shrink(small, config.memory, used)
    if in_fp32 and _widen(small):
        lines.append("products in fp32: sizes x 0.71, the same bytes")
    lines += _changes("", before, small)
    return Scaled(config=Config.model_validate(small), scale=used, lines=tuple(lines))


def scaled_size(size: int, scale: float, at_least: int) -> int:
    """Return the edge whose matrix takes about `scale` of the bytes: a multiple of 64, never above
    `size`.
    """
    steps = round(size * math.sqrt(scale) / SIZE_STEP)
    return min(size, max(SIZE_STEP, steps * SIZE_STEP, at_least))


def _written_out(config: Config) -> dict[str, Any]:
    """Return the configuration as data, with what a node leaves to its card and to the default."""
    data = config.model_dump()
    for name, node in config.nodes.items():
        data["nodes"][name]["vram_gib"] = node.card_total_gib
        if config.workload.size is None:
            data["nodes"][name]["size"] = node.size or DEFAULT_SIZE
    return data


def _shrink(data: dict[str, Any], memory: MemoryConfig, scale: float) -> None:
    """Shrink all bytes and edges of a configuration."""
    # The emergency product must stay the smallest thing a worker can run.
    floor = scaled_size(memory.size_floor, scale, memory.emergency_size)
    data["memory"]["size_floor"] = floor
    data["memory"]["leave_free_mib"] *= scale
    data["memory"]["floor_mib"] = max(memory.floor_mib * scale, 1 / MIB)
    for section in (data["workload"], *data["nodes"].values()):
        if section["size"] is not None:
            section["size"] = scaled_size(section["size"], scale, floor)
    for node in data["nodes"].values():
        node["vram_per_worker_gib"] *= scale
        node["vram_gib"] = None if node["vram_gib"] is None else node["vram_gib"] * scale


def _widen(data: dict[str, Any]) -> bool:
    """Have products of 16-bit numbers computed in fp32, in as many bytes; say whether any are."""
    usual, changed = data["workload"]["dtype"], False
    for section in (data["workload"], *data["nodes"].values()):
        if (section["dtype"] or usual) in _HALVES:
            changed, section["dtype"] = True, section["dtype"] and "fp32"
            if section["size"] is not None:
                section["size"] = scaled_size(section["size"], 0.5, data["memory"]["size_floor"])
    return changed


def _changes(key: str, before: Any, after: Any) -> Iterator[str]:  # noqa: ANN401 - plain data
    """Yield a line for each number that differs."""
    if isinstance(before, dict):
        for name, value in before.items():
            yield from _changes(f"{key}.{name}" if key else name, value, after[name])
    elif before != after:
        unit_bytes = GIB if key.endswith("_gib") else MIB
        has_unit = key.endswith(("_gib", "_mib"))
        texts = [_text(value * unit_bytes) if has_unit else str(value) for value in (before, after)]
        yield f"{key}: {' -> '.join(texts)}"


def _text(count: float) -> str:
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / MIB:.0f} MiB" if count >= 100 * MIB else f"{count / MIB:.3g} MiB"
