"""The folder of a job on its node: the results of its program, how its last attempt ended, and
which of its processes ran out of memory.

Starts and judges nothing. A file that cannot be read counts as empty.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from workers.command.code import RUN
from workers.files import replace_whole
from workers.learned_limits import default_path
from workers.messages import Cause, Ending, Progress
from workers.settings import WorkerSpec

#: Most bytes of the results that one call reads; older ones are skipped.
_RESULTS_MOST_BYTES: Final = 2**18

#: Names in a line of results, and the field of `Progress` for each; a later name overrides.
_PLACES: Final = {
    **dict.fromkeys(("max_steps", "total_steps", "steps"), "train_steps"),
    **dict.fromkeys(("eta", "eta_s"), "eta_s"),
    **{name: name for name in ("epoch", "loss", "samples_per_s", "tokens_per_s")},
    "step": "train_step",
}

#: File in a job's folder in which capped processes note that they ran out of memory.
NOTE: Final = "out-of-memory"


def folder_of(spec: WorkerSpec) -> Path:
    """Return the folder of a slot's program on this node, the same after restarts."""
    return default_path().parent / "state" / (spec.run_id or "no-run") / spec.slot


@dataclass(slots=True)
class Results:
    """Reads the JSON records that a program writes: `{"step": 10, "steps": 100, "loss": 2.5}`.

    A record is one line; other lines are skipped. `step`, `steps`, `loss`, `eta_s` (or `eta`),
    `samples_per_s`, `tokens_per_s` and `epoch` go to `progress`; every number is also a metric
    under its own name.
    """

    path: Path
    progress: Progress = field(default_factory=Progress)
    metrics: dict[str, float] = field(default_factory=dict)
    _at: int = 0
    _first: tuple[int, float] | None = None
    """The first step and the time it was read, for an ETA if the program reports none."""

    @property
    def nan_loss(self) -> bool:
        """Whether the last loss is not a finite number."""
        loss = self.progress.loss
        return loss is not None and not math.isfinite(loss)

    def begin(self) -> None:
        """Reset for a new start of the program, and skip the records already in the file."""
        self.progress, self.metrics, self._first = Progress(), {}, None
        with contextlib.suppress(OSError):
            self._at = self.path.stat().st_size

    def read(self, *, is_over: bool = False) -> None:
        """Read the records completed since the last call.

        While the program runs, a line without a newline is incomplete; once it `is_over`, it
        counts.
        """
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin = 0 if size < self._at else self._at  # the program may have truncated it
                cut = max(begin, size - _RESULTS_MOST_BYTES)
                data = os.pread(file.fileno(), _RESULTS_MOST_BYTES, cut)
        except OSError:
            return
        whole = data if is_over else data[: data.rfind(b"\n") + 1]
        self._at = cut + len(whole)
        for line in whole.splitlines():  # the rest of a cut line is no record
            with contextlib.suppress(ValueError, RecursionError, OverflowError):
                record = json.loads(line.decode("utf-8-sig", "surrogateescape"))
                if isinstance(record, dict):
                    self._take(record)
        if whole:
            self._estimate(time.monotonic())

    def _estimate(self, now_s: float) -> None:
        step, steps = self.progress.train_step, self.progress.train_steps
        if step is None or steps is None or not {"eta", "eta_s"}.isdisjoint(self.metrics):
            return
        first, since_s = self._first = self._first or (step, now_s)
        if step > first:
            eta_s = max(0, steps - step) * (now_s - since_s) / (step - first)
            self.progress = replace(self.progress, eta_s=eta_s)

    def _take(self, record: Mapping[str, Any]) -> None:
        numbers = {
            name: value
            for name, value in record.items()
            if type(value) in {int, float} and name.isprintable()
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
    """The starts and the end of a job's program on this node, on file for later workers."""

    starts: int = 0
    attempt: str | None = None
    """Attempt of the last start."""
    ending: Ending | None = None
    """How that attempt ended, if it ended by itself."""

    @classmethod
    def of(cls, folder: Path) -> Record:
        """Read the record; return an empty one if it cannot be read."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            data = json.loads((folder / "job.json").read_text(encoding="utf-8"))
            ending = data.pop("ending")
            if ending is not None:
                ending = Ending(**{**ending, "cause": Cause(ending["cause"])})
            return cls(**data, ending=ending)
        return cls()

    def write(self, folder: Path) -> None:
        """Replace the record of the folder; raise `OSError` if it cannot be written."""
        replace_whole(folder / "job.json", json.dumps(asdict(self)))


def take_note(folder: Path) -> dict[int, str]:
    """Return and delete the notes of processes that ran out of memory: by process id the capped
    device, `cpu` or `cuda`.
    """
    note, found = folder / NOTE, {}
    with contextlib.suppress(OSError, ValueError):
        for line in note.read_text("ascii").splitlines():
            pid, device = line.split()
            found[int(pid)] = device
    with contextlib.suppress(OSError):
        note.unlink()
    return found


def keep_outputs(patterns: Iterable[str], cwd: str, folder: Path, since_unix_s: float) -> None:
    """Copy files that match and are new (to 1 s) to the job; skip the files of runs."""
    root = Path(cwd)
    for path in {path for pattern in patterns for path in root.glob(pattern)}:
        within = [root / parent for parent in path.relative_to(root).parents]
        is_ours = folder in within or any((place / RUN).exists() for place in within)
        if path.is_file() and path.stat().st_mtime >= since_unix_s - 1.0 and not is_ours:
            target = folder / path.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
