"""The user's own text: a file, or all files of a folder one after the other, as windows or as
documents of bytes.

A window has `seq` + 1 bytes and ignores the ends of lines and files. A document is a whole file or
a line. In a file named .jsonl a line is a JSON object, and the document is its "text". A document
longer than a sample is cut into pieces like windows. Documents of less than two bytes are left out:
nothing in them can be predicted.

The vocabulary is the 256 values of a byte. A text is copied once per PC, when its first sample is
read. The user's files are not mapped: reading a mapped file that became shorter would kill the
process. A byte order mark, which Windows editors write, is not part of the text.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from workers.training.batches import Samples
from workers.training.errors import TaskError
from workers.training.settings import Documents
from workers.training.token_files import SampleWriter, TokenSamples, TokenType, written_once
from workers.units import MIB

#: Bytes of each file that are checked for zero bytes, which images, archives, programs and UTF-16
#: have.
_CHECKED_BYTES: Final = 65_536

#: Number of samples for validation. At least this many are held out, and none if the text has less
#: than ten times as many.
SAMPLES: Final = 32
_HELD_OUT_SHARE: Final = 100

#: Limit for lines that are parsed, which are read as a whole.
LONGEST_LINE_BYTES: Final = 64 * MIB

#: Bytes of other text that are read at once.
_PART_BYTES: Final = MIB

_VALID: Final = 'valid: {"text": "a document"}'


class TextFiles:
    """A file, or all files of a folder, in the order of their names.

    Raises:
        TaskError: There is no file, it cannot be read, or it is not text.
    """

    def __init__(self, path: str | Path) -> None:
        """Check the files."""
        self.root = Path(path).expanduser()
        self._checked = {path: _check_file(path) for path in _files_below(self.root)}
        self.paths = list(self._checked)
        self.total = sum(size for size, _ in self._checked.values())
        """Bytes of text in all files."""
        if self.total == 0:
            raise TaskError(
                f"train.data: {self.root} holds no text; name a file or folder that does"
            )

    def fingerprint(self) -> str:
        """Return a hash that changes when a file is added or removed, or changes its length."""
        digest, end = hashlib.blake2b(digest_size=8), 0
        for file, (size, _) in self._checked.items():
            end += size
            digest.update(f"{file.relative_to(self.root)} {end}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def written(
        self,
        key: object,
        columns: Mapping[str, TokenType],
        write: Callable[..., None],
        *,
        seq: int | None = None,
    ) -> dict[str, TokenSamples]:
        """Return what `write` makes of these files as they are now; see `written_once`.

        Raises:
            TaskError: A file was changed meanwhile.
        """
        versions = [(str(path), *version) for path, (_, version) in self._checked.items()]

        def write_of_same(*writers: SampleWriter) -> None:
            write(*writers)
            for path, checked in self._checked.items():
                if _check_file(path) != checked:
                    raise TaskError(f"train.data: {path} was changed while being read; start again")

        return written_once((key, versions), columns, write_of_same, seq=seq)


def _files_below(root: Path) -> Iterator[Path]:
    """Yield the files except hidden ones, in an order that is the same on every machine."""
    if root.is_file():
        yield root
        return
    if not root.exists():
        raise TaskError(
            f"train.data: there is no {root}; name a text file, or a folder of them, on this "
            "machine"
        )
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _raise_unreadable(failure: OSError) -> None:
    with _reading(failure.filename):
        raise failure


def _check_file(path: Path) -> tuple[int, tuple[int, int]]:
    """Return the number of bytes of text in a file, and its version: length and time."""
    with _reading(path), path.open("rb") as file:
        first, found = file.read(_CHECKED_BYTES), os.fstat(file.fileno())
    if b"\0" in first:
        raise TaskError(
            f"train.data: {path} is no text (it has zero bytes, as images, archives and UTF-16 "
            "have); take it out, or convert it to UTF-8"
        )
    mark = len(codecs.BOM_UTF8) if first.startswith(codecs.BOM_UTF8) else 0
    return found.st_size - mark, (found.st_size, found.st_mtime_ns)


def _parts_of(path: Path, most_bytes: int, *, by_line: bool = True) -> Iterator[bytes]:
    """Yield the text of a file in parts of at most `most_bytes`, and of one line if `by_line`."""
    with _reading(path), path.open("rb") as file:
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        read = file.readline if by_line else file.read
        yield from iter(lambda: read(most_bytes), b"")


@contextmanager
def _reading(path: object) -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise TaskError(
            f"train.data: {path} cannot be read: {failure.strerror or failure}"
        ) from failure


def lines_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file, each with its place for messages.

    Raises:
        TaskError: The file cannot be read, or a line is too long.
    """
    for number, line in enumerate(_parts_of(path, LONGEST_LINE_BYTES + 1), 1):
        where = f"line {number} of {path}"
        if len(line) > LONGEST_LINE_BYTES:
            raise TaskError(
                f"train.data: {where} is longer than {LONGEST_LINE_BYTES // MIB} MiB; divide it"
            )
        yield where, line


def texts_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file as `str`, each with its place for messages.

    Raises:
        TaskError: See `lines_of`; or a line is not in UTF-8.
    """
    for where, line in lines_of(path):
        try:
            yield where, line.decode()
        except UnicodeDecodeError as failure:
            raise TaskError(
                f"train.data: {where} is not in UTF-8 ({failure.reason}); convert the file"
            ) from failure


def objects_of(path: Path, advice: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects in the lines of a JSON lines file; empty lines are skipped.

    Raises:
        TaskError: A line holds no object.
    """
    for where, whole in texts_of(path):
        if not (line := whole.strip()):
            continue
        try:
            content = json.loads(line)
            if "\\u" in line:  # an escape may be half of a surrogate pair
                json.dumps(content, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as failure:
            why: object = failure
            if isinstance(failure, json.JSONDecodeError):
                why = f"{failure.msg}, column {failure.colno}"
            raise TaskError(f"train.data: {where} is no JSON ({why}); {advice}") from failure
        if not isinstance(content, dict):
            raise TaskError(f"train.data: {where} is no JSON object; {advice}")
        yield where, content


def finite(text: str) -> float:
    """Parse a finite number.

    Raises:
        ValueError: It is no number, NaN or infinite; the argument is the text.
    """
    with suppress(ValueError):
        if isfinite(number := float(text)):
            return number
    raise ValueError(text)


def held_out(samples: int) -> range:
    """Return the samples that are never trained on: the last 1 %, or none if there are few."""
    count = 0 if samples < 10 * SAMPLES else max(SAMPLES, samples // _HELD_OUT_SHARE)
    return range(samples - count, samples)


class HeldOut(Samples):
    """Samples, the last of which are held out if there are enough."""

    holds_out = True

    def __len__(self) -> int:
        return self._held.start

    def __getitems__(self, keys: Sequence[Any]) -> list[Any]:
        """Return several samples.

        Raises:
            TaskError: The samples cannot be written; see `TextFiles.written`.
        """
        return [self._sample(key) for key in keys]

    def validation_samples(self) -> Iterator[Any]:
        """Yield up to `SAMPLES` held-out samples, evenly spread; none if none are held out."""
        count = min(SAMPLES, len(self._held))
        places = (place * len(self._held) // count for place in range(count))
        return (self._sample(self._held[place]) for place in places)

    def all(self) -> Iterator[Any]:
        """Yield all samples that are not held out."""
        return map(self._sample, range(len(self)))

    @property
    def _held(self) -> range:
        count = self._count()
        return held_out(count) if self.holds_out else range(count, count)

    def _count(self) -> int:
        """Return the number of samples, held-out ones included."""
        raise NotImplementedError

    def _sample(self, index: int) -> Any:  # noqa: ANN401 - of any form
        raise NotImplementedError


class TextBytes(HeldOut):
    """Windows at intervals of `seq`: each byte except the first is predicted once in an epoch. Or
    documents, and pieces of those longer than `seq` + 1 bytes.

    Raises:
        TaskError: There is no text or document, a text shorter than a window, or a malformed line.
    """

    def __init__(self, path: str | Path, seq: int, unit: Documents = "windows") -> None:
        """Check the files, and find the documents; the first process on a PC reads them."""
        self._files = files = TextFiles(path)
        self._seq, self._unit = seq, unit
        if unit == "windows" and files.total <= seq:
            raise TaskError(
                f"train.data: {files.root} has {files.total} bytes, and one sample takes "
                f"{seq + 1}; give more text, or lower train.seq to {max(2, files.total - 1)} or "
                "less"
            )
        if not self._count():
            raise TaskError(
                f"train.data: no {unit.removesuffix('s')} of {files.root} has two bytes or more; "
                "name a file or folder with text in it"
            )
        self.fingerprint = f"{unit} {files.fingerprint()} {len(self)}"
        """Changes when a file is added or removed or changes its length, or the held-out part does.
        """

    @property
    def key(self) -> str:
        """Changes with the content."""
        return self._samples.folder.name

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Return the lengths of samples in bytes."""
        return self._samples.lengths(indices)

    def _count(self) -> int:
        # Known for windows before they are written; a shorter one at the end is left out.
        windows = (self._files.total - 1) // self._seq
        return windows if self._unit == "windows" else len(self._samples)

    def _sample(self, index: int) -> Tensor:
        return self._samples[index].long()

    @cached_property
    def _samples(self) -> TokenSamples:
        key = ("bytes", self._unit, self._seq)
        return self._files.written(key, {"text": "uint8"}, self._write, seq=self._seq)["text"]

    def _write(self, writer: SampleWriter) -> None:
        for path in self._files.paths:
            if self._unit == "lines" and path.suffix == ".jsonl":
                _write_json(path, writer)
            elif self._unit == "lines":
                for _, line in lines_of(path):
                    writer.add(line.removesuffix(b"\n").removesuffix(b"\r"))
                    writer.end()
            else:
                for part in _parts_of(path, _PART_BYTES, by_line=False):
                    writer.add(part)
                if self._unit == "files":
                    writer.end()
        writer.end()


def _write_json(path: Path, writer: SampleWriter) -> None:
    """Write the texts in the lines of a JSON lines file.

    Raises:
        TaskError: A line has no text.
    """
    for where, content in objects_of(path, f"correct the line, or take it out; {_VALID}"):
        text = content.get("text")
        if not isinstance(text, str):
            has = f"the keys {', '.join(map(repr, content))}"[:200]
            raise TaskError(
                f'train.data: {where} has no "text" that is a string (it has {has}); {_VALID}'
            )
        writer.add(text.encode())
        writer.end()
