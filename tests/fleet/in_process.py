"""A fleet for tests: real engines in this process, one turn after the other, without Ray.

`python -m tests.fleet.in_process run ...` is the product's command with this fleet instead of a
cluster, which saves the seconds that Ray needs to start. `CONFIG` has its only node.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from orchestrator.cli.main import main
from orchestrator.core.fleet import ActorUnreachable, Fleet, NodeFact, PollResult, StatusReceived
from orchestrator.run import environment
from workers.engine.engine import Engine
from workers.messages import NO_ORDERS, Begin, Orders, Status
from workers.settings import WorkerSpec

#: The product's command with this fleet, as arguments of Python.
IN_PROCESS = ("-m", "tests.fleet.in_process")

#: The cluster.yaml for the command. The worker does not rest, because runs are short.
CONFIG = """
nodes: {local: {gpu: cpu, gpus: 0, workers: 1, vram_per_worker_gib: 1, size: 2048}}
compute_share_mode: none
"""


class InProcessFleet:
    """The part of `orchestrator.core.fleet.Fleet` that a run on one node needs."""

    def __init__(self) -> None:
        # torch warns on the user's terminal if numpy is not installed; nothing here needs
        # numpy.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
        self._slots: dict[str, _Slot] = {}

    def nodes(self) -> tuple[NodeFact, ...]:
        return (NodeFact(name="local", node_id="this", address="localhost", cpus=64, gpus=0),)

    def address(self) -> str:
        return "localhost"

    def count_cards(self, node: str) -> int:
        return 0

    def place(self, spec: WorkerSpec, num_cpus: float, num_gpus: float) -> None:
        self._slots[spec.slot] = _Slot(spec)

    def order(self, slot: str, orders: Orders) -> None:
        self._slots[slot].orders = orders

    def wait(self, timeout_s: float) -> tuple[PollResult, ...]:
        """Let each engine work until it has news, however long that takes."""
        if not self._slots:
            time.sleep(timeout_s)
        return tuple(slot.poll() for slot in self._slots.values())

    def abandon(self, slot: str) -> None:
        del self._slots[slot]


class _Slot:
    """An actor and its program."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.orders = NO_ORDERS
        self.engine: Engine | None = None
        self.incarnation: int | None = None
        self.last = Status(slot=spec.slot)
        self.events: list[object] = []
        self.heard = 0

    def poll(self) -> PollResult:
        orders = self.orders
        del self.events[: max(0, orders.heard - self.heard)]
        self.heard = max(self.heard, orders.heard)
        if orders.actor is None:
            return StatusReceived(status=replace(self.last, actor="this"))
        if not orders.runs or orders.incarnation != self.incarnation:
            self.engine = None  # the process stays; the memory of the engine is freed
        if orders.runs:
            try:
                self._work(orders)
            # torch raises errors of many types if it cannot be loaded.
            except Exception as error:  # noqa: BLE001
                text = f"{type(error).__name__}: {error}"
                return ActorUnreachable(slot=self.spec.slot, text=text, is_unbuildable=True)
        self.events.extend(self.last.events)
        news = self.heard + len(self.events)
        self.last = replace(self.last, actor="this", news=news, events=tuple(self.events))
        told, self.last = self.last, replace(self.last, events=())
        return StatusReceived(status=told)

    def _work(self, orders: Orders) -> None:
        if self.engine is None:
            self.incarnation = orders.incarnation
            self.engine = Engine(self.spec, orders.begin or Begin(), orders.incarnation)
        self.last = self.engine.turn(orders, self.spec.poll_s)


@contextlib.contextmanager
def in_process() -> Iterator[Fleet]:
    """Yield the fleet, which needs no connection and no end."""
    yield cast("Fleet", InProcessFleet())


def in_place_of_a_cluster() -> None:
    """Make runs on a cluster use this fleet in this process."""
    environment.connected = lambda *_: in_process()


if __name__ == "__main__":
    in_place_of_a_cluster()
    main()
