"""Documents of a user's text: bytes and pieces, levers that keep the loss, changed files."""

from __future__ import annotations

import codecs
import json
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from torch import Tensor

from tests.training.scene import CPU, in_shared_memory, replay
from workers.training import text as text_module
from workers.training.errors import TaskError
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, find_task, next_token_loss
from workers.training.text import SAMPLES, TextBytes, held_out
from workers.training.trainer import Trainer
from workers.units import MIB

#: `bucketing` sorts pools of 72 of the 288 lines, so an epoch has whole pools. With fewer than 320
#: lines nothing is held out.
LINES, BATCH = 288, 12


@dataclass(frozen=True)
class File:
    """The lines of a file with their ends; a byte order mark may be first, and an end missing."""

    marked: bool
    json: bool
    lines: list[tuple[str, bytes]]
    ended: bool

    def content(self) -> bytes:
        lines = [
            (json.dumps({"text": text}) if self.json else text).encode() + end
            for text, end in self.lines
        ]
        last = lines[-1:] if self.ended else [each.rstrip(b"\r\n") for each in lines[-1:]]
        return b"".join([codecs.BOM_UTF8 * self.marked, *lines[:-1], *last])


WORDS = some.text(alphabet="ab é", max_size=30)
FILES = some.lists(
    some.builds(
        File,
        marked=some.booleans(),
        json=some.booleans(),
        lines=some.lists(some.tuples(WORDS, some.sampled_from([b"\n", b"\r\n"])), max_size=6),
        ended=some.booleans(),
    ),
    max_size=4,
)


def tokens(data: Any) -> list[bytes]:
    return [bytes(data[index].tolist()) for index in range(len(data))]


def written(folder: Path, lines: int = LINES, longest: int = 90) -> Path:
    """Write lines of generated words, with unequal lengths."""
    texts = [
        " ".join(
            f"word{(place * line * 7) % 23}" for place in range(1 + line * 37 % (longest // 6))
        )
        for line in range(lines)
    ]
    path = folder / "texts.txt"
    path.write_text("\n".join(texts) + "\n")
    return path


def chosen(path: Path, **keys: Any) -> TrainSettings:
    usual: dict[str, Any] = {
        "preset": "gpt-nano",
        "seq": 32,
        "batch": BATCH,
        "steps": 8,
        "precision": "fp32",
        "data": str(path),
        "documents": "lines",
    }
    return TrainSettings(**(usual | keys))


def training(path: Path, **keys: Any) -> Trainer:
    wanted = chosen(path, **keys)
    return Trainer(find_task(wanted, 0), wanted, CPU, 0)


@given(files=FILES, seq=some.integers(2, 9), unit=some.sampled_from(["windows", "lines"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_samples_are_the_lines_or_the_files_one_after_the_other_cut_at_seq(
    files: list[File], seq: int, unit: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("text")
    for number, each in enumerate(files):
        (folder / f"{number}.{'jsonl' if each.json else 'txt'}").write_bytes(each.content())
    documents = [text.encode() for each in files for text, _ in each.lines]
    if unit == "windows":
        documents = [b"".join(each.content().removeprefix(codecs.BOM_UTF8) for each in files)]
    pieces = [text[at : at + seq + 1] for text in documents for at in range(0, len(text) - 1, seq)]
    if unit == "windows":  # a shorter window at the end is left out
        pieces = [each for each in pieces if len(each) == seq + 1]
    if not pieces:
        with pytest.raises(TaskError):
            TextBytes(folder, seq, unit)
        return
    data = pickle.loads(pickle.dumps(TextBytes(folder, seq, unit)))  # noqa: S301 - as it goes to loaders
    assert tokens(data) == pieces, "of so little text nothing is held out"
    assert data[0].dtype == torch.int64
    assert data.lengths(range(len(data))) == [len(each) for each in pieces]


def test_each_file_is_a_document(tmp_path: Path) -> None:
    for name, content in {
        "a.txt": "abcdefg\n",
        "b.jsonl": '{"text": 1}',
        "c": "x",
        "d/e": "yz",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert tokens(TextBytes(tmp_path, 4, "files")) == [
        b"abcde",
        b"efg\n",
        b'{"tex',
        b'xt": ',
        b" 1}",
        b"yz",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "cut', "is no JSON (Unterminated string starting at, column 10); correct"),
        (
            '{"body": "b", "id": 1}',
            """has no "text" that is a string (it has the keys 'body', 'id')""",
        ),
        ('["text"]', "is no JSON object; correct the line, or take it out"),
    ],
    ids=["broken", "other keys", "list"],
)
def test_a_line_of_json_without_a_text_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"text": "good"}}\n\n{line}\n')
    with pytest.raises(TaskError) as refusal:
        find_task(chosen(path), 0)
    assert str(refusal.value).startswith(f"train.data: line 3 of {path} {words}")
    assert str(refusal.value).endswith('valid: {"text": "a document"}')


def test_a_line_of_json_is_not_read_without_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "LONGEST_LINE_BYTES", MIB)
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"text": "a" * MIB}))
    with pytest.raises(TaskError, match=r"line 1 of .*mine\.jsonl is longer than 1 MiB; divide it"):
        TextBytes(path, 8, "lines")


def test_a_text_is_read_once_on_a_pc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of several processes reads it, or the next if the first was killed or failed."""
    path = written(tmp_path)
    path.rename(path := path.with_suffix(".jsonl"))
    path.write_text("".join(json.dumps({"text": f"line {row}"}) + "\n" for row in range(999)))
    read, usual = list[str](), text_module.objects_of

    def objects_of(*given: Any) -> Any:
        read.append("begun")
        yield from usual(*given)
        if len(read) == 1:
            raise MemoryError

    monkeypatch.setattr(text_module, "objects_of", objects_of)
    with pytest.raises(MemoryError):
        TextBytes(path, 8, "lines")
    whole = [tokens(TextBytes(path, 8, "lines")) for _ in range(3)]
    assert len(read) == 2
    assert whole[0] == whole[1] == whole[2] != []


def test_tokens_are_in_no_memory_that_a_cap_counts(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "a document"}\n' * 9)
    data = TextBytes(path, 8, "lines")
    assert in_shared_memory(data._samples[0])
    assert in_shared_memory(data._samples._samples)


def test_tokens_that_nobody_opened_for_a_month_are_removed(tmp_path: Path, state_dir: Path) -> None:
    path = written(tmp_path)

    def kept() -> set[Path]:
        return {each for each in (state_dir / "tokens").iterdir() if each.is_dir()}

    TextBytes(path, 8, "lines")
    (old,) = kept()
    TextBytes(path, 9, "lines")
    (other,) = kept() - {old}
    for each in (old, other):
        os.utime(each, (1, 1))
    TextBytes(path, 9, "lines")
    TextBytes(path, 10, "lines")
    assert other in kept()
    assert old not in kept()


def test_a_full_disk_is_told_in_one_sentence(tmp_path: Path, state_dir: Path) -> None:
    (state_dir / "tokens").write_text("no folder")
    with pytest.raises(TaskError, match=r"cannot be kept in .*; free its disk, or name another"):
        TextBytes(written(tmp_path), 8, "lines")


def test_another_division_of_a_text_is_another_training(tmp_path: Path) -> None:
    path = written(tmp_path)
    found = [training(path, documents=unit).identity for unit in ("windows", "files", "lines")]
    assert len({each.levers["data_fingerprint"] for each in found}) == 3


def losses_of_an_epoch(
    task: TrainTask, batches: list[Tensor], model: torch.nn.Module
) -> tuple[float, int]:
    """Return the loss per token of all batches, and the number of tokens."""
    with torch.no_grad():
        count = sum(task.count(batch) for batch in batches)
        return sum(float(task.loss(model, batch)) for batch in batches) / count, count


def test_filled_up_bucketed_and_packed_epochs_have_one_loss(tmp_path: Path) -> None:
    path = written(tmp_path, longest=54)  # short enough that no line is cut
    plain, bucketed = (training(path, seq=64, bucketing=each) for each in (False, True))
    assert len(plain.task.dataset) == LINES
    batches, wide = [list[Tensor](), list[Tensor]()], []
    for run, found in zip((plain, bucketed), batches, strict=True):
        for _ in range(LINES // BATCH):
            run._feed.take()
            found.append(run._feed.batch)
        wide.append(sum(each[:, 1:].numel() for each in found))
    packed = find_task(chosen(path, seq=64, packing=True), 0)
    rows = packed.dataset.__getitems__(range(len(packed.dataset)))  # type: ignore[attr-defined]
    model = plain.model.eval()
    alone, count = losses_of_an_epoch(plain.task, batches[0], model)
    for task, of_lever in ((bucketed.task, batches[1]), (packed, [torch.stack(rows)])):
        loss, tokens_of_lever = losses_of_an_epoch(task, of_lever, model)
        assert tokens_of_lever == count
        assert abs(loss / alone - 1) <= 1e-6
    assert wide[1] < 0.75 * wide[0], "bucketing fills up less"
    assert len(rows) < 0.6 * LINES, "several documents share a row"


@pytest.mark.parametrize("lever", ["none", "bucketing", "packing"])
def test_a_training_on_lines_goes_on_in_the_middle_of_an_epoch(tmp_path: Path, lever: str) -> None:
    path = written(tmp_path)
    keys = {} if lever == "none" else {lever: True}
    whole, first = training(path, dropout=0.1, **keys), training(path, dropout=0.1, **keys)
    replay(whole, [[5, 0, 8 * 3]])
    assert whole.finished
    replay(first, [[5, 0, 3 * 3]])
    second = training(path, dropout=0.1, loader_workers=1, **keys)
    second.load(pickle.loads(pickle.dumps(first.state())))  # noqa: S301 - our own
    replay(second, [[5, 0, 5 * 3]])
    second.close()
    assert second.weights_sha256() == whole.weights_sha256()
    other_parts = training(path, dropout=0.1, **keys)
    replay(other_parts, [[BATCH, 0, 8]])
    for one, other in zip(whole.course.losses, other_parts.course.losses, strict=True):
        assert abs(one / other - 1) <= 1e-6


@pytest.mark.parametrize("unit", ["windows", "lines"])
def test_held_out_samples_are_evaluated_and_never_trained_on(tmp_path: Path, unit: str) -> None:
    path = written(tmp_path, lines=1_000)
    content = path.read_bytes()
    run = training(path, documents=unit, seq=64)
    data = run.task.dataset
    trained = tokens(data)
    held = [bytes(each.tolist()) for each in data.validation_samples()]
    assert len(held) == SAMPLES
    if unit == "windows":
        last = [content[at : at + 65] for at in range(64 * len(data), len(content) - 64, 64)]
        assert len(last) == SAMPLES
        assert held == last
    else:
        texts = [line for line in content.splitlines() if len(line) > 1]
        pieces = [text[at : at + 65] for text in texts for at in range(0, len(text) - 1, 64)]
        assert trained + held == pieces
    figures = run.evaluate()
    model = run.model.eval()
    with torch.no_grad():
        total = sum(float(next_token_loss(model, each[None])) for each in data.validation_samples())
    assert figures == {
        "validation_loss": pytest.approx(total / sum(len(each) - 1 for each in held), rel=1e-6)
    }


def test_of_little_text_nothing_is_held_out_and_evaluated(tmp_path: Path) -> None:
    sizes = {1: 0, 319: 0, 320: SAMPLES, 3_200: SAMPLES, 100_000: 1_000}
    assert {samples: len(held_out(samples)) for samples in sizes} == sizes
    assert held_out(100_000) == range(99_000, 100_000)
    run = training(written(tmp_path, longest=30))
    assert len(run.task.dataset) == LINES
    assert run.evaluate() == {}


def test_a_folder_is_read_by_name_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b/a.txt", "a/z.txt", "a/.hidden", ".git/config", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    os.mkfifo(tmp_path / "pipe")
    data = TextBytes(tmp_path, 1)
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
    with pytest.raises(TaskError) as refusal:
        TextBytes(path, seq)
    assert str(refusal.value) == "train.data: " + words.format(path=path)


@pytest.mark.parametrize("content", [b"b" * 99, b"b" * 100_000], ids=["shorter", "as long"])
def test_files_that_change_under_a_training_change_nothing_of_it(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "data.txt"
    path.write_text("a" * 100_000)
    data, unread = TextBytes(path, 10), TextBytes(path, 11)
    before = data.fingerprint
    assert data[0].eq(ord("a")).all()
    path.write_bytes(content)
    os.utime(path, (1, 1))
    assert data[len(data) - 1].eq(ord("a")).all(), "the copy is trained on to the end"
    with pytest.raises(TaskError, match=r"data\.txt was changed while being read; start again"):
        unread[0]
    assert (TextBytes(path, 10).fingerprint == before) == (len(content) == 100_000)
    path.unlink()
    with pytest.raises(TaskError, match="cannot be read: No such file"):
        unread[0]
