"""The fleet as the supervisor uses it, with real Ray: slots, polls, and files of another PC.

One cluster serves all of these tests; each test has its own slot. If a fleet may behave in two
ways, the test allows both outcomes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch

from orchestrator.cluster.local_cluster import rehearsed
from orchestrator.core.fleet import ActorUnreachable, Fleet, PollResult, StatusReceived
from orchestrator.errors import NoClusterError, UsageError
from tests.cluster.conftest import actors
from tests.scene import PATIENCE_S, ROOT, Patience, python, spec_of
from workers.learned_limits import STATE_DIR_VARIABLE
from workers.messages import Begin, Orders, Status, WorkerEvent
from workers.settings import WorkerSpec
from workers.workloads.base import StepResult, Workload

pytestmark = pytest.mark.ray

#: A node with room for all slots, and one with room for a single slot.
NODE, NARROW = "pc1", "pc2"


class Steady(Workload):
    """A workload with equal steps."""

    def step(self, size: int, batch: int) -> StepResult:
        torch.ones(64, 64) @ torch.ones(64, 64)
        return StepResult(flop=2.0 * 64**3)

    def release(self) -> None:
        pass


@dataclass
class Cluster:
    """Two nodes of this machine."""

    owned: Fleet
    """The fleet that has started the nodes."""
    joined: Fleet
    """A fleet that treats the nodes as the user's."""
    state: Path
    """The folder for the learned limits of the workers."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers import the workloads; they inherit the environment of the raylet.
        for folder in (ROOT, Path(__file__).parent):
            patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        nodes = {NODE: 32, NARROW: 1}
        with rehearsed(
            {it: {"num_cpus": cpus, "num_gpus": 0} for it, cpus in nodes.items()}
        ) as owned:
            from orchestrator.cluster.ray_fleet import RayFleet

            joined = RayFleet(owned.address(), None)
            yield Cluster(owned, joined, Path(os.environ[STATE_DIR_VARIABLE]))


class Stage:
    """A fleet, and slots on one of its nodes, polled as a head polls them."""

    def __init__(self, fleet: Fleet, node: str) -> None:
        self.fleet, self.node = fleet, node
        self.orders: dict[str, Orders] = {}
        self.events: dict[str, list[WorkerEvent]] = {}

    def place(self, slot: str) -> str:
        """Place a slot with this name; return the full name."""
        name, spec = f"{self.node}/{slot}", spec_of()
        module = f"{Path(__file__).stem}:{Steady.__name__}"
        settings = replace(spec.workload, name=module, size=64)
        return self.place_as(name, replace(spec, slot=name, node=self.node, workload=settings))

    def place_as(self, name: str, spec: WorkerSpec) -> str:
        """Place a slot with this specification, and order it to work."""
        self.fleet.place(spec, num_cpus=1.0, num_gpus=0.0)
        self.orders[name] = Orders(begin=Begin())
        self.events[name] = []
        self.order(name)
        return name

    def order(self, slot: str, **changes: Any) -> None:
        """Change the orders of a slot."""
        self.orders[slot] = replace(self.orders[slot], **changes)
        self.fleet.order(slot, self.orders[slot])

    def hear(self, slot: str, ask: Callable[[PollResult], bool], what: str) -> PollResult:
        """Poll until `ask` accepts an answer of a slot; return the answer."""
        heard: list[PollResult] = []
        patience = Patience(lambda: len(heard))
        while not patience.is_over():
            for each in self.fleet.wait(1.0):
                if isinstance(each, StatusReceived):
                    self._take(each.status)
                if each.slot == slot:
                    heard.append(each)
                    if ask(each):
                        return each
        raise AssertionError(f"{slot} tells no {what}: {heard[-5:]}")

    def _take(self, status: Status) -> None:
        orders = self.orders[status.slot]
        is_new = status.actor != orders.actor
        if is_new and orders.actor is not None:
            return  # the test itself orders what follows the end of a process
        begin = None if status.incarnation == orders.incarnation else orders.begin
        self.events[status.slot] += status.events
        self.order(status.slot, actor=status.actor, begin=begin, heard=status.news)

    def status(self, slot: str, ask: Callable[[Status], bool], what: str) -> Status:
        """Poll until `ask` accepts a status of a slot; return the status."""
        heard = self.hear(
            slot, lambda each: isinstance(each, StatusReceived) and ask(each.status), what
        )
        assert isinstance(heard, StatusReceived)
        return heard.status

    def at_work(self, slot: str, incarnation: int = 0) -> Status:
        """Poll until a process of a slot has done some steps."""
        return self.status(
            slot,
            lambda told: told.incarnation == incarnation and told.counts.steps_ok > 2,
            "good step",
        )

    def close(self) -> None:
        """End the remaining slots."""
        for slot in self.orders:
            self.fleet.abandon(slot)


@pytest.fixture
def stage(cluster: Cluster) -> Iterator[Stage]:
    with contextlib.closing(Stage(cluster.joined, NODE)) as made:
        yield made


def process_of(status: Status) -> int:
    assert status.device is not None
    return status.device.pid


def test_it_shows_its_nodes_and_ends_none_of_the_users(stage: Stage) -> None:
    nodes = {node.name: node for node in stage.fleet.nodes()}
    assert set(nodes) == {NODE, NARROW}
    assert all(each.answers and not each.refuses and each.address for each in nodes.values())
    assert nodes[NODE].cpus == 32
    assert stage.fleet.count_cards(NODE) >= 0
    assert stage.fleet.wait(0.1) == (), "no slot is asked"
    for change in (stage.fleet.end_node, stage.fleet.start_node):
        with pytest.raises(UsageError, match=NODE):
            change(NODE)
    assert len(stage.fleet.nodes()) == 2


#: For a separate process that is a driver of an existing cluster.
LONG_CALL = """
import sys, time
from orchestrator.cluster.connect import connected

def slow():
    time.sleep(12.0)
    return "answered"

with connected(sys.argv[1], "token"):
    import ray

    where = {"node": sys.argv[2]}
    call = ray.remote(slow).options(num_cpus=0, max_retries=0, label_selector=where)
    print(ray.get(call.remote()))
"""


def test_a_call_of_many_seconds_keeps_its_connection(cluster: Cluster) -> None:
    done = python("-c", LONG_CALL, cluster.owned.address(), NARROW, cwd=ROOT)
    assert done.stdout.split() == ["answered"], done.stderr


def test_an_engine_that_cannot_be_made_is_unbuildable(stage: Stage) -> None:
    name = f"{NODE}/unbuildable"
    spec = SimpleNamespace(slot=name, node=NODE, device="cpu", command=None)
    stage.place_as(name, cast("WorkerSpec", spec))
    # On a loaded machine Ray may first say that the actor is unavailable.
    heard = stage.hear(name, lambda each: getattr(each, "is_unbuildable", False), "failure")
    assert isinstance(heard, ActorUnreachable)
    assert "AttributeError" in heard.text


def test_an_actor_that_is_killed_comes_back_under_another_name(stage: Stage) -> None:
    """The actor's program ends with it, and orders for the old actor start nothing."""
    slot = stage.place("actor")
    before = stage.at_work(slot)
    program = psutil.Process(process_of(before))
    for pid in actors():
        os.kill(pid, signal.SIGKILL)
    other = stage.status(slot, lambda told: told.actor != before.actor, "other process")
    assert other.incarnation is None
    psutil.wait_procs([program], timeout=PATIENCE_S)
    assert not program.is_running()
    stage.order(slot, actor=other.actor, heard=0, incarnation=1, begin=Begin())
    stage.at_work(slot, incarnation=1)


def test_an_abandoned_slot_is_gone_until_it_is_placed_again(stage: Stage) -> None:
    """The other slots continue to work."""
    gone, stays = stage.place("gone"), stage.place("stays")
    stage.at_work(gone)
    stage.fleet.abandon(gone)
    stage.fleet.abandon(gone)
    with pytest.raises(KeyError):
        stage.fleet.order(gone, Orders())
    stage.at_work(stays)
    stage.place("gone")
    stage.at_work(gone)


def test_checkpoints_come_in_pieces_from_their_node(cluster: Cluster, tmp_path: Path) -> None:
    """Each arrives whole, even if its file is replaced meanwhile."""
    from orchestrator.cluster.node_tasks import copy_files

    run, slot, pattern = "20260101-000000-abcd", f"{NODE}/0", "generation-?.pt"
    place = cluster.state / "state" / run / slot
    place.mkdir(parents=True)
    content = {"generation-0.pt": secrets.token_bytes(20 * 2**20), "generation-1.pt": b"short"}
    for name, data in content.items():
        (place / name).write_bytes(data)
    (place / "generation-0.pt.77.new").write_bytes(b"being written")
    paths = copy_files(NODE, run, slot, pattern, tmp_path)
    assert {path.name: path.read_bytes() for path in paths} == content
    assert copy_files(NODE, run, f"{NODE}/1", pattern, tmp_path) == []
    with pytest.raises(NoClusterError, match="no node pc9 is in the cluster"):
        copy_files("pc9", run, "pc9/0", pattern, tmp_path)
