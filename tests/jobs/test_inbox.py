"""The inbox: nothing is lost, nothing is half there, and no other user's commands are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.jobs.inbox import InboxError, put, waiting
from orchestrator.jobs.model import QueueHeld, Rested, Said, Submitted, Word
from tests.jobs.scene import command, training


def submitted(name: str) -> Submitted:
    return Submitted(at_s=1.0, job=command(name), least_bytes=7)


def test_messages_come_in_the_order_of_their_putting(tmp_path: Path) -> None:
    messages = [
        [submitted("a"), submitted("b")],
        [Said(at_s=1.0, id="m", word=Word.HOLD, job="a", by="ann")],
        [QueueHeld(at_s=1.0, reason=None)],
    ]

    paths = [put(tmp_path, message) for message in messages]

    assert list(waiting(tmp_path)) == list(zip(paths, messages, strict=True))


def test_what_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = put(tmp_path, [submitted("a")])
    path.rename(path.with_name(f".{path.name}"))

    assert list(waiting(tmp_path)) == []


def test_a_failed_put_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        put(tmp_path, [submitted("a")])

    assert list((tmp_path / "inbox").iterdir()) == []


def refusals(folder: Path) -> list[str]:
    return [str(message) for _, message in waiting(folder) if isinstance(message, InboxError)]


def test_the_inbox_belongs_to_its_user(tmp_path: Path) -> None:
    path = put(tmp_path, [submitted("a")])

    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o602])
def test_a_message_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    put(tmp_path, [submitted("a")]).chmod(mode)

    (words,) = refusals(tmp_path)
    assert "chmod 600" in words


def test_an_inbox_open_to_others_is_refused(tmp_path: Path) -> None:
    put(tmp_path, [submitted("a")]).parent.chmod(0o770)

    with pytest.raises(InboxError, match="chmod 700"):
        list(waiting(tmp_path))
    with pytest.raises(InboxError, match="chmod 700"):
        put(tmp_path, [submitted("b")])


def test_files_of_another_user_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, [submitted("a")])
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    with pytest.raises(InboxError, match="another user"):
        list(waiting(tmp_path))


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    path = put(tmp_path, [submitted("a")])
    target = path.rename(tmp_path / "target.json")
    path.symlink_to(target)

    (words,) = refusals(tmp_path)
    assert "no regular file" in words


@pytest.mark.parametrize("text", ["", "hello", "{}", '[{"kind":"Other"}]', "[1]", "[[]]"])
def test_a_file_that_is_no_message_blocks_nothing(tmp_path: Path, text: str) -> None:
    put(tmp_path, [submitted("a")]).write_text(text)
    put(tmp_path, [submitted("b")])

    assert len(refusals(tmp_path)) == 1
    assert len(list(waiting(tmp_path))) == 2


def test_only_users_records_are_taken(tmp_path: Path) -> None:
    put(tmp_path, [Submitted(at_s=0.0, job=training("a")), Rested(at_s=0.0, job="a", attempt=1)])  # type: ignore[list-item]

    (words,) = refusals(tmp_path)
    assert "only the queue" in words
