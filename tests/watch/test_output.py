"""The output of workers, as the run folder keeps it and `logs` shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.record.output import Follower, OutputFiles, cleaned, last_lines
from tests.factories import status_of
from workers.messages import PrintedOutput, Status

STATUS = status_of("pc1/3")


def told(text: str, dropped_bytes: int = 0) -> Status:
    return replace(STATUS, output=PrintedOutput(text=text, dropped_bytes=dropped_bytes))


@pytest.mark.parametrize(
    ("printed", "kept"),
    [
        ("\x1b[2J\x1b[1;31mred\x1b[0m\n", "red\n"),
        ("\x1b]0;title\x07a\x1b]52;c;c2VjcmV0\x1b\\b", "ab"),
        ("\x9b31mc\x1bc\x07\x00d", "c\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}d"),
        ("one\r\ntwo", "one\ntwo"),
        ("\r10%\r20%\nend\r", "\n20%\n"),
        ("a\u202eb\tc", "a\N{REPLACEMENT CHARACTER}b\tc"),
    ],
    ids=["colours", "title and clipboard", "c1", "dos", "bar", "bidi"],
)
def test_what_steers_a_terminal_is_taken_out(printed: str, kept: str) -> None:
    assert cleaned(printed) == kept


def test_a_long_line_without_an_end_is_cleaned_at_once() -> None:
    """A pattern that tries again at each character would need time of the order (16 KiB)^2."""
    assert len(cleaned("\x1b]" * 8_000 + "x" * 2**20)) < 2**21


def test_a_slot_keeps_its_newest_mib_and_says_what_it_dropped(tmp_path: Path) -> None:
    files = OutputFiles(tmp_path)
    for number in range(200):
        files.take(
            told(
                f"status {number}\n" + ("x" * 99 + "\n") * 160,
                dropped_bytes=5 if number == 199 else 0,
            )
        )
    kept = list((tmp_path / "output" / "pc1").iterdir())
    assert {path.name for path in kept} == {"3.log", "3.log.1"}
    assert 2**19 < sum(path.stat().st_size for path in kept) <= 2**20
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    lines = last_lines(tmp_path, "pc1/3", 170)
    assert len(lines) == 170
    assert "[5 bytes printed before this are missing: a status has no room for them]" in lines
    files.take(STATUS)
    assert last_lines(tmp_path, "pc1/3", 170) == lines


def test_no_name_of_a_slot_leads_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.log").write_text("secret")
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "link.log").symlink_to(tmp_path / "secret.log")
    for name in ("../secret", str(tmp_path / "secret"), "link", "", "a\x00b"):
        assert last_lines(tmp_path, name) == []


def test_a_folder_that_cannot_be_written_costs_only_the_output(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("in the way")
    files = OutputFiles(tmp_path)
    files.take(told("lost"))
    assert files.problem is not None
    assert "File exists" in files.problem or "Not a directory" in files.problem


def test_a_follower_has_every_line_once_also_where_files_change(tmp_path: Path) -> None:
    files, follower = OutputFiles(tmp_path), Follower(tmp_path, "pc1/3")
    assert follower.more() == ""
    lines = [f"line {number} " + "x" * 99 + "\n" for number in range(20_000)]
    followed = ""
    for begin in range(0, len(lines), 1_000):
        files.take(told("".join(lines[begin : begin + 1_000])))
        if begin % 2_000 == 0:
            followed += follower.more()
    files.take(told("the end"))
    followed += follower.more()
    assert followed == "".join(lines)
    assert follower.more(is_last=True) == "the end"
