"""The checkpoints of one training in one folder: saved by a thread while the training goes on, found
again afterwards.

A checkpoint that cannot be written costs no step: `report` says what went wrong, and it is tried
again. Does not know what a state means, nor who asks for one.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from workers.training.checkpoints import checkpoint_file
from workers.training.checkpoints.cadence import pause_s
from workers.training.checkpoints.checkpoint_file import RefusedError
from workers.training.checkpoints.host_copy import HostCopy
from workers.training.checkpoints.identity import Identity
from workers.training.checkpoints.tensor_bytes import tensors_in
from workers.units import MIB

#: The head's copy, put there before `load`. It is read like the others and never written over.
FROM_HEAD: Final = "from-head.pt"

GENERATIONS: Final = 2
"""Kept at least, so that one is good while the other is written over."""

#: Seconds that a training on the CPU loses for each second of processor time of the thread that
#: writes: they share cores, caches and memory. Measured on two busy cores: 1.0 with 2.5 MiB; with
#: 124 MiB 2.0, and 2.5 at the upper end of its 95 % interval.
_CPU_LOSS: Final = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """What was saved and what went wrong; a value that can cross processes."""

    saved_step: int | None = None
    """Of the newest good checkpoint; `None`: there is none."""
    saved_at: float | None = None
    """Unix time at which it was complete; `None` where this process did not write it."""
    saved_bytes: int = 0
    failure: str | None = None
    """One sentence: what could not be written, where and why; `None` once it has succeeded again.
    """
    written: int = 0
    failed: int = 0
    stalled_s: float = 0.0
    """The time that all checkpoints together took from the training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a folder had to offer."""

    state: dict[str, Any] | None
    """`None`: training begins anew."""
    step: int | None = None
    refused: tuple[str, ...] = ()
    """A sentence for each file that cannot be used, newest first."""

    def sentences(self) -> tuple[str, ...]:
        """Say what was refused, and what is done instead."""
        if not self.refused:
            return ()
        instead = (
            f"training goes on from step {self.step}"
            if self.state is not None
            else "training begins anew"
        )
        return *self.refused, instead


class Checkpoints:
    """Opens a folder and keeps the last generations in it, so that one is always good.

    One training to a folder.
    """

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        *,
        save_every_s: float = 60.0,
        keep: int = GENERATIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remove what a killed process has left, and start the thread that writes.

        Raises nothing.
        """
        self.report = CheckpointReport()
        self._folder = folder
        self._identity = identity
        self._save_every_s = save_every_s
        self._clock = clock
        self._copy = HostCopy()
        self._taken_at = clock()
        self._due_at = self._taken_at + pause_s(save_every_s, 0.0, failed=False)
        self._slots = [folder / f"generation-{index}.pt" for index in range(max(keep, GENERATIONS))]
        self._good: Path | None = (
            None  # the newest file that is known to be good is never written over
        )
        self._number = 0
        self._opened = False
        self._idle = threading.Event()
        self._idle.set()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._remove_leftovers()
        self._writer = threading.Thread(target=self._write_jobs, name="checkpoints", daemon=True)
        self._writer.start()

    def load(self) -> Loaded:
        """Read the newest good checkpoint of this training, into host memory.

        Raises:
            RuntimeError: There is no memory for it.
        """
        self.wait()
        refused = []
        self._opened = True
        candidates = (*self._slots, self._folder / FROM_HEAD)
        present = {
            path: checkpoint_file.read_number(path) for path in candidates if _is_there(path)
        }
        self._number = max(number or 0 for number in (self._number, *present.values()))
        # What cannot be dated comes first: it may be the newest, and its refusal is to be told.
        for path in sorted(present, key=lambda path: present[path] or math.inf, reverse=True):
            try:
                content = self._read(path)
            except RefusedError as failure:
                refused.append(f"the checkpoint {path} is not used: {failure}")
                continue
            self._good = path
            self.report = replace(
                self.report, saved_step=content["step"], saved_bytes=path.stat().st_size
            )
            return Loaded(state=content["state"], step=content["step"], refused=tuple(refused))
        return Loaded(state=None, refused=tuple(refused))

    def discard(self) -> None:
        """Remove all checkpoints: the training begins anew.

        Raises:
            OSError: One of them cannot be removed.
        """
        self.wait()
        self._opened, self._good = True, None
        for path in self._slots:
            path.unlink(missing_ok=True)

    def lacks_room(self, state: object) -> str | None:
        """Say what is missing on the disk for this state, in one sentence; `None`: nothing."""
        needed = (len(self._slots) + 1) * sum(each.nbytes for each in tensors_in(state))
        try:
            disk = os.statvfs(
                next(each for each in (self._folder, *self._folder.parents) if each.exists())
            )
            there = sum(path.stat().st_size for path in self._slots if path.exists())
        except OSError as failure:
            return f"the folder of checkpoints {self._folder} cannot be used: {failure.strerror}"
        free = disk.f_bavail * disk.f_frsize + there
        if free >= needed:
            return None
        return (
            f"checkpoints in {self._folder} need {needed / MIB:.0f} MiB ({len(self._slots)} and one "
            "that is being "
            f"written), and the disk has {free / MIB:.0f} MiB for them; free some, or choose "
            "another folder"
        )

    def due(self) -> bool:
        """Whether a checkpoint should be taken now; never while one is being written."""
        return self._idle.is_set() and self._clock() >= self._due_at

    def save(self, state: Mapping[str, Any], step: int) -> bool:
        """Copy a state of tensors, numbers, strings, lists and mappings, and have it written;
        return at once.

        `False`: another one is still being written, or there is no memory for the copy (see
        `report`).
        """
        if not self._opened:
            raise RuntimeError(
                "`load` or `discard` must come before the first `save`: it could replace a good "
                "checkpoint"
            )
        if not self._idle.is_set():
            return False
        began_s, self._taken_at = time.perf_counter(), self._clock()
        try:
            self._copy.take(state, step)
        except (RuntimeError, OSError, OverflowError, MemoryError) as failure:
            self._finish(step, time.perf_counter() - began_s, failure)
            return False
        self._idle.clear()
        self._jobs.put(lambda: self._write(step))
        return True

    def newest_copy(self) -> Mapping[str, Any] | None:
        """Return the state that was saved last, from host memory, even if the disk refused it.

        Do not change it.
        """
        if self._copy.step is None:
            return None
        self._copy.complete()
        return self._copy.state

    def newest_file(self) -> Path | None:
        """Return the newest good file. It stays as it is while the next one is written."""
        return self._good

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written; whether that is so."""
        return self._idle.wait(timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish what is being written and end the thread; whether it has ended."""
        self._jobs.put(None)
        self._writer.join(timeout_s)
        return not self._writer.is_alive()

    def _read(self, path: Path) -> dict[str, Any]:
        content = checkpoint_file.read(path)
        difference = self._identity.difference(content.get("identity"))
        if difference is not None:
            raise RefusedError(difference)
        return content

    def _write_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _write(self, step: int) -> None:
        """Write what was copied; runs in the thread, and raises nothing."""
        cost_s, written_bytes, failure, target = 0.0, 0, None, self._target()
        began_cpu_s = time.thread_time()
        try:
            cost_s = self._copy.complete()
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = {"identity": self._identity.plain(), "step": step, "state": self._copy.state}
            written_bytes = checkpoint_file.write(target, content, self._number + 1)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on, and the report says it
            failure = error
        else:
            self._number += 1
            self._good = target
        if not self._copy.from_card:
            cost_s += _CPU_LOSS * (time.thread_time() - began_cpu_s)
        self._finish(step, cost_s, failure, written_bytes)
        self._idle.set()

    def _finish(
        self, step: int, cost_s: float, failure: Exception | None, written_bytes: int = 0
    ) -> None:
        pause = pause_s(self._save_every_s, cost_s, failed=failure is not None)
        self._due_at = self._taken_at + pause
        known = replace(self.report, stalled_s=self.report.stalled_s + cost_s)
        if failure is None:
            self.report = replace(
                known,
                saved_step=step,
                saved_at=time.time(),
                saved_bytes=written_bytes,
                failure=None,
                written=known.written + 1,
            )
            return
        none = known.saved_step is None
        last = (
            "there is no good one yet"
            if none
            else f"the last good one is of step {known.saved_step}"
        )
        said = (
            getattr(failure, "strerror", None)
            or (str(failure).splitlines() or [type(failure).__name__])[0]
        )
        sentence = (
            f"the checkpoint of step {step} could not be written in {self._folder}: {said}; "
            f"training goes on and tries again in {pause:.0f} s; {last}"
        )
        self.report = replace(known, failure=sentence, failed=known.failed + 1)

    def _target(self) -> Path:
        """Return where the next one goes: never over the newest good one.

        First where there is nothing good.
        """
        others = [path for path in self._slots if path != self._good]
        return min(others, key=lambda path: checkpoint_file.read_number(path) or 0)

    def _remove_leftovers(self) -> None:
        for path in self._slots:
            for leftover in self._folder.glob(f"{path.name}.*{checkpoint_file.TEMPORARY}"):
                try:
                    leftover.unlink(missing_ok=True)
                except OSError as failure:
                    self.report = replace(
                        self.report, failure=f"{leftover} cannot be removed: {failure.strerror}"
                    )


def _is_there(path: Path) -> bool:
    """Whether there is a file, also one that cannot be looked at: that is to be told, and not taken
    for none.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True
