"""Whether nodes answer: real sockets on the loopback, and a clock that the test turns.

No Ray. Nothing here sleeps: a loopback connection is through, or refused, when `connect` returns.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.cluster.liveness import Pulse

Address = tuple[str, int]

#: What the module promises: silent after so many refusals, or so long without an answer.
REFUSALS = 2
PATIENCE_S = 5.0

linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="counts the descriptors and fills the queues of Linux"
)


class Raylet:
    """A listening socket that takes every connection that was made to it, as a raylet does."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.address: Address = self.socket.getsockname()

    def take(self) -> int:
        """Accept and close what has come; return how many."""
        taken = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self.socket.accept()[0].close()
                taken += 1
        return taken

    def end(self) -> None:
        """End as a killed process does: its port is closed at once."""
        self.socket.close()


@pytest.fixture
def raylet() -> Iterator[Raylet]:
    """One that answers, until the test ends it."""
    made = Raylet()
    yield made
    made.end()


class Watch:
    """Looks once a second, by its own clock."""

    def __init__(self, **addresses: Address) -> None:
        self.pulse = Pulse()
        self.addresses = addresses
        self.now_s = 1000.0

    def look(self, *, later_s: float = 1.0) -> frozenset[str]:
        self.now_s += later_s
        return self.pulse.silent(self.addresses, self.now_s)

    def end(self) -> None:
        """Ask nobody any more, which closes what is under way."""
        assert self.pulse.silent({}, self.now_s) == frozenset()


@contextlib.contextmanager
def deaf() -> Iterator[Address]:
    """Give an address that neither accepts nor refuses: the queue of its socket is full."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address: Address = listening.getsockname()
        for _ in range(8):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        yield address


def test_a_closed_port_is_silent_after_two_refusals(raylet: Raylet) -> None:
    watch = Watch(pc1=raylet.address)
    watch.look()
    raylet.end()
    for _ in range(REFUSALS - 1):
        assert watch.look(later_s=0.1) == frozenset()
    assert not watch.pulse.refuses("pc1")
    for _ in range(5):
        assert watch.look(later_s=0.1) == {"pc1"}
        # Said by the machine itself: what a worker that outlives its raylet reports does not speak
        # against it.
        assert watch.pulse.refuses("pc1")


@linux_only
def test_a_deaf_node_is_silent_only_after_the_patience(raylet: Raylet) -> None:
    watch = Watch(pc1=raylet.address)
    watch.look()
    answered_at_s = watch.now_s
    with deaf() as address:
        watch.addresses = {"pc1": address}
        while watch.now_s + 0.5 <= answered_at_s + PATIENCE_S:
            assert watch.look(later_s=0.5) == frozenset()
        assert watch.look(later_s=0.5) == {"pc1"}
        assert not watch.pulse.refuses("pc1")  # silence may have other reasons
        watch.addresses = {"pc1": raylet.address}
        # One attempt is still at the deaf door; when it is given up the next one finds the node.
        assert [watch.look() for _ in range(4)][-1] == frozenset()


@linux_only
def test_a_node_that_never_answered_is_never_silent(raylet: Raylet) -> None:
    raylet.end()
    with deaf() as address:
        watch = Watch(refuses=raylet.address, deaf=address)
        for _ in range(60):
            assert watch.look() == frozenset()
        watch.end()


@linux_only
def test_after_a_suspension_nobody_is_lost_for_that() -> None:
    raylets = [Raylet() for _ in range(3)]
    watch = Watch(**{f"pc{index}": raylet.address for index, raylet in enumerate(raylets)})
    watch.look()
    assert watch.look(later_s=60) == frozenset()
    # Nor is a node that happens to be slow just then: its patience begins anew.
    with deaf() as address:
        watch.addresses = {**watch.addresses, "pc0": address}
        assert watch.look(later_s=60) == frozenset()
        assert [watch.look() for _ in range(5)] == [frozenset()] * 5
        assert watch.look() == {"pc0"}
        watch.end()
    for raylet in raylets:
        raylet.end()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@linux_only
def test_a_thousand_looks_leave_no_descriptor_behind(raylet: Raylet) -> None:
    ended = Raylet()
    with deaf() as address:
        watch = Watch(answers=raylet.address, refuses=ended.address, deaf=address)
        watch.look()
        ended.end()
        # One attempt may be under way for each node.
        most = open_descriptors() + len(watch.addresses)
        for _ in range(1000):
            watch.look()
            raylet.take()
            assert open_descriptors() <= most
        watch.end()
        assert open_descriptors() <= most - 3
