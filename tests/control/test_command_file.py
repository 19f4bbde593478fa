"""Files of commands: nothing is lost, what is none stops no command, and others are refused."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.errors import ArchiveError
from orchestrator.record.command_file import COMMANDS_NAME, Incoming, any_waits, put, waiting
from tests.scene import ROOT

TAKEN = """
import sys
from pathlib import Path
from orchestrator.record.command_file import put
for number in range(10):
    put(Path(sys.argv[1]), b"x", identity=f"{sys.argv[2]}-{number}")
"""


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, "read-only file system")


def ids(folder: Path) -> list[str]:
    return [row.id for row in waiting(folder)]


@pytest.fixture
def incoming(tmp_path: Path) -> Incoming:
    return Incoming(tmp_path)


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


def test_what_cannot_be_removed_does_not_come_again(
    tmp_path: Path, incoming: Incoming, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, b"", identity="a")
    with monkeypatch.context() as read_only:
        read_only.setattr(Path, "unlink", refuse)
        incoming.remove(incoming.rows())
    assert incoming.rows() == []
    assert any_waits(tmp_path)
    incoming.remove([])
    assert not any_waits(tmp_path)


def test_a_verb_whose_disk_is_full_leaves_nothing(tmp_path: Path) -> None:
    put(tmp_path, b"", identity="before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            put(tmp_path, bytes(2**20), identity="after")
        except OSError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert ids(tmp_path) == ["before"]
    assert len(list((tmp_path / COMMANDS_NAME).iterdir())) == 1


def test_files_are_for_their_user_alone(tmp_path: Path) -> None:
    put(tmp_path, b"", identity="a")
    place = tmp_path / COMMANDS_NAME
    assert place.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in place.iterdir()] == [0o600]


@pytest.mark.parametrize(
    ("place", "mode", "words"),
    [(COMMANDS_NAME, 0o755, "chmod 700"), ("", 0o770, "chmod go-w"), ("link", 0, "not a folder")],
)
def test_what_others_could_have_written_is_refused(
    tmp_path: Path, incoming: Incoming, place: str, mode: int, words: str
) -> None:
    put(tmp_path, b"", identity="a")
    if place == "link":
        (tmp_path / COMMANDS_NAME).rename(tmp_path / "target")
        (tmp_path / COMMANDS_NAME).symlink_to(tmp_path / "target")
    else:
        (tmp_path / place).chmod(mode)

    with pytest.raises(ArchiveError, match=words):
        waiting(tmp_path)
    with pytest.raises(ArchiveError, match=words):
        put(tmp_path, b"", identity="b")
    assert incoming.rows() == []
    assert words in str(incoming.problem)


def test_another_users_commands_are_refused(
    tmp_path: Path, incoming: Incoming, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, b"", identity="a")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    with pytest.raises(ArchiveError, match="another user"):
        put(tmp_path, b"", identity="b")
    assert incoming.rows() == []
    assert "another user" in str(incoming.problem)


@pytest.mark.parametrize("content", [bytes(range(64)), b"{}", b"5"])
def test_a_file_that_is_none_stops_no_command(
    tmp_path: Path, incoming: Incoming, content: bytes
) -> None:
    put(tmp_path, b"", identity="before")
    junk, pipe = tmp_path / COMMANDS_NAME / "0.json", tmp_path / COMMANDS_NAME / "1.json"
    junk.write_bytes(content)
    put(tmp_path, b"", identity="after")
    assert [row.id for row in incoming.rows()] == ["before", "after"]
    assert f"{junk} cannot be read" in str(incoming.problem)
    junk.unlink()
    os.mkfifo(pipe)
    assert [row.id for row in incoming.rows()] == ["before", "after"]
    assert "no regular file" in str(incoming.problem)
    pipe.unlink()
    assert [row.id for row in incoming.rows()] == ["before", "after"]
    assert incoming.problem is None
