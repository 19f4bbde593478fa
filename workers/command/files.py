"""The folder of a job on its node: what its program printed, what it tells in its results, and
which attempt ended how.

Reads and cuts; starts and judges nothing. A file that cannot be read says nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from workers.command.code import RUN
from workers.files import replace_whole
from workers.learned_limits import default_path
from workers.messages import Ending, PrintedOutput, Progress
from workers.settings import WorkerSpec
from workers.units import MIB

#: Of what is printed between two polls: 100 lines of 160 characters. The newest are kept.
KEPT_BYTES: Final = 16 * 2**10

#: A log is renamed when it has grown to this: with the one before it, it takes twice as much.
LOG_BYTES: Final = 32 * MIB

#: Of the results, at most so many of the newest bytes are read at once.
_RESULTS_MOST_BYTES: Final = MIB

#: What a line of results calls the figures that have a place in a status; a later name goes first.
_PLACES: Final = {
    **dict.fromkeys(("max_steps", "total_steps", "steps"), "train_steps"),
    **dict.fromkeys(("eta", "eta_s"), "eta_s"),
    **{name: name for name in ("epoch", "loss", "samples_per_s", "tokens_per_s")},
    "step": "train_step",
}

#: Where a record begins, at the begin of a line or behind another record. A byte order mark is
#: passed over. Text is read with a character for each byte.
_RECORD: Final = re.compile(r"[\s\xef\xbb\xbf]*\{")


def folder_of(spec: WorkerSpec) -> Path:
    """Return where a slot's program keeps its files on this node, over restarts."""
    return default_path().parent / "state" / (spec.run_id or "no-run") / spec.slot


class Log:
    """What a program prints: a file that its keeper writes, and renames when it is full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        """Open while its process lives, so that no file after it gets the same inode."""
        self.begin()

    def begin(self) -> None:
        """Pass over what is there: another program has printed it."""
        self._newest()
        self._read_bytes = self._begin_bytes = self._size()

    def take(self) -> PrintedOutput | None:
        """Return what was printed since the last call, at most its newest 16 KiB."""
        if self._newest():
            self._read_bytes = self._begin_bytes = 0
        size = self._size()
        if size <= self._read_bytes:
            return None
        kept = self._tail(self._read_bytes)
        dropped_bytes = max(0, size - self._read_bytes - len(kept))
        self._read_bytes = size
        return PrintedOutput(text=kept.decode("utf-8", "replace"), dropped_bytes=dropped_bytes)

    def tail(self) -> str:
        """Return the newest 16 KiB of what the program has printed."""
        if self._newest():
            self._read_bytes = self._begin_bytes = 0
        return self._tail(self._begin_bytes).decode("utf-8", "replace")

    def _newest(self) -> bool:
        """Open the file of this name, unless it is open; say whether it is another than before."""
        try:
            number = self.path.stat().st_ino
            if self._file is not None and os.fstat(self._file).st_ino == number:
                return False
            newest = os.open(self.path, os.O_RDONLY)
        except OSError:
            return False
        if self._file is not None:
            os.close(self._file)
        self._file = newest
        return True

    def _size(self) -> int:
        return 0 if self._file is None else os.fstat(self._file).st_size

    def _tail(self, begin: int) -> bytes:
        """Return the newest 16 KiB behind `begin`, from the beginning of a line."""
        if self._file is None:
            return b""
        cut = max(begin, self._size() - KEPT_BYTES)
        text = os.pread(self._file, KEPT_BYTES, cut)
        return text.partition(b"\n")[2] or text if cut > begin else text


@dataclass(slots=True)
class Results:
    """The records of JSON that a program writes: `{"step": 10, "steps": 100, "loss": 2.5}`.

    A record begins in a line of its own, and may take several. What is no record is passed over.
    `step`, `steps`, `loss`, `eta_s` (or `eta`), `samples_per_s`, `tokens_per_s` and `epoch` have
    their place in a status; any other number is a metric under its own name.
    """

    path: Path
    progress: Progress = field(default_factory=Progress)
    metrics: dict[str, float] = field(default_factory=dict)
    _at: int = 0
    _first: tuple[int, float] | None = None
    """The first step, and when it was read: what is left takes as long, where no ETA is told."""

    @property
    def nan_loss(self) -> bool:
        """Whether the last loss is no number."""
        loss = self.progress.loss
        return loss is not None and not math.isfinite(loss)

    def begin(self) -> None:
        """Let another program append to them: what is there is not that one's."""
        self.progress, self.metrics, self._first = Progress(), {}, None
        with contextlib.suppress(OSError):
            self._at = self.path.stat().st_size

    def read(self, *, is_over: bool = False) -> None:
        """Take in the records that were completed since the last call.

        While the program runs, a line without an end may be half of one; once it `is_over`, not.
        """
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin = 0 if size < self._at else self._at  # the program may begin it anew
                cut = max(begin, size - _RESULTS_MOST_BYTES)
                file.seek(cut)
                data = file.read(_RESULTS_MOST_BYTES)
        except OSError:
            return
        end = cut + len(data)
        if cut > begin:
            data = data[data.find(b"\n") + 1 :]
        whole = data if is_over else data[: data.rfind(b"\n") + 1]
        taken = self._take_records(whole, is_over=is_over)
        self._at = end - len(data) + taken
        if taken:
            self._estimate(time.monotonic())

    def _take_records(self, data: bytes, *, is_over: bool) -> int:
        """Take in each record, and return where one begins whose end is still to come."""
        text, at = data.decode("latin-1"), 0
        while at < len(text):
            found = _RECORD.match(text, at)
            size = None if found is None else _size_of_record(text, found.end() - 1)
            if found is None or size is None or (size == 0 and is_over):
                at = text.find("\n", at) + 1 or len(text)
            elif size == 0:
                break
            else:
                at = found.end() - 1 + size
                self._take(data[found.end() - 1 : at])
        return at

    def _estimate(self, now_s: float) -> None:
        step, steps = self.progress.train_step, self.progress.train_steps
        if step is None or steps is None or not {"eta", "eta_s"}.isdisjoint(self.metrics):
            return
        first, since_s = self._first = self._first or (step, now_s)
        if step > first:
            eta_s = max(0, steps - step) * (now_s - since_s) / (step - first)
            self.progress = replace(self.progress, eta_s=eta_s)

    def _take(self, record: bytes) -> None:
        try:
            told: dict[str, Any] = json.loads(record)
        except ValueError:  # no UTF-8
            return
        numbers = {
            name: value
            for name, value in told.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        found: dict[str, Any] = {
            place: numbers[name] for name, place in _PLACES.items() if name in numbers
        }
        for place in {"train_step", "train_steps"} & found.keys():
            found[place] = int(found[place]) if math.isfinite(found[place]) else None
        if self.progress.first_loss is None and "loss" in found:
            found["first_loss"] = found["loss"]
        self.progress = replace(self.progress, **found)
        self.metrics.update({name: float(value) for name, value in numbers.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of the job's program on this node, also to a worker that comes after."""

    starts: int = 0
    attempt: str | None = None
    """Of its last start."""
    ending: Ending | None = None
    """Of that attempt, if it ended by itself."""

    @classmethod
    def of(cls, folder: Path) -> Record:
        """Read it; an unreadable one is as none."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            data = json.loads((folder / "job.json").read_text(encoding="utf-8"))
            ending = data.pop("ending")
            return cls(**data, ending=ending and Ending(**ending))
        return cls()

    def write(self, folder: Path) -> None:
        """Put it in place of the one before; `OSError` if it cannot be written."""
        replace_whole(folder / "job.json", json.dumps(asdict(self)))


def keep_outputs(patterns: Iterable[str], cwd: str, folder: Path, since_unix_s: float) -> None:
    """Copy what a program wrote in its folder, and no run did, to its job; times may be 1 s off."""
    root = Path(cwd)
    for path in {path for pattern in patterns for path in root.glob(pattern)}:
        within = [root / parent for parent in path.relative_to(root).parents]
        is_ours = folder in within or any((place / RUN).exists() for place in within)
        if path.is_file() and path.stat().st_mtime >= since_unix_s - 1.0 and not is_ours:
            target = folder / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


def _size_of_record(text: str, at: int) -> int | None:
    """Return the length of the record that begins at `at`; 0 if its end is not in `text`, and
    `None` if it is none.
    """
    # Its line alone first: what an error costs grows with the text that is looked through.
    for end in (text.find("\n", at) + 1 or len(text), len(text)):
        part = text[at:end]
        try:
            return json.JSONDecoder().raw_decode(part)[1]
        except json.JSONDecodeError as error:
            if part[error.pos :].strip():
                return None
        except (ValueError, RecursionError):  # too many digits, or too deep
            return None
    return 0
