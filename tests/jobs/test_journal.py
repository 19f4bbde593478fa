"""The journal: what is in it after a crash, a full disk or damage, and that it is the queue."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from orchestrator.jobs import journal as journals
from orchestrator.jobs.journal import Journal, JournalError, queue_of, records
from orchestrator.jobs.model import (
    Cause,
    QueueHeld,
    Record,
    Rested,
    Said,
    Submitted,
    Word,
)
from orchestrator.jobs.queue import Queue
from tests.jobs.scene import ASHA, Scene, command, training


def course(path: Path) -> Scene:
    """Play a few jobs, each batch in the journal before it is applied."""
    scene = Scene()
    journal = Journal(path)

    def take(*batch: Record) -> None:
        journal.append(batch)
        Scene.take(scene, *batch)

    scene.take = take  # type: ignore[method-assign]
    take(
        *(Submitted(at_s=1.0, job=training(f"lr-{i}", sweep="lr", milestones=ASHA)) for i in (0, 1))
    )
    take(Submitted(at_s=2.0, job=command("eval", after=("lr-0",), hours=(60, 120))))
    scene.turn()
    scene.see("lr-0", step=100, value=0.5)
    scene.see("lr-0", is_at_rest=True, step=100)
    scene.end("lr-1", Cause.KILLED, "SIGKILL")
    scene.say(Word.CANCEL, "lr-0", "m1")
    scene.turn(5.0)
    journal.close()
    return scene


def same(one: Queue, other: Queue) -> bool:
    return dict(one.standings) == dict(other.standings) and list(one.condensed()) == list(
        other.condensed()
    )


def test_a_replayed_queue_is_the_same(tmp_path: Path) -> None:
    scene = course(tmp_path / "journal.jsonl")

    again = queue_of(tmp_path)

    assert same(again, scene.queue)
    assert list(records(tmp_path / "journal.jsonl")) == scene.records
    assert again.next_records(scene.world()) == scene.queue.next_records(scene.world())


def test_a_torn_batch_is_cut_off_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    course(path)
    content = path.read_bytes()
    before = content[:-1].rfind(b"\n") + 1
    path.write_bytes(content[:before])
    whole = queue_of(tmp_path)

    for end in range(before, len(content)):
        path.write_bytes(content[:end])
        assert same(queue_of(tmp_path), whole), "a reader"
        journal = Journal(path)
        assert journal.cut_bytes == end - before
        journal.close()
        assert path.read_bytes() == content[:before]


def test_a_first_line_that_was_torn_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).close()
    first = path.read_bytes()

    for end in range(len(first)):
        path.write_bytes(first[:end])
        assert queue_of(tmp_path).is_over
        Journal(path).close()
        assert path.read_bytes() == first


def test_a_last_line_of_zeros_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    course(path)
    content = path.read_bytes()
    path.write_bytes(content + b"[" + bytes(60) + b"\n")

    Journal(path).close()

    assert path.read_bytes() == content


def test_a_damaged_line_in_the_middle_is_told(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    course(path)
    lines = path.read_bytes().split(b"\n")
    lines[3] = lines[3][:20] + b"\0" + lines[3][20:]
    path.write_bytes(b"\n".join(lines))

    with pytest.raises(JournalError, match=r"journal.jsonl:4: .*head -n 3 "):
        queue_of(tmp_path)


def test_a_record_that_cannot_be_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append([Submitted(at_s=0.0, job=training("a"))])
    journal.append([Rested(at_s=0.0, job="a", attempt=1)])
    journal.close()

    with pytest.raises(JournalError, match=r"journal.jsonl:3: .*a: Rested cannot be"):
        queue_of(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"journal":2}\n', "version 2"),
        (b"hello\n", "no journal"),
        (b"hello", "no journal"),
        (b'{"other":1}\n', "no journal"),
    ],
)
def test_another_file_is_not_touched(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)

    with pytest.raises(JournalError, match=words):
        Journal(path)
    with pytest.raises(JournalError, match=words):
        queue_of(tmp_path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("fails_at", ["half of a line", "fsync"])
def test_what_the_disk_refuses_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: str
) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append([Submitted(at_s=0.0, job=training("a"))])
    before = path.read_bytes()
    write, full = os.write, OSError(errno.ENOSPC, "No space left on device")

    def half(descriptor: int, content: bytes) -> int:
        if len(content) < 30:
            raise full
        return write(descriptor, content[: len(content) - 20])

    def refuse(_: int) -> None:
        raise full

    with monkeypatch.context() as patch:
        if fails_at == "fsync":
            patch.setattr(os, "fsync", refuse)
        else:
            patch.setattr(os, "write", half)
        with pytest.raises(OSError, match="No space"):
            journal.append([Submitted(at_s=0.0, job=training("b"))])
    assert path.read_bytes() == before

    journal.append([Submitted(at_s=0.0, job=training("c"))])
    assert list(queue_of(tmp_path).standings) == ["a", "c"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_SMALL_BYTES", 100)
    monkeypatch.setattr(journals, "_JOB_BYTES", 10)


@pytest.mark.usefixtures("small")
def test_a_compacted_journal_is_the_same_queue(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    scene = course(path)
    scene.take = Scene.take.__get__(scene)  # type: ignore[method-assign]
    journal = Journal(path)

    assert journal.compact(scene.queue)

    assert same(queue_of(tmp_path), scene.queue)
    scene.take(Said(at_s=9.0, id="m9", word=Word.CANCEL, job="eval", by="ann"))
    journal.append([scene.records[-1]])
    assert same(queue_of(tmp_path), scene.queue)
    assert list(records(path)) == scene.records[-1:]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("at", ["write", "fsync", "rename"])
def test_a_crash_while_compacting_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    path = tmp_path / "journal.jsonl"
    scene = course(path)
    content = path.read_bytes()
    journal = Journal(path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        target = Path if at == "rename" else os
        patch.setattr(target, "replace" if at == "rename" else at, refuse)
        with pytest.raises(OSError, match="No space"):
            journal.compact(scene.queue)

    assert path.read_bytes() == content
    journal.append([QueueHeld(at_s=0.0, reason="still writes")])
    assert queue_of(tmp_path).held == "still writes"


def test_what_a_killed_compaction_left_is_removed(tmp_path: Path) -> None:
    course(tmp_path / "journal.jsonl")
    (tmp_path / "journal.jsonl.new").write_bytes(b'{"journal":1}\n[{"ki')

    Journal(tmp_path / "journal.jsonl").close()

    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
