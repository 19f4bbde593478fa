"""The user's own text: a file, or all files of a folder one after the other, as windows or as
documents.

A window has `seq` + 1 bytes, wherever lines and files end. A document is a whole file or a line; in
a file named .jsonl a line is a JSON object, and the document its "text". One that is longer than a
sample is cut into pieces as windows are. Documents of less than two bytes are left out: nothing in
them can be predicted.

The vocabulary is the 256 values of a byte. The text itself is not held: a sample is read from its
file when it is used. Files are not mapped: reading a mapped file that became shorter would end the
process. What is held of documents is an index, 8 bytes for each piece.

A byte order mark, with which editors of Windows begin a file, is no part of its text: places are
counted from the byte after it.
"""

from __future__ import annotations

import bisect
import codecs
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, Literal

import torch
from torch import Tensor

from workers.training.batches import Samples
from workers.training.errors import TaskError
from workers.training.host_memory import HostArray
from workers.units import MIB

#: Read of each file to see whether it is text. Images, archives, programs and UTF-16 have a zero
#: byte in it.
_LOOK_BYTES: Final = 65_536

#: Samples that are evaluated. Held out are at least so many, and none of a text that has less than
#: ten times as many.
SAMPLES: Final = 32
_HELD_OUT_SHARE: Final = 100

#: Of a number in an index: the length of the piece, at most `seq` + 1. The other bits are its place
#: in the stream.
_LENGTH_BITS: Final = 21
_LENGTH: Final = 2**_LENGTH_BITS - 1

_PART_BYTES: Final = MIB

#: Put into the index together.
_PIECES: Final = 262_144

#: Lines of JSON that are cut together.
_LINES: Final = 65_536

#: A line of JSON is read as a whole.
_LONGEST_LINE_BYTES: Final = 256 * MIB


_VALID: Final = 'valid: {"text": "a document"}'


class TextError(TaskError):
    """There is no text to train on; the message says where, why and what to do."""


def _unreadable(path: object, failure: OSError, when: str = "") -> TextError:
    return TextError(f"train.data: {path} cannot be read{when}: {failure.strerror}")


class TextFiles:
    """A file, or all files of a folder, as one stream of bytes.

    Raises:
        TextError: Nothing is there, it cannot be read, or it is no text.
    """

    def __init__(self, path: str | Path) -> None:
        """Look at the files; their bytes are read when they are used."""
        self.root = Path(path).expanduser()
        self.paths = list(_files_below(self.root))
        self.ends = list(itertools.accumulate(map(_size_of_text, self.paths)))
        """Where each file ends in the stream."""
        self.total = self.ends[-1] if self.ends else 0
        if self.total == 0:
            raise TextError(
                f"train.data: {self.root} holds no text; name a file or folder that does"
            )

    def place(self, start: int) -> tuple[Path, int, int]:
        """Return the file of a byte of the stream, its place there, and how many bytes follow."""
        number = bisect.bisect_right(self.ends, start)
        begin = self.ends[number - 1] if number else 0
        return self.paths[number], start - begin, self.ends[number] - start

    def read(self, start: int, count: int) -> bytearray:
        """Return bytes of the stream.

        Raises:
            TextError: A file has become shorter, or cannot be read any more.
        """
        pieces = bytearray()
        while count:
            path, offset, left = self.place(start)
            here = min(count, left)
            piece = _read_at(path, offset, here)
            if len(piece) < here:
                raise TextError(
                    f"train.data: {path} became shorter while it was trained on; put it back, or "
                    "begin anew"
                )
            pieces += piece
            start, count = start + here, count - here
        return pieces

    def fingerprint(self) -> str:
        """Return what changes when a file is added, removed or changes its length."""
        digest = hashlib.blake2b(digest_size=8)
        for file, end in zip(self.paths, self.ends, strict=True):
            digest.update(f"{file.relative_to(self.root)} {end}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()


def _files_below(root: Path) -> Iterator[Path]:
    """Yield the files, but hidden ones, in an order that every machine agrees on."""
    if root.is_file():
        yield root
        return
    if not root.exists():
        raise TextError(
            f"train.data: there is no {root}; name a text file, or a folder of them, on this "
            "machine"
        )
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _refuse(failure: OSError) -> None:
    raise _unreadable(failure.filename, failure) from failure


def _size_of_text(path: Path) -> int:
    try:
        with path.open("rb") as file:
            if b"\0" not in file.read(_LOOK_BYTES):
                return file.seek(0, os.SEEK_END) - _begin_of(file)
    except OSError as failure:
        raise _unreadable(path, failure) from failure
    raise TextError(
        f"train.data: {path} is no text (it has zero bytes, as images, archives and UTF-16 have); "
        "take it out, or convert it to UTF-8"
    )


def _begin_of(file: IO[bytes]) -> int:
    """Return the place of a file's first byte of text."""
    mark = codecs.BOM_UTF8
    return len(mark) if os.pread(file.fileno(), len(mark), 0) == mark else 0


def _read_at(path: Path, offset: int, count: int) -> bytes:
    """Return bytes of a file's text, fewer where it ends."""
    try:
        with path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), count, _begin_of(file) + offset)
    except OSError as failure:
        raise _unreadable(path, failure, " any more") from failure


def held_out(samples: int) -> range:
    """Return which of so many samples are never trained on: the last 1 %, and none of few."""
    count = 0 if samples < 10 * SAMPLES else max(SAMPLES, samples // _HELD_OUT_SHARE)
    return range(samples - count, samples)


def evaluated(held: range) -> list[int]:
    """Return which of the samples that are held out are evaluated, evenly spread."""
    count = min(SAMPLES, len(held))
    return [held[place * len(held) // count] for place in range(count)]


class _TextSamples(Samples):
    """Samples of a text by their number; the last ones are held out where there are enough."""

    def _hold_out(self, samples: int) -> None:
        held = held_out(samples)
        self._items = held.start
        self.held_out = [self._piece(place) for place in evaluated(held)]
        """Some that are never trained on, evenly spread; none: the text is too short for that."""

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Return several as int64.

        Raises:
            IndexError: There are fewer.
            TextError: A file has changed since the training began.
        """
        if not all(0 <= index < self._items for index in indices):
            raise IndexError(indices)
        return [self._piece(index) for index in indices]

    def _piece(self, index: int) -> Tensor:
        return torch.frombuffer(self._content(index), dtype=torch.uint8).long()

    def _content(self, index: int) -> bytearray:
        raise NotImplementedError


class TextData(_TextSamples):
    """Windows, `seq` apart: each byte but the first is predicted once in an epoch.

    Raises:
        TextError: There is no text, or it is shorter than one window.
    """

    def __init__(self, path: str | Path, seq: int) -> None:
        """Look at the files."""
        self._files = files = TextFiles(path)
        self._seq = seq
        if files.total <= seq:
            raise TextError(
                f"train.data: {files.root} has {files.total} bytes, and one sample takes "
                f"{seq + 1}; give more text, or lower train.seq to {max(2, files.total - 1)} or "
                "less"
            )
        self._hold_out((files.total - 1) // seq)
        self.fingerprint = f"windows {files.fingerprint()} {self._items}"
        """What changes when windows get other numbers, or others are held out."""

    def _content(self, index: int) -> bytearray:
        return self._files.read(index * self._seq, self._seq + 1)


class TextDocuments(_TextSamples):
    """Documents, and pieces of those that are longer than `seq` + 1 bytes.

    Raises:
        TextError: There is no text, no document in it, or a line that is none.
    """

    def __init__(self, path: str | Path, seq: int, unit: Literal["files", "lines"]) -> None:
        """Find the documents; of lines that takes one pass over all files."""
        self._files = files = TextFiles(path)
        self._seq = seq
        self._unit = unit
        find = _index_of_lines if unit == "lines" else _index_of_files
        self._index = find(files, seq)
        if not len(self._index):
            raise TextError(
                f"train.data: no {unit.removesuffix('s')} of {files.root} has two bytes or more; "
                "name a file or folder with text in it"
            )
        self._hold_out(len(self._index))
        self.fingerprint = f"{unit} {files.fingerprint()} {self._items}"
        """What changes when a file is added, removed or changes its length."""

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Return how many bytes these pieces have."""
        lengths: list[int] = (self._index[torch.as_tensor(indices)] & _LENGTH).tolist()
        return lengths

    def _content(self, index: int) -> bytearray:
        start, length = piece_of(self._index, index)
        path, offset, _ = self._files.place(start)
        if self._unit == "files" or path.suffix != ".jsonl":
            return self._files.read(start, length)
        # Pieces of a line have one start.
        first = int(torch.searchsorted(self._index, start << _LENGTH_BITS))
        begin = (index - first) * self._seq
        try:
            with path.open("rb") as file:
                file.seek(_begin_of(file) + offset)
                text = _text_of(file.readline(_LONGEST_LINE_BYTES), "")
        except OSError as failure:
            raise _unreadable(path, failure, " any more") from failure
        except TextError:
            text = b""
        content = bytearray(text[begin : begin + length])
        if len(content) < length:
            raise TextError(
                f"train.data: {path} was changed while it was trained on: the line at byte "
                f"{offset} is not the one that was there; put it back, or begin anew"
            )
        return content


def _index_of_files(files: TextFiles, seq: int) -> Tensor:
    """Return the pieces of all files, without reading them."""
    index = HostArray(torch.int64)
    ends = torch.tensor([0, *files.ends])
    for pieces in pieces_of(ends[:-1], ends.diff(), seq, step=seq):
        index.extend(pieces)
    return index.whole()


def _index_of_lines(files: TextFiles, seq: int) -> Tensor:
    """Return the pieces of all lines.

    Raises:
        TextError: A file cannot be read, or a line of JSON has no text.
    """
    index = HostArray(torch.int64)
    for path, first, end in zip(files.paths, [0, *files.ends[:-1]], files.ends, strict=True):
        parse, step = (_json_lines, 0) if path.suffix == ".jsonl" else (_lines, seq)
        try:
            for starts, lengths in parse(path, end - first):
                for pieces in pieces_of(first + starts, lengths, seq, step=step):
                    index.extend(pieces)
        except OSError as failure:
            raise _unreadable(path, failure) from failure
    return index.whole()


def pieces_of(starts: Tensor, lengths: Tensor, seq: int, *, step: int) -> Iterator[Tensor]:
    """Yield the pieces of documents.

    A piece begins `step` bytes after the one before it, or with 0 where its document does.
    """
    counts = (lengths + seq - 2) // seq  # each byte but the first is predicted in one piece
    ends = counts.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    for first in range(0, total, _PIECES):
        pieces = torch.arange(first, min(first + _PIECES, total))
        document = torch.searchsorted(ends, pieces, right=True)
        place = pieces - (ends - counts)[document]
        length = (lengths[document] - place * seq).clamp(max=seq + 1)
        yield (starts[document] + place * step << _LENGTH_BITS) | length


def piece_of(pieces: Tensor, index: int) -> tuple[int, int]:
    """Return start and length of one of the pieces."""
    entry = int(pieces[index])
    return entry >> _LENGTH_BITS, entry & _LENGTH


def _lines(path: Path, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the lines in the first `size` bytes of a text, part by part: starts and lengths.

    The lengths are without the ends of the lines. What another program adds meanwhile is left out.
    """
    begin = carried = 0
    returned = False  # whether what was read so far ends with a carriage return
    with path.open("rb", buffering=0) as file:
        file.seek(_begin_of(file))
        part = b" "
        while part:
            part = file.read(min(_PART_BYTES, size))
            size -= len(part)
            # What is left at the end is a line, too.
            lines = part.split(b"\n") if part else [b"", b""]
            sizes = [len(line) for line in lines]
            looks = returned or b"\r" in part
            ends = [looks and line.endswith(b"\r") for line in lines]
            ends[0] = ends[0] or (returned and not lines[0])
            sizes[0] += carried
            carried, returned = sizes.pop(), ends.pop()
            whole = torch.tensor(sizes, dtype=torch.int64)
            starts = begin + (whole + 1).cumsum(0) - (whole + 1)
            begin += sum(sizes) + len(sizes)
            yield starts, whole - torch.tensor(ends, dtype=torch.int64)


def _json_lines(path: Path, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same; the lengths are those of the texts in the lines."""
    begin = number = 0
    with path.open("rb") as file:
        file.seek(_begin_of(file))
        while True:
            starts, lengths = list[int](), list[int]()
            for line in itertools.islice(
                iter(lambda: file.readline(_LONGEST_LINE_BYTES), b""), _LINES
            ):
                if begin + len(line) > size:
                    size = 0  # so no later line, either
                    break
                number += 1
                where = f"line {number} of {path}"
                if len(line) == _LONGEST_LINE_BYTES:
                    raise TextError(
                        f"train.data: {where} is longer than {_LONGEST_LINE_BYTES // MIB} MiB; "
                        "divide it"
                    )
                starts.append(begin)
                lengths.append(len(_text_of(line, where)))
                begin += len(line)
            if not starts:
                return
            yield torch.tensor(starts), torch.tensor(lengths)


def json_line(line: str | bytes, where: str, advice: str) -> Any:  # noqa: ANN401 - what JSON can hold
    """Return what a line of JSON holds.

    Raises:
        TextError: It is none.
    """
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as failure:
        why: object = failure
        if isinstance(failure, json.JSONDecodeError):
            why = f"{failure.msg}, column {failure.colno}"
        raise TextError(f"train.data: {where} is no JSON ({why}); {advice}") from failure


def _text_of(line: bytes, where: str) -> bytes:
    """Return the text in a line of JSON; nothing for an empty line.

    Raises:
        TextError: There is none.
    """
    line = line.strip()
    if not line:
        return b""
    content = json_line(line, where, f"correct the line, or take it out; {_VALID}")
    text = content.get("text") if isinstance(content, dict) else None
    if isinstance(text, str):
        return text.encode(errors="surrogatepass")  # JSON can hold halves of a character
    has = f"a {type(content).__name__}"
    if isinstance(content, dict):
        has = f"the keys {', '.join(map(repr, content))}"
    raise TextError(
        f'train.data: {where} has no "text" that is a string (it has {has[:200]}); {_VALID}'
    )
