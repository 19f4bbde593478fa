"""`commands.sqlite`: nothing is lost, nothing waits for a verb that is stopped, and others are refused."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.record.command_file import (
    COMMANDS_NAME,
    CommandFileError,
    Incoming,
    any_waits,
    put,
    waiting,
)
from tests.scene import ROOT

TAKEN = """
import sys
from pathlib import Path
from orchestrator.record.command_file import put
for number in range(10):
    put(Path(sys.argv[1]), b"x", identity=f"{sys.argv[2]}-{number}")
"""

LOOKS = """
import sys
from pathlib import Path
from orchestrator.record.command_file import waiting
for look in range(500):
    assert len(waiting(Path(sys.argv[1]))) == 1, f"look {look} found nothing"
"""


def held(path: Path, *statements: str) -> sqlite3.Connection:
    """Return a connection to the file of commands that has carried out so much."""
    connection = sqlite3.connect(path / COMMANDS_NAME, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    return connection


def ids(folder: Path) -> list[str]:
    return [row.id for row in waiting(folder)]


@pytest.fixture
def incoming(tmp_path: Path) -> Iterator[Incoming]:
    with closing(Incoming(tmp_path)) as opened:
        yield opened


def test_rows_stay_until_they_are_removed(tmp_path: Path, incoming: Incoming) -> None:
    assert incoming.rows() == []
    for identity in "ab":
        put(tmp_path, identity.encode(), identity=identity, until_unix_s=7.5)
    first, second = incoming.rows()
    assert (first.id, first.content, first.until_unix_s) == ("a", b"a", 7.5)
    incoming.remove([first])
    put(tmp_path, b"c", identity="c")
    assert [row.id for row in incoming.rows()] == ids(tmp_path) == ["b", "c"]
    incoming.remove([second, *incoming.rows()])
    assert (incoming.rows(), any_waits(tmp_path), incoming.problem) == ([], False, None)


def test_many_verbs_at_once_lose_nothing(tmp_path: Path, incoming: Incoming) -> None:
    verbs = [
        subprocess.Popen([sys.executable, "-c", TAKEN, tmp_path, str(number)], cwd=ROOT)
        for number in range(10)
    ]
    seen: list[str] = []
    while any(verb.poll() is None for verb in verbs) or any_waits(tmp_path):
        rows = incoming.rows()
        seen += [row.id for row in rows]
        incoming.remove(rows)
    assert [verb.returncode for verb in verbs] == [0] * 10
    assert sorted(seen) == sorted(f"{verb}-{row}" for verb in range(10) for row in range(10))


def test_of_many_that_look_each_sees_what_waits(tmp_path: Path) -> None:
    """SQLite locks the file while the last of them closes it."""
    put(tmp_path, b"a", identity="a")
    looks = [
        subprocess.Popen(
            [sys.executable, "-c", LOOKS, tmp_path], cwd=ROOT, text=True, stderr=subprocess.PIPE
        )
        for _ in range(3)
    ]
    assert ["" for _ in looks] == [look.communicate()[1] for look in looks]


@pytest.mark.parametrize("lock", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE"])
def test_a_verb_that_keeps_the_lock_holds_neither_head_nor_verbs(
    tmp_path: Path, incoming: Incoming, lock: str
) -> None:
    put(tmp_path, b"", identity="before")
    with closing(held(tmp_path, lock, "DELETE FROM commands")) as stopped:
        put(tmp_path, b"", identity="after")
        rows = incoming.rows()
        assert [row.id for row in rows] == ["before", "after"]
        incoming.remove(rows)
        assert incoming.rows() == []
        stopped.execute("ROLLBACK")
    incoming.remove([])
    assert ids(tmp_path) == []


def test_a_verb_whose_disk_is_full_leaves_nothing(tmp_path: Path) -> None:
    put(tmp_path, b"", identity="before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / COMMANDS_NAME).stat().st_size
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            put(tmp_path, bytes(2**20), identity="after")
        except (OSError, CommandFileError):
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert ids(tmp_path) == ["before"]


def test_files_are_for_their_user_alone(tmp_path: Path) -> None:
    put(tmp_path, b"", identity="a")
    with closing(held(tmp_path, "SELECT * FROM commands")):
        put(tmp_path, b"", identity="b")
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes.keys() >= {COMMANDS_NAME, f"{COMMANDS_NAME}-wal"}
    assert set(modes.values()) == {0o600}


def opened_to_all(folder: Path) -> None:
    (folder / COMMANDS_NAME).chmod(0o644)


def folder_opened(folder: Path) -> None:
    folder.chmod(0o770)


def linked(folder: Path) -> None:
    (folder / COMMANDS_NAME).rename(folder / "target")
    (folder / COMMANDS_NAME).symlink_to(folder / "target")


def piped(folder: Path) -> None:
    (folder / COMMANDS_NAME).unlink()
    os.mkfifo(folder / COMMANDS_NAME, 0o600)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (opened_to_all, "chmod 600"),
        (folder_opened, "chmod go-w"),
        (linked, "no regular file"),
        (piped, "no regular file"),
    ],
)
def test_what_others_could_have_written_is_refused(
    tmp_path: Path, incoming: Incoming, spoil: Callable[[Path], None], words: str
) -> None:
    put(tmp_path, b"", identity="a")
    spoil(tmp_path)

    with pytest.raises(CommandFileError, match=words):
        waiting(tmp_path)
    with pytest.raises(CommandFileError, match=words):
        put(tmp_path, b"", identity="b")
    assert incoming.rows() == []
    assert words in str(incoming.problem)


def test_another_users_commands_are_refused(
    tmp_path: Path, incoming: Incoming, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, b"", identity="a")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    with pytest.raises(CommandFileError, match="another user"):
        put(tmp_path, b"", identity="b")
    assert incoming.rows() == []
    assert "another user" in str(incoming.problem)


def test_a_file_that_is_none_stops_no_command(tmp_path: Path, incoming: Incoming) -> None:
    put(tmp_path, b"", identity="before")
    (tmp_path / COMMANDS_NAME).write_bytes(os.urandom(8192))
    put(tmp_path, b"", identity="after")
    assert [row.id for row in incoming.rows()] == ["after"]
    assert f"{COMMANDS_NAME} cannot be read" in str(incoming.problem)
    for path in tmp_path.glob(f"{COMMANDS_NAME}*"):
        path.unlink()
    put(tmp_path, b"", identity="new")
    assert [row.id for row in incoming.rows()] == ["after", "new"]
    assert incoming.problem is None
