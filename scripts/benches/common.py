"""What every benchmark shares: its result, how it is shown, and the spec of a worker.

A result goes out twice: as a table for people on standard error and as one JSON object on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
            print_table(value)
        else:
            print(f"{key:>32}  {short(value)}", file=sys.stderr)
    for sentence in result.broken:
        print(f"BROKEN: {sentence}", file=sys.stderr)
    print(json.dumps({"schema": 1, "bench": result.bench, **result.figures, "broken": list(result.broken)}))
    return 1 if result.broken else 0


@contextlib.contextmanager
def own_stdout() -> Iterator[None]:
    """Send whatever is printed meanwhile to standard error: by children too, and by Ray, of the actors that end."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


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


def status_bytes(key: str) -> int:
    """Return one line of /proc/self/status, where the kernel counts in KiB: VmData is private writable memory."""
    with Path("/proc/self/status").open(encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; this benchmark needs Linux")


def judged(
    text: str, found: float | None, *, at_least: float | None = None, at_most: float | None = None
) -> dict[str, str]:
    """Return a row that says whether a target is met; a figure that is missing meets none."""
    met = found is not None and (at_least is None or found >= at_least) and (at_most is None or found <= at_most)
    return {
        "target": text,
        "asked": f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}",
        "found": "never" if found is None else f"{found:.4g}",
        "met": "yes" if met else "NO",
    }


def sized(device: str, budget_mib: float | None, size: int | None) -> tuple[int, int]:
    """Return the budget in bytes and the edge of the matrices; where they are not given, as much as a card's guide."""
    on_card = device == "cuda"
    return int((budget_mib or (3410 if on_card else 213)) * MIB), size or (8192 if on_card else 1024)


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


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of the same keys for people, to standard error."""
    cells = list(table(rows))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), file=sys.stderr)


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the heads and then the cells of each row."""
    heads = list(rows[0])
    yield heads
    for row in rows:
        yield [short(row[head]) for head in heads]


def short(value: object) -> str:
    """Return a value as people read it; a dash for what is not known."""
    if value is None:
        return "–"  # noqa: RUF001 - as in the health table
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
