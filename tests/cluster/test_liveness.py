"""The probe of nodes, with real sockets on loopback and a clock that the test advances. No Ray."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from orchestrator.cluster.liveness import Pulse

Address = tuple[str, int]

#: A node is silent after this number of refusals, or after this time without an answer.
REFUSALS = 2
PATIENCE_S = 5.0


@pytest.fixture
def raylet() -> Iterator[socket.socket]:
    """A socket that answers until the test closes it, as the kernel does for a killed process."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


class Watch:
    """Probes nodes once a second by its own clock."""

    def __init__(self, **addresses: Address) -> None:
        self.pulse = Pulse()
        self.addresses = addresses
        self.now_s = 1000.0
        self.deaf: Address | None = None
        """An address that does not answer."""

    def look(self, *, later_s: float = 1.0) -> set[str]:
        """Probe all nodes `later_s` later; return the silent nodes."""
        self.now_s += later_s
        self.pulse.probe(self.addresses, self.now_s)
        for node, address in self.addresses.items():
            if address != self.deaf and (attempt := self.pulse._ports[node].attempt) is not None:
                attempt.join()  # so that its answer has arrived, also on a loaded machine
        return {node for node in self.addresses if self.pulse.is_silent(node, self.now_s)}


@contextlib.contextmanager
def deaf() -> Iterator[Address]:
    """An address that neither accepts nor refuses, because the queue of its socket is full."""
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


def test_a_closed_port_is_silent_after_two_refusals(raylet: socket.socket) -> None:
    watch = Watch(pc1=raylet.getsockname())
    assert watch.look() == set()
    raylet.close()
    for _ in range(REFUSALS - 1):
        assert watch.look(later_s=0.1) == set()
    assert watch.pulse.unanswered_s("pc1", watch.now_s) == pytest.approx(0.1)
    assert not watch.pulse.refuses("pc1")
    for _ in range(5):
        assert watch.look(later_s=0.1) == {"pc1"}
        # The machine itself refuses: reports of a worker that outlives its raylet do not contradict
        # it.
        assert watch.pulse.refuses("pc1")


def test_a_deaf_node_is_silent_only_after_the_patience(raylet: socket.socket) -> None:
    watch = Watch(pc1=raylet.getsockname())
    watch.look()
    answered_at_s = watch.now_s
    with deaf() as address:
        watch.addresses, watch.deaf = {"pc1": address}, address
        while watch.now_s + 0.5 <= answered_at_s + PATIENCE_S:
            assert watch.look(later_s=0.5) == set()
        assert watch.look(later_s=0.5) == {"pc1"}
        assert not watch.pulse.refuses("pc1")  # silence may have other reasons
        watch.addresses = {"pc1": raylet.getsockname()}
        attempt = watch.pulse._ports["pc1"].attempt
        assert attempt is not None
        attempt.join()  # the old attempt is abandoned
        assert watch.look() == set()


def test_a_node_that_never_answered_is_never_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as ended:
        closed = ended.getsockname()
    with deaf() as address:
        watch = Watch(refuses=closed, deaf=address)
        watch.deaf = address
        for _ in range(10):
            assert watch.look() == set()


def test_after_a_suspension_nobody_is_lost_for_that(raylet: socket.socket) -> None:
    watch = Watch(pc1=raylet.getsockname(), pc2=raylet.getsockname())
    watch.look()
    assert watch.look(later_s=60) == set()
    # A node that is slow at this moment is not silent either: its patience starts again.
    with deaf() as address:
        watch.addresses, watch.deaf = {**watch.addresses, "pc1": address}, address
        assert watch.look(later_s=60) == set()
        assert [watch.look() for _ in range(5)] == [set()] * 5
        assert watch.look() == {"pc1"}
