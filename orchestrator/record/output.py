"""The printed output of workers: one file per slot in the run folder, written from statuses and
read back.

Two files keep the newest 512 KiB to 1 MiB of each slot. Control sequences of terminals are removed
before writing, so that `cat` is safe too. If the folder cannot be written, only output is lost.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from workers.files import open_regular
from workers.messages import Status
from workers.units import MIB

LINES_SHOWN: Final = 100
_FOLDER_NAME: Final = "output"
_FILE_MOST_BYTES: Final = MIB // 2

#: Control sequences of terminals: CSI, then OSC, DCS, SOS, PM and APC, then the short ones
#: (ECMA-48, 5.3 to 5.6).
_ESCAPES: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c|$)"
    r"|\x1b[ -/]*[0-~]",
    re.MULTILINE,
)
#: Control characters, characters that change the writing direction, and lone surrogates.
_CONTROLS: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def cleaned(text: str) -> str:
    """Return `text` without control sequences of terminals.

    A line that was overwritten with carriage returns, such as a progress bar, keeps its last state.
    """
    first, *others = _ESCAPES.sub("", text).replace("\r\n", "\n").split("\n")
    line_break = "\n" if "\r" in first else ""  # the file may have the overwritten line already
    lines = (line.rpartition("\r")[2] for line in (first, *others))
    return line_break + _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", "\n".join(lines))


class OutputFiles:
    """The output of one run's workers."""

    def __init__(self, folder: Path) -> None:
        """Open no file yet; `folder` is the run folder."""
        self._folder = folder
        self.problem: str | None = None
        """A sentence while output cannot be written, else `None`."""

    def take(self, status: Status) -> None:
        """Append the output that a status contains."""
        if status.output is None:
            return
        text = cleaned(status.output.text)
        if dropped := status.output.dropped_bytes:
            said = f"{dropped} bytes printed before this are missing: a status has no room for them"
            text = f"\n[{said}]\n{text}"
        try:
            self._add(_path(self._folder, status.slot), text.encode("utf-8", "replace"))
            self.problem = None
        except OSError as failure:
            why = f"not kept in {self._folder}: {failure.strerror}"
            self.problem = f"the output of the workers is {why}"

    def _add(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "ab", buffering=0) as file:
            if file.tell() + len(content) > _FILE_MOST_BYTES:
                path.replace(_older(path))
                self._add(path, content)
            else:
                file.write(content)


def last_lines(folder: Path, slot: str, most: int = LINES_SHOWN) -> list[str]:
    """Return the last lines that a slot printed; empty if nothing is kept, or if the name leads out
    of the folder.
    """
    root = (folder / _FOLDER_NAME).resolve()
    if "\0" in slot or not _path(folder, slot).resolve().is_relative_to(root):
        return []
    return Follower(folder, slot).more(is_last=True).expandtabs().splitlines()[-most:]


class Follower:
    """Reads the output of a slot by whole lines, from the first line that is kept."""

    def __init__(self, folder: Path, slot: str) -> None:
        """Open no file yet. The name of a team's job stands for its first slot with output."""
        self._folder, self._path = folder / _FOLDER_NAME / slot, _path(folder, slot)
        self._inode: int | None = None
        self._read_bytes = 0
        self._rest = b""

    def more(self, *, is_last: bool = False) -> str:
        """Return the lines since the last call; with `is_last` also an unfinished line."""
        if self._inode is None and not self._path.exists():
            self._path = min(self._folder.rglob("*.log"), default=self._path)
        with contextlib.ExitStack() as stack:
            files = []
            for path in (self._path, _older(self._path)):  # in the direction of the renames
                with contextlib.suppress(OSError):
                    file = stack.enter_context(open_regular(path))
                    files.append((os.fstat(file.fileno()).st_ino, file))
            inodes = [inode for inode, _ in files]
            if self._inode in inodes:  # older files have been read
                files = files[: inodes.index(self._inode) + 1]
            for inode, file in reversed(files[:1] if len(set(inodes)) == 1 else files):
                if inode != self._inode:
                    self._inode, self._read_bytes = inode, 0
                file.seek(self._read_bytes)
                content = file.read()
                self._read_bytes += len(content)
                self._rest += content
        size = len(self._rest) if is_last else self._rest.rfind(b"\n") + 1
        lines, self._rest = self._rest[:size], self._rest[size:]
        return cleaned(lines.decode("utf-8", "replace"))


def slots_with_output(folder: Path) -> list[str]:
    """Return the slots that have output."""
    root = folder / _FOLDER_NAME
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.log"))


def _path(folder: Path, slot: str) -> Path:
    return folder / _FOLDER_NAME / f"{slot}.log"


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
