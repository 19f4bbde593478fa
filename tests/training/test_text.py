"""The user's own text: every byte is in its window, and what is no text is refused in one sentence."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from workers.training.text import TextData, TextError


@given(
    files=some.lists(
        some.binary(max_size=40).map(lambda each: each.replace(b"\0", b"a")), max_size=6
    ),
    seq=some.integers(1, 20),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_windows_are_the_files_one_after_the_other(
    files: list[bytes], seq: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("text")
    for number, content in enumerate(files):
        (folder / f"{number}.txt").write_bytes(content)
    stream = b"".join(files)
    if len(stream) <= seq:
        with pytest.raises(TextError):
            TextData(folder, seq)
        return
    data = pickle.loads(pickle.dumps(TextData(folder, seq)))  # noqa: S301 - as it goes to loader processes
    assert len(data) == (len(stream) - 1) // seq, "of so little text nothing is held out"
    for index in range(len(data)):
        assert data[index].dtype == torch.int64
        assert bytes(data[index].tolist()) == stream[index * seq : index * seq + seq + 1]
    with pytest.raises(IndexError):
        data[len(data)]


def test_a_folder_is_read_by_name_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b/a.txt", "a/z.txt", "a/.hidden", ".git/config", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    os.mkfifo(tmp_path / "pipe")
    data = TextData(tmp_path, 1)
    assert bytes(int(data[index][0]) for index in range(len(data))) == b"<c.txt><a/z.txt><b/a.txt"


@pytest.mark.parametrize(
    ("content", "seq", "words"),
    [
        (None, 4, "there is no {path}; name a text file, or a folder of them, on this machine"),
        (b"", 4, "{path} holds no text; name a file or folder that does"),
        (
            b"abcd",
            4,
            "{path} has 4 bytes, and one sample takes 5; give more text, or lower train.seq to 3 or less",
        ),
        (
            b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" * 9,
            4,
            (
                "{path} is no text (it has zero bytes, as images, archives and UTF-16 have); take it out, "
                "or convert it to UTF-8"
            ),
        ),
    ],
    ids=["missing", "empty", "short", "image"],
)
def test_what_cannot_be_trained_on_is_refused_in_one_sentence(
    tmp_path: Path, content: bytes | None, seq: int, words: str
) -> None:
    path = tmp_path / "data.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TextError) as refusal:
        TextData(path, seq)
    assert str(refusal.value) == "train.data: " + words.format(path=path)


def test_files_that_change_under_the_training_end_no_process(tmp_path: Path) -> None:
    path = tmp_path / "data.txt"
    path.write_text("a" * 100_000)
    data = TextData(path, 10)
    before = data.fingerprint
    path.write_text("b" * 99)
    assert data[0].eq(ord("b")).all()
    with pytest.raises(TextError, match="became shorter while it was trained on"):
        data[9]
    assert TextData(path, 10).fingerprint != before
    path.unlink()
    with pytest.raises(TextError, match="cannot be read any more: No such file"):
        data[0]
