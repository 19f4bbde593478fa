"""What every benchmark shares: its result, how it is shown, and the spec of a worker.

A result goes out twice: as a table for people on standard error and as one JSON object on standard output.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workers.settings import MemorySettings, WorkerSpec, WorkloadSpec
from workers.units import MIB

#: The guides' numbers, as cluster.yaml ships them; the floor scaled like a rehearsal's.
GUIDE = MemorySettings(
    first_fraction=0.20,
    retry_reduction=0.10,
    floor_bytes=100 * MIB // 16,
    size_decay=0.7,
    size_floor=256,
    batch_step=16,
    batch_floor=32,
    emergency_size=128,
    cleanup_every=15,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a benchmark found."""

    bench: str
    figures: Mapping[str, Any]
    """Flat, numbers with a unit suffix; rows of the table under `rounds`."""
    broken: Sequence[str] = ()
    """Properties that do not hold, in words; any makes the exit code 1."""


def show(result: Result) -> int:
    """Print the result and return the exit code."""
    for key, value in result.figures.items():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            _print_table(value)
        else:
            print(f"{key:>32}  {_short(value)}", file=sys.stderr)
    for sentence in result.broken:
        print(f"BROKEN: {sentence}", file=sys.stderr)
    print(json.dumps({"schema": 1, "bench": result.bench, **result.figures, "broken": list(result.broken)}))
    return 1 if result.broken else 0


def progress(text: str) -> None:
    """Tell a waiting person how far it is."""
    print(text, file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the extremes of a few rounds."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of all lie, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def lone_worker(
    *,
    budget_bytes: int,
    device: str = "cpu",
    name: str = "matmul",
    dtype: str = "fp32",
    size: int = 512,
    batch: int = 128,
    **memory: Any,  # noqa: ANN401 - fields of MemorySettings
) -> WorkerSpec:
    """Return the spec of a worker that has its device to itself."""
    return WorkerSpec(
        slot="bench/0",
        node="bench",
        device=device,
        budget_bytes=budget_bytes,
        card_budget_bytes=budget_bytes,
        memory_fraction=1.0,
        workers_on_host=1,
        duty=None,
        policy="classic",
        memory=replace(GUIDE, **memory),
        workload=WorkloadSpec(name=name, dtype=dtype, size=size, batch=batch, seed=0),
    )


def _print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    heads = list(rows[0])
    cells = [heads, *([_short(row[head]) for head in heads] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), file=sys.stderr)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
