"""Measures the job before anybody runs under pressure, and makes memory as precious to it as it is on a card.

How fast a step is by its size depends on the machine: the sweep over the tables on its bandwidth, the items also on
how fast it gives memory. So the tables are made as large as it takes for half of the full speed to lie at a given
share of the largest size, the throughput by size is told, and all contestants get the same job.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection

from benches.pressure_grounds import Ground, open_ground
from benches.pressure_jobs import STATE_BYTES_PER_ROW, Job, JobSpec
from workers.units import MIB

_HALF_SPEED_SHARE = 0.42
"""Of the largest size that fits: the size that runs at half of the speed of an endlessly large one. The simulator's
regime where memory is precious has it at 1000 items of 2 GiB, on levels up to 8 GiB."""

_LEAST_STATE, _MOST_STATE = 1 / 8, 3.0
"""Parameters, gradients and moments, as multiples of the memory of a step."""

_CPU_BYTES = 48 * MIB
"""Small, so that a step takes a tenth of a second and a minute has hundreds of them."""
_CARD_SHARE = 1 / 6
"""Of a card's memory: leaves room for the largest tables, two contexts and a desktop."""

_STEPS = 7
_SMALL_ITEMS = 16
_SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
"""Of the largest size that fits: where the throughput is measured."""
_LINE = (1 / 4, 1.0)
"""Of these, where footprint and time are taken for a line; small sizes take what the optimiser takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scouted:
    """How the job behaves here without pressure."""

    spec: JobSpec
    device_name: str
    fits: int
    """The largest size whose step takes no more than `spec.memory_bytes`."""
    fixed_bytes: float
    """A step takes so much, and `unit_bytes` an item."""
    unit_bytes: float
    fixed_s: float
    """A step lasts so long, and `unit_s` an item."""
    unit_s: float
    points: Sequence[Mapping[str, float]]
    """By size: items, items_per_s, step_ms, peak_mib."""

    def largest_within(self, limit_bytes: float) -> int:
        """Return the largest size whose step takes no more: between two measured sizes by interpolation.

        By one line for all it would be too large for little memory, where the optimiser's part hides the items'.
        """
        measured = [(point["items"], point["peak_mib"] * MIB) for point in self.points]
        for (few, less_bytes), (many, more_bytes) in pairwise(measured):
            if limit_bytes <= more_bytes:
                share = (limit_bytes - less_bytes) / max(1.0, more_bytes - less_bytes)
                return max(1, int(few + (many - few) * share))
        many, most_bytes = measured[-1]
        return int(many + (limit_bytes - most_bytes) / self.unit_bytes)


def scout(connection: Connection, device: str, memory_bytes: int | None) -> None:
    """Send a `Scouted`. Runs in a process of its own: on a card, what it holds is gone with it.

    Args:
        connection: Where it is sent.
        device: "cpu" or "cuda".
        memory_bytes: What a step may take; `None` for a share of the card that leaves room for the tables.

    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the bench's, which ends this
    memory_bytes = memory_bytes or _default_bytes(device)
    few, more, most = (
        max(16, int(memory_bytes * state / STATE_BYTES_PER_ROW)) for state in (_LEAST_STATE, 0.5, _MOST_STATE)
    )
    ground = open_ground(device, memory_bytes, most * STATE_BYTES_PER_ROW)

    def opened(rows: int) -> Job:
        return Job(JobSpec(device=device, memory_bytes=memory_bytes, rows=rows), ground)

    job = opened(more)
    items = _SMALL_ITEMS
    while (peak_bytes := job.step(items)) < memory_bytes / 4:
        items *= 2
    fits = int(memory_bytes / peak_bytes * items)
    unit_s = (_step_s(ground, job, fits) - _step_s(ground, job, fits // 4)) / (fits - fits // 4)
    more_s = _step_s(ground, job, _SMALL_ITEMS)
    del job
    per_row_s = (more_s - _step_s(ground, opened(few), _SMALL_ITEMS)) / (more - few)
    missing_s = _HALF_SPEED_SHARE * fits * unit_s - more_s
    rows = min(max(more + int(missing_s / max(per_row_s, 1e-12)), few), most)
    spec = JobSpec(device=device, memory_bytes=memory_bytes, rows=rows)
    connection.send(_measured(spec, ground, fits))


def _default_bytes(device: str) -> int:
    if device == "cpu":
        return _CPU_BYTES
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory * _CARD_SHARE)


def _measured(spec: JobSpec, ground: Ground, fits: int) -> Scouted:
    job = Job(spec, ground)
    job.step(fits)
    points = []
    for size in (max(1, int(share * fits)) for share in _SHARES):
        peak_bytes = statistics.median(job.step(size) for _ in range(3))
        step_s = _step_s(ground, job, size)
        points.append(
            {"items": size, "items_per_s": size / step_s, "step_ms": step_s * 1e3, "peak_mib": peak_bytes / MIB}
        )
    low, high = (points[_SHARES.index(share)] for share in _LINE)
    span = high["items"] - low["items"]
    unit_bytes = (high["peak_mib"] - low["peak_mib"]) * MIB / span
    unit_s = (high["step_ms"] - low["step_ms"]) / 1e3 / span
    fixed_bytes = high["peak_mib"] * MIB - unit_bytes * high["items"]
    return Scouted(
        spec=spec,
        device_name=ground.name,
        fits=int((spec.memory_bytes - fixed_bytes) / unit_bytes),
        fixed_bytes=fixed_bytes,
        unit_bytes=unit_bytes,
        fixed_s=max(0.0, high["step_ms"] / 1e3 - unit_s * high["items"]),
        unit_s=unit_s,
        points=points,
    )


def _step_s(ground: Ground, job: Job, items: int) -> float:
    """Return the median time of a few steps, the first one left out."""
    times_s = []
    for _ in range(1 + _STEPS):
        began_s = ground.clock_s()
        job.step(items)
        times_s.append(ground.clock_s() - began_s)
    return statistics.median(times_s[1:])
