"""The socket of a head and its client: real sockets, in a run folder of any depth, for this user alone."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.control.client import send
from orchestrator.control.listener import Listener, short_name
from orchestrator.control.wire import LINE_MOST_BYTES, Answer, command_of
from tests.scene import PATIENCE_S, wait_for

OTHER_USER = 65_534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a run folder so deep that its path does not fit into the address of a socket."""
    deep = tmp_path / ("deep" * 20) / ("deeper" * 20)
    deep.mkdir(parents=True)
    return deep


@pytest.fixture
def ears(folder: Path) -> Iterator[Listener]:
    with closing(Listener(folder)) as listening:
        assert listening.problem is None
        yield listening


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE_S)
    with short_name(path) as name:
        connection.connect(name)
    return connection


def answers(ears: Listener) -> int:
    """Answer all that has come in; return how much that was."""
    heard = ears.received()
    for connection, line in heard:
        command = command_of(line)
        ears.answer(
            connection,
            Answer(ok=True, id=command.id, effect=f"{command.do} {' '.join(command.slots)}"),
        )
    return len(heard)


def sent(folder: Path, poll: Callable[[], object]) -> Answer:
    """Send a command from another thread, while the head polls."""
    got: list[Answer] = []
    sender = threading.Thread(
        target=lambda: got.append(send(folder, "pause", ["pc1/3"], by="test", timeout_s=PATIENCE_S))
    )
    sender.start()
    wait_for(lambda: (poll(), got)[1], "answer")
    sender.join()
    return got[0]


def test_a_command_reaches_a_folder_of_any_depth(ears: Listener, folder: Path) -> None:
    path = folder / "control.sock"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    answer = sent(folder, lambda: answers(ears))
    assert (answer.ok, answer.effect) == (True, "pause pc1/3")
    ears.close()
    assert not path.exists()


def test_a_lost_answer_is_asked_for_again_under_the_same_id(ears: Listener, folder: Path) -> None:
    ids: list[str] = []

    def poll() -> None:
        for connection, line in ears.received():
            ids.append(command_of(line).id)
            if len(ids) == 1:
                connection.socket.close()
            else:
                ears.answer(connection, Answer(ok=True, id=ids[-1], effect="held"))

    assert sent(folder, poll).effect == "held"
    assert len(ids) == 2
    assert len(set(ids)) == 1


def test_a_head_takes_the_place_of_one_that_was_killed(ears: Listener, folder: Path) -> None:
    with closing(Listener(folder)) as next_one:
        assert next_one.problem is None
        assert sent(folder, lambda: answers(next_one)).ok


def test_a_line_without_an_end_is_refused_or_given_up(folder: Path) -> None:
    now_s = 0.0
    with closing(Listener(folder, lambda: now_s)) as ears:
        too_long, silent = (connected(folder / "control.sock") for _ in range(2))
        too_long.sendall(b"x" * (LINE_MOST_BYTES + 1))
        assert ears.received() == []
        refused = json.loads(too_long.recv(1000))["error"]
        assert refused == f"a line has at most {LINE_MOST_BYTES} bytes"
        silent.sendall(b"{")
        now_s = 1.5
        assert ears.received() == []
        assert silent.recv(1000) == b""
        for each in (too_long, silent):
            each.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_is_refused() -> None:
    # Not in pytest's own folder, which no other user may enter.
    with tempfile.TemporaryDirectory() as place, closing(Listener(Path(place))) as ears:
        path = Path(place) / "control.sock"
        Path(place).chmod(0o755)
        path.chmod(0o666)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.setuid(OTHER_USER)
            with connected(path) as connection:
                connection.sendall(b"{}\n")
                os.write(write, connection.recv(1000))
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as told:
            os.set_blocking(read, False)
            answer = wait_for(lambda: ears.received() or told.read(), "answer")
        os.waitpid(child, 0)
    assert json.loads(answer)["error"] == "this run belongs to another user"
