"""Code that benchmarks share: results and their output, statistics, turns, child processes, and the
spec of a worker.

A result is printed twice: as tables on standard error, and as one JSON object on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from workers.messages import Orders, Status, StepCounts
from workers.settings import MemorySettings, WorkerSpec, WorkloadSpec
from workers.units import MIB

if TYPE_CHECKING:  # the import loads torch
    from workers.engine.engine import Engine

_Measured = TypeVar("_Measured")

ROOT = Path(__file__).resolve().parents[2]
#: Limit for a process to start, and to end after its time is over.
PATIENCE_S = 300.0

#: The guides' numbers, as cluster.yaml ships them; the floor is scaled as in a rehearsal.
GUIDE = MemorySettings(
    first_fraction=0.20, retry_reduction=0.10, floor_bytes=100 * MIB // 16, size_decay=0.7,
    size_floor=256, batch_step=16, batch_floor=32, emergency_size=128, cleanup_every=15,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a benchmark: figures with a unit suffix, lists of rows, and a sentence for each
    broken property.
    """

    bench: str
    figures: Mapping[str, Any]
    broken: Sequence[str] = ()


def show(result: Result) -> int:
    print_figures(result.figures)
    for sentence in result.broken:
        print(f"BROKEN: {sentence}", file=sys.stderr)
    output = {"schema": 1, "bench": result.bench, **result.figures, "broken": list(result.broken)}
    print(json.dumps(output))
    return 1 if result.broken else 0


def print_figures(figures: Mapping[str, Any]) -> None:
    """Print figures, and lists of rows as tables, to standard error."""
    for key, value in figures.items():
        if not (isinstance(value, Sequence) and value and isinstance(value[0], Mapping)):
            if not isinstance(value, tuple):
                print(f"{key:>32}  {short(value)}", file=sys.stderr)
            continue
        heads = list(value[0])
        lines = [heads, *([short(row[head]) for head in heads] for row in value)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            print("  ".join(cells), file=sys.stderr)


def short(value: object) -> str:
    """Format a value for people; an unknown value is a dash."""
    if value is None:
        return "–"  # noqa: RUF001 - as in the health table
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextlib.contextmanager
def own_stdout() -> Iterator[None]:
    """Send output of the block to standard error, also that of child processes and Ray's actors."""
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
    print(text, file=sys.stderr, flush=True)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of all values are, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def in_turn(number: int, sides: Mapping[str, Callable[[], _Measured]]) -> dict[str, _Measured]:
    """Call each side once, in reverse order in every other round, because the speed of a machine
    changes within minutes.
    """
    return {name: sides[name]() for name in (reversed(list(sides)) if number % 2 else sides)}


def amiss(holds: Mapping[str, object], where: str = "") -> list[str]:
    """Return the sentences whose values are false, each with the prefix `where`."""
    return [f"{where}{words}" for words, good in holds.items() if not good]


class ChildDiedError(RuntimeError):
    """A child process ended by itself, does not answer, or raised the error in the text."""


class Child:
    """A process that runs `body(pipe, *arguments)`, and our end of the pipe.

    The caller must close it; `close` ends the process.
    """

    def __init__(
        self,
        name: str,
        body: Callable[..., None],
        *arguments: object,
        context: SpawnContext | ForkServerContext = get_context("spawn"),  # noqa: B008
    ) -> None:
        self.name = name
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_in_child, args=(body, theirs, *arguments), daemon=True
        )
        self._process.start()
        theirs.close()

    def send(self, order: object) -> None:
        try:
            self.pipe.send(order)
        except OSError:
            raise self._died() from None

    def receive(self, patience_s: float | None = None) -> Any:  # noqa: ANN401 - whatever was sent
        """Return the next message of the process. ChildDiedError: none came within `patience_s`."""
        try:
            if self.pipe.poll(patience_s):
                return self.pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None
        raise ChildDiedError(f"{self.name} gave no answer within {patience_s:.0f} s")

    def close(self) -> None:
        self.pipe.close()
        self._process.join(5.0)
        self._process.kill()
        self._process.join()
        self._process.close()

    def _died(self) -> ChildDiedError:
        self._process.join(5.0)
        return ChildDiedError(f"the process of {self.name} ended with {self._process.exitcode}")


def _in_child(body: Callable[..., None], *arguments: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the bench ends its children itself
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the bench ended
        body(*arguments)


def told_by(
    name: str,
    body: Callable[..., None],
    *arguments: object,
    within_s: float,
) -> Any:  # noqa: ANN401 - whatever was sent
    """Run a child until it has sent one answer. Raises ChildDiedError, as `Child.receive` does."""
    with contextlib.closing(Child(name, body, *arguments)) as child:
        return child.receive(within_s)


def status_bytes(key: str) -> int:
    """Return a value of /proc/self/status in bytes; the kernel counts in KiB. VmData is private
    writable memory.
    """
    with Path("/proc/self/status").open(encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; this benchmark needs Linux")


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
    return WorkerSpec(
        slot="bench/0", node="bench", device=device, budget_bytes=budget_bytes,
        card_budget_bytes=budget_bytes, memory_fraction=1.0, workers_on_host=1, duty=None,
        policy="classic", memory=replace(GUIDE, **memory),
        workload=WorkloadSpec(name=name, dtype=dtype, size=size, batch=batch, seed=0),
    )  # fmt: skip


def run_turn(engine: Engine, duration_s: float) -> Status:
    """Run one turn of the engine; a turn of 0 s ends with the first good step. The returned status
    counts the steps of this turn alone.
    """
    before = engine.status().counts
    status = engine.turn(Orders(), duration_s)
    names = [each.name for each in fields(StepCounts)]
    counts = {name: getattr(status.counts, name) - getattr(before, name) for name in names}
    return replace(status, counts=StepCounts(**counts))
