"""Where the documents of a text are: each piece of one as a number of 8 bytes, found in one pass
over the files.

A document is a whole file or a line. In a file named .jsonl a line is a JSON object, and the
document its "text". One that is longer than a sample is cut into pieces as `TextData` cuts a text.
Documents of less than two bytes are left out: nothing in them can be predicted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from workers.training.host_memory import HostArray
from workers.training.text import TextError, TextFiles
from workers.units import MIB

#: Of a number: the length of the piece, at most `seq` + 1. The other bits are its place in the
#: stream.
LENGTH_BITS: Final = 21

_PART_BYTES: Final = MIB

#: Put into the index together.
_PIECES: Final = 262_144

#: Lines of JSON that are cut together.
_LINES: Final = 65_536

#: A line of JSON is read as a whole.
_LONGEST_LINE_BYTES: Final = 256 * MIB


def index_of_files(files: TextFiles, seq: int) -> Tensor:
    """Return the pieces of all files, without reading them."""
    found = HostArray(torch.int64)
    ends = torch.tensor([0, *files.ends])
    for pieces in _pieces(ends[:-1], ends.diff(), seq, step=seq):
        found.extend(pieces)
    return found.whole()


def index_of_lines(files: TextFiles, seq: int) -> tuple[Tensor, str]:
    """Return the pieces of all lines, and what changes when any byte of them changes.

    Raises:
        TextError: A file cannot be read, or a line of JSON has no text.
    """
    found, digest = HostArray(torch.int64), hashlib.blake2b(digest_size=8)
    for path, first, end in zip(files.paths, [0, *files.ends[:-1]], files.ends, strict=True):
        lines, step = (
            (_json_lines(path, end - first), 0)
            if is_json(path)
            else (_lines(path, end - first), seq)
        )
        of_file = 0
        try:
            for starts, lengths, checksum in lines:
                for pieces in _pieces(first + starts, lengths, seq, step=step):
                    found.extend(pieces)
                of_file = checksum
        except OSError as failure:
            raise TextError(f"train.data: {path} cannot be read: {failure.strerror}") from failure
        digest.update(of_file.to_bytes(4, "little"))
    return found.whole(), digest.hexdigest()


def is_json(path: Path) -> bool:
    """Whether the lines of a file are JSON."""
    return path.suffix == ".jsonl"


def text_of(line: bytes, where: str) -> bytes:
    """Return the text in a line of JSON; nothing for an empty line.

    Raises:
        TextError: There is none.
    """
    line = line.strip()
    if not line:
        return b""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as failure:
        why = (
            f"{failure.msg}, column {failure.colno}"
            if isinstance(failure, json.JSONDecodeError)
            else failure
        )
        raise TextError(
            f"train.data: {where} is no JSON ({why}); correct the line, or take it out; valid: "
            f'{{"text": "a document"}}'
        ) from failure
    text = said.get("text") if isinstance(said, dict) else None
    if not isinstance(text, str):
        has = (
            f"the keys {', '.join(map(repr, said))}"
            if isinstance(said, dict)
            else f"a {type(said).__name__}"
        )
        raise TextError(
            f'train.data: {where} has no "text" that is a string (it has {has[:200]}); valid: '
            f'{{"text": "a document"}}'
        )
    return text.encode(errors="surrogatepass")  # JSON can hold halves of a character


def _pieces(starts: Tensor, lengths: Tensor, seq: int, *, step: int) -> Iterator[Tensor]:
    """Cut documents.

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
        yield (starts[document] + place * step << LENGTH_BITS) | length


def _lines(path: Path, size: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield the lines in the first `size` bytes of a file, part by part: starts, lengths, checksum
    so far.

    The lengths are without the ends of the lines. What another program adds meanwhile is left out.
    """
    begin = carried = checksum = 0
    returned = False  # whether what was read so far ends with a carriage return
    with path.open("rb", buffering=0) as file:
        part = b" "
        while part:
            part = file.read(min(_PART_BYTES, size))
            size -= len(part)
            # What is left at the end is a line, too.
            lines = part.split(b"\n") if part else [b"", b""]
            sizes = [len(line) for line in lines]
            ends = (
                [line.endswith(b"\r") for line in lines]
                if returned or b"\r" in part
                else [False] * len(lines)
            )
            ends[0] = ends[0] or (returned and not lines[0])
            sizes[0] += carried
            carried, returned = sizes.pop(), ends.pop()
            checksum = zlib.crc32(part, checksum)
            whole = torch.tensor(sizes, dtype=torch.int64)
            starts = begin + (whole + 1).cumsum(0) - (whole + 1)
            begin += sum(sizes) + len(sizes)
            yield starts, whole - torch.tensor(ends, dtype=torch.int64), checksum


def _json_lines(path: Path, size: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield the same; the lengths are those of the texts in the lines."""
    begin = checksum = number = 0
    with path.open("rb") as file:
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
                lengths.append(len(text_of(line, where)))
                begin += len(line)
                checksum = zlib.crc32(line, checksum)
            if not starts:
                return
            yield torch.tensor(starts), torch.tensor(lengths), checksum
