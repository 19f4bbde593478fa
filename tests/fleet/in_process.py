"""A fleet for tests: real engines in this very process, one turn after the other, without Ray.

`python -m tests.fleet.in_process run ...` is the product's command with this fleet in place of the
cluster, so that a run of seconds needs no seconds to start Ray. `CONFIG` has its only node.
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
        """Lets every engine work until it has something to tell, however long that takes."""
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
            self.engine = None  # the process stays, and what the engine held is released
        if orders.runs:
            try:
                self._work(orders)
            # Torch raises many types where it cannot be loaded.
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
    """Yield the fleet; there is nothing to connect to and nothing to end."""
    yield cast("Fleet", InProcessFleet())


def in_place_of_a_cluster() -> None:
    """Have runs on a cluster use this fleet, in this process."""
    environment.connected = lambda *_: in_process()


if __name__ == "__main__":
    in_place_of_a_cluster()
    main()
