"""What the workers printed, in the run folder: a file for each slot, written from statuses and read
back.

Kept are the newest 512 KiB to 1 MiB of each slot, in two files. What steers a terminal is taken out
before it is written, so that `cat` is safe too. A folder that cannot be written costs only the
output.
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

#: Sequences that steer a terminal: CSI, then OSC, DCS, SOS, PM and APC, then the short ones
#: (ECMA-48, 5.3 to 5.6).
_STEERS: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f]).*?(?:\x07|\x1b\\|\x9c|$)"
    r"|\x1b[ -/]*[0-~]",
    re.MULTILINE,
)
#: Control characters, those that turn the direction of writing, and lone surrogates.
_CONTROLS: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def cleaned(text: str) -> str:
    """Return text that steers no terminal.

    Of a line that was drawn over, such as a progress bar, its last state.
    """
    first, *others = _STEERS.sub("", text).replace("\r\n", "\n").split("\n")
    drawn_over = "\n" if "\r" in first else ""  # what it is drawn over may be in the file already
    lines = (line.rpartition("\r")[2] for line in (first, *others))
    return drawn_over + _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", "\n".join(lines))


class OutputFiles:
    """The output of one run's workers."""

    def __init__(self, folder: Path) -> None:
        """Touch nothing yet; `folder` is the run folder."""
        self._folder = folder
        self.problem: str | None = None
        """One sentence; `None`: there is none."""

    def take(self, status: Status) -> None:
        """Add what a status brings."""
        if status.output is None:
            return
        text = cleaned(status.output.text)
        if dropped := status.output.dropped_bytes:
            said = f"{dropped} bytes were printed before this that a report has no room for"
            text = f"\n[{said}]\n{text}"
        try:
            self._add(_path(self._folder, status.slot), text.encode("utf-8", "replace"))
            self.problem = None
        except OSError as failure:
            why = f"not kept in {self._folder}: {failure.strerror}"
            self.problem = f"what the workers print is {why}"

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
    """Return the last lines that a slot printed.

    None where nothing is kept, or the name leads out of the folder.
    """
    root = (folder / _FOLDER_NAME).resolve()
    if "\0" in slot or not _path(folder, slot).resolve().is_relative_to(root):
        return []
    return Follower(folder, slot).more(is_last=True).expandtabs().splitlines()[-most:]


class Follower:
    """Reads what a slot prints line by line, from the first one that is kept."""

    def __init__(self, folder: Path, slot: str) -> None:
        """Touch nothing yet. Of a job that is a team, its first slot that has printed is meant."""
        self._folder, self._path = folder / _FOLDER_NAME / slot, _path(folder, slot)
        self._inode: int | None = None
        self._read_bytes = 0
        self._rest = b""

    def more(self, *, is_last: bool = False) -> str:
        """Return the lines since the last look; with `is_last` also one that was not ended."""
        if self._inode is None and not self._path.exists():
            self._path = min(self._folder.rglob("*.log"), default=self._path)
        with contextlib.ExitStack() as stack:
            files = []
            for path in (self._path, _older(self._path)):  # as they are renamed
                with contextlib.suppress(OSError):
                    file = stack.enter_context(open_regular(path))
                    files.append((os.fstat(file.fileno()).st_ino, file))
            inodes = [inode for inode, _ in files]
            if self._inode in inodes:  # what is older was read
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
    """Return the slots of which something is kept."""
    root = folder / _FOLDER_NAME
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.log"))


def _path(folder: Path, slot: str) -> Path:
    return folder / _FOLDER_NAME / f"{slot}.log"


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
