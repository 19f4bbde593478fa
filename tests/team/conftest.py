"""Fixtures that start teams of real processes."""

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
    """The same as `fork_server`, with the modules that a training imports."""
    forks = ForkServer(*MODULES)
    yield forks
    forks.close()


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Iterator[Start]:
    """Start the processes of a team, and end them with the test. Without `silent_s`, no member is
    lost on a busy machine.
    """
    with ExitStack() as stack:
        yield lambda *members, **how: stack.enter_context(
            Team(server, tmp_path, *members, **{"silent_s": 30.0, **how})
        )
