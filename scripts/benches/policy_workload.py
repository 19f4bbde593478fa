"""What a step of a made-up workload takes and needs, and a world: such a workload in a course of free memory.

A step of b items takes (half_items + b) / rate seconds and needs (fixed + per_item * b) bytes, give or take 1 %. Where
a signal wants it so, needs come in blocks and with a library's workspace that comes and goes with the size. Does not
imitate an allocator: no fragmentation, no cache, and no device that is slow to give memory back.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from workers.units import GIB

LARGEST = 8000
"""No size is larger; 16 GiB and more, above every level."""
RATE_PER_S = 10_000.0
"""Items per second of an endlessly large step."""
ITEM_BYTES = 2 * GIB / 1000
HALF_SPEED_ITEMS = {"precious": 1000, "saturating": 150}
"""By regime: the size that runs at half of the full rate; t0 = half_items / rate."""
WOBBLE = 0.01
BLOCK_BYTES = 2 * 2**20
"""torch's caching allocator takes large memory in blocks of 2 MiB."""
WORKSPACE = 0.05
"""What a library's workspace adds at the sizes for which it picks the algorithm that wants one."""
WORKSPACE_ITEMS = 64
"""So many neighbouring sizes share the library's choice."""

_DRAWS = 8192


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """One course, and the workload that meets it. Two worlds are the same only if they are one object."""

    name: str
    seed: int
    half_items: int
    """The size that runs at half of the rate."""
    rate_per_s: float
    duration_s: float
    times_s: Sequence[float]
    """When the level changes; the first is 0."""
    levels_bytes: Sequence[int]
    """What is available from the time at the same place on."""
    fixed_bytes: float
    wobble: Sequence[float]
    """Factor on the need of the n-th step, over and over."""
    workspace: Sequence[bool]
    """By size // `WORKSPACE_ITEMS`: whether the library wants its workspace."""
    samples_bytes: Sequence[int]
    """What is available at each whole second."""
    noise: Sequence[float]
    """Standard normal, for each whole second."""

    def step_s(self, size: int) -> float:
        """Return how long a step takes that fits."""
        return (self.half_items + size) / self.rate_per_s

    def need_bytes(self, size: int, step: int, *, blocks: bool) -> int:
        """Return what the given step (counted from 0) needs at this size, failed or not."""
        need = (self.fixed_bytes + ITEM_BYTES * size) * self.wobble[step % _DRAWS]
        if not blocks:
            return math.ceil(need)
        if self.workspace[size // WORKSPACE_ITEMS]:
            need *= 1 + WORKSPACE
        return math.ceil(need / BLOCK_BYTES) * BLOCK_BYTES

    def largest_that_fits(self, available_bytes: int, step: int, *, blocks: bool) -> int:
        """Return the largest size this step could have, 0 if none."""
        wobble = self.wobble[step % _DRAWS]
        if not blocks:
            return _whole((available_bytes / wobble - self.fixed_bytes) / ITEM_BYTES)
        available_bytes = available_bytes // BLOCK_BYTES * BLOCK_BYTES
        without = _whole((available_bytes / wobble - self.fixed_bytes) / ITEM_BYTES)
        having = _whole((available_bytes / wobble / (1 + WORKSPACE) - self.fixed_bytes) / ITEM_BYTES)
        while without > having:
            if not self.workspace[without // WORKSPACE_ITEMS]:
                return without
            without = without // WORKSPACE_ITEMS * WORKSPACE_ITEMS - 1
        return having


def world_of(
    name: str,
    points: Sequence[tuple[float, float]],
    duration_s: float,
    *,
    seed: int,
    regime: str = "precious",
    rate_per_s: float = RATE_PER_S,
) -> World:
    """Return the world of a course given as (second, available bytes), the first at 0."""
    draw = random.Random(f"{seed}/{name}/workload")  # noqa: S311 - a simulation, no secret
    times = [point[0] for point in points]
    levels = [int(point[1]) for point in points]
    samples: list[int] = []
    place = 0
    for second in range(math.ceil(duration_s) + 1):
        while place + 1 < len(times) and times[place + 1] <= second:
            place += 1
        samples.append(levels[place])
    return World(
        name=name,
        seed=seed,
        half_items=HALF_SPEED_ITEMS[regime],
        rate_per_s=rate_per_s,
        duration_s=duration_s,
        times_s=times,
        levels_bytes=levels,
        fixed_bytes=draw.uniform(0.2, 0.6) * GIB,
        wobble=array("d", (1 + draw.uniform(-WOBBLE, WOBBLE) for _ in range(_DRAWS))),
        workspace=[draw.random() < 0.5 for _ in range(LARGEST // WORKSPACE_ITEMS + 1)],
        samples_bytes=samples,
        noise=array("d", (draw.gauss(0.0, 1.0) for _ in samples)),
    )


def _whole(items: float) -> int:
    # A hair below, so that rounding never makes the oracle fail.
    return max(0, min(LARGEST, math.floor(items - 1e-6)))
