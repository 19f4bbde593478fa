"""A fleet for tests: real engines in this very process, one slice after the other, without Ray.

`python -m tests.fleet.in_process run ...` is the product's command with this fleet in place of the
cluster, so that a run of seconds needs no seconds to start Ray. `CONFIG` has its only node.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

from orchestrator.cli.main import main
from orchestrator.core.fleet import (
    Fleet,
    NodeFact,
    SliceEnded,
    SliceFailed,
    SliceFailure,
    SliceReported,
)
from orchestrator.run import environment
from workers.engine.engine import Engine
from workers.messages import Directive, Report
from workers.settings import WorkerSpec

#: The product's command with this fleet, as arguments of Python.
IN_PROCESS = ("-m", "tests.fleet.in_process")

#: What cluster.yaml holds for the command. The worker does not rest, which a short run has no time for.
CONFIG = """
nodes: {local: {gpu: cpu, gpus: 0, workers: 1, vram_per_worker_gib: 1, size: 2048}}
compute_share_mode: none
"""


class InProcessFleet:
    """See `orchestrator.core.fleet.Fleet`: what a run on one node asks of it."""

    def __init__(self) -> None:
        # torch says this on the user's terminal where numpy is not installed; nothing here needs
        # it.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
        self._specs: dict[str, WorkerSpec] = {}
        self._run_slice: dict[str, Callable[[Directive], Report]] = {}
        """Of each slot's engine, once its first slice has run."""
        self._queue: deque[tuple[str, Directive]] = deque()

    def nodes(self) -> tuple[NodeFact, ...]:
        return (NodeFact(name="local", node_id="this", address="localhost", cpus=64, gpus=0),)

    def address(self) -> str:
        return "localhost"

    def count_cards(self, node: str) -> int:
        return 0

    def place(self, spec: WorkerSpec, num_cpus: float, num_gpus: float) -> None:
        self._specs[spec.slot] = spec

    def submit(self, slot: str, directive: Directive) -> None:
        self._queue.append((slot, directive))

    def wait(self, timeout_s: float) -> tuple[SliceEnded, ...]:
        """Runs the next slice, however long that takes."""
        if not self._queue:
            return ()
        slot, directive = self._queue.popleft()
        try:
            if slot not in self._run_slice:
                self._run_slice[slot] = Engine(self._specs[slot]).run_slice
        # Torch raises many types where it cannot be loaded.
        except Exception as error:  # noqa: BLE001
            text = f"{type(error).__name__}: {error}"
            return (SliceFailed.of(slot, directive, SliceFailure.UNBUILDABLE, text),)
        return (SliceReported(report=self._run_slice[slot](directive)),)

    def forget(self, slot: str) -> None:
        """What has not begun never runs."""
        self._queue = deque(entry for entry in self._queue if entry[0] != slot)

    def restart(self, slot: str) -> None:
        """The process stays; the slot gets a fresh engine, and its memory is released."""
        if self._run_slice.pop(slot, None) is not None:
            gc.collect()

    def abandon(self, slot: str) -> None:
        self.forget(slot)
        self.restart(slot)
        self._specs.pop(slot, None)

    def why_ended(self, slot: str) -> None:
        """No process ended."""

    def watch(self, silent: object) -> dict[str, Any]:
        """No process but this one."""
        return {}


@contextlib.contextmanager
def in_process() -> Iterator[Fleet]:
    """Yield the fleet; there is nothing to connect to and nothing to end."""
    yield cast("Fleet", InProcessFleet())


def in_place_of_a_cluster() -> None:
    """Have runs on a cluster use this fleet, in this process."""
    environment.connected = lambda *_: in_process()


if __name__ == "__main__":
    in_place_of_a_cluster()
    main()
