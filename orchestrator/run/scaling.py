"""Makes a configuration small enough to rehearse on one machine.

Bytes shrink by the scale, edges by its square root: a matrix of half the edge takes a quarter of
the bytes. Shares, batches and CPUs stay, so that placement and back-off work as in the real run.
Starts nothing. Pure.
"""

from __future__ import annotations

import math
from typing import Any

from orchestrator.config.schema import DEFAULT_SIZE, Config, MemoryConfig
from orchestrator.errors import UsageError
from workers.units import GIB, MIB

#: A quarter of the edge of every matrix: both reference PCs then fit into 2 GiB of RAM.
REHEARSAL_SCALE = 1 / 16

#: Number types of two bytes.
_HALVES = frozenset({"fp16", "bf16"})

#: Sizes stay multiples of this, which the tile of every tensor core divides.
SIZE_STEP = 64


def scale_config(
    config: Config, scale: float, memory_limit_bytes: int | None, *, in_fp32: bool = False
) -> tuple[Config, float]:
    """Return `config` with its bytes multiplied, and by how much: by `scale`, or less if the
    budgets of all workers would exceed the limit.

    `in_fp32`: products of 16-bit numbers become products in fp32 with as many bytes. A matrix of
    fp32 takes twice the bytes, so each edge shrinks by the root of two.

    Raises:
        UsageError: A worker would get less than 1 MiB.
    """
    nodes = config.nodes.values()
    total_bytes = sum(node.workers * node.vram_per_worker_gib * GIB for node in nodes)
    used = scale
    if memory_limit_bytes is not None:
        used = min(scale, memory_limit_bytes / total_bytes)
    if min(node.vram_per_worker_gib for node in nodes) * used * GIB < MIB:
        raise UsageError(f"at a scale of {used:.2g} a worker gets less than 1 MiB of what is free")
    if used == 1 and not in_fp32:
        return config, used
    # Values from the card's profile are written out, since the profile itself does not shrink.
    small = _written_out(config)
    _shrink(small, config.memory, used)
    if in_fp32:
        _widen(small)
    return Config.model_validate(small), used


def scaled_size(size: int, scale: float, at_least: int) -> int:
    """Return the edge whose matrix takes about `scale` of the bytes: a multiple of 64, at most
    `size`.
    """
    steps = round(size * math.sqrt(scale) / SIZE_STEP)
    return min(size, max(SIZE_STEP, steps * SIZE_STEP, at_least))


def _written_out(config: Config) -> dict[str, Any]:
    """Return the configuration as data, with the values from the card's profile and the default."""
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


def _widen(data: dict[str, Any]) -> None:
    """Replace 16-bit products by products in fp32 of as many bytes."""
    usual = data["workload"]["dtype"]
    for section in (data["workload"], *data["nodes"].values()):
        if (section["dtype"] or usual) in _HALVES:
            section["dtype"] = section["dtype"] and "fp32"
            if section["size"] is not None:
                section["size"] = scaled_size(section["size"], 0.5, data["memory"]["size_floor"])
