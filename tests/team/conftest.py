"""Teams of real processes, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.team.scene import MODULES, Team

Start = Callable[..., Team]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """The same as `fork_server`, with what a training imports."""
    forks = ForkServer(*MODULES)
    yield forks
    forks.close()


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Iterator[Start]:
    """Start the processes of a team, which are ended with the test. A busy machine makes none of
    them lost, unless `silent_s` is said.
    """
    with ExitStack() as stack:
        yield lambda *members, **how: stack.enter_context(
            Team(server, tmp_path, *members, **{"silent_s": 30.0, **how})
        )
