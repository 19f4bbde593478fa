"""Fills the folder of a job, in the queue's folder, when an attempt has ended well.

A training leaves its last checkpoint there; if it trains a Hugging Face folder, also the trained
model as such a folder. A command on another PC leaves what it wrote into its own folder. Threads
and a child process do this work, since the head must not wait. A job is DONE only when its folder
is complete. Does not read checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import OrchestratorError, one_line
from orchestrator.jobs.model import Job, JobState
from orchestrator.record.events import EventLog
from orchestrator.run.background import Background
from orchestrator.run.child import ask_child
from workers.settings import WorkerSpec

FILES: Final = "files"
CHECKPOINT: Final = "checkpoint.pt"
MODEL: Final = "model"

#: Seconds until files that could not be written are tried again.
_RETRY_AFTER_S: Final = 60.0
#: An export that takes longer hangs: a slow disk of 100 MB/s reads 15 GB of state in 150 s.
_EXPORT_MOST_S: Final = 1200.0


class NotExportedError(OrchestratorError):
    """A model was not written as a folder, for a reason other than the disk."""


class JobFiles:
    """The folders of the jobs of one run."""

    def __init__(self, queue_folder: Path, *, one_machine: bool, events: EventLog) -> None:
        """Touch no file; with `one_machine`, commands write into their job folders themselves."""
        self._folder = queue_folder.absolute()
        self._one_machine = one_machine
        self._events = events
        self._threads = Background(2, "job-files")
        self._under_way: dict[tuple[str, int], tuple[Future[None], float]] = {}
        """The work of each attempt and when it began, keyed by job and attempt."""

    def of(self, name: str) -> Path:
        """Return the folder of a job."""
        return self._folder / FILES / name

    def left_by(
        self, job: Job, attempt: int, spec_of: Callable[[], WorkerSpec], now_s: float
    ) -> tuple[JobState, str] | None:
        """Begin to fill the folder of a job that has done its work, and return the job's next state
        and why. Raises what `spec_of` raises.

        DONE: the folder is complete. SAVING: it cannot be written now, and is tried again. FAILED:
        it never can be. `None`: it is not known yet.
        """
        if job.command is not None and self._one_machine:
            return JobState.DONE, "done"  # the command has written its files itself
        key = (job.name, attempt)
        if key not in self._under_way:
            self._under_way[key] = self._threads.submit(self._fill, job, spec_of()), now_s
        future, began_s = self._under_way[key]
        if not future.done():
            return None
        failure = future.exception()
        if failure is None:
            return JobState.DONE, "done"
        reason = one_line(str(failure) or type(failure).__name__)
        reason = f"its files cannot be written to {self.of(job.name)}: {reason}"
        if isinstance(failure, NotExportedError):
            return JobState.FAILED, reason
        if now_s - began_s >= _RETRY_AFTER_S:
            del self._under_way[key]
        return JobState.SAVING, reason

    def drop_state(self, name: str) -> None:
        """Remove and log the head's copy of the state of a job that does not need it any more."""
        alone = self._state(name)
        for path in (alone, *alone.with_name(name).rglob("*.pt")):  # of the members of a team
            with contextlib.suppress(OSError):
                size_bytes = path.stat().st_size
                path.unlink()
                self._events.write("job_state_removed", job=name, size_bytes=size_bytes)

    def _state(self, slot: str) -> Path:
        return self._folder.parent / "states" / f"{slot}.pt"

    def _fill(self, job: Job, spec: WorkerSpec) -> None:
        place = self.of(job.name)
        place.mkdir(parents=True, exist_ok=True)
        if job.command is not None:
            # This module imports ray.
            from orchestrator.cluster.node_tasks import copy_files  # noqa: PLC0415

            copy_files(spec.node, str(spec.run_id), spec.slot, "**/*", place)
            return
        checkpoint, state = place / CHECKPOINT, self._state(spec.slot)
        # `CheckpointKeeper` (`run_dir.py`) leaves a part when it could not write the rest.
        if state.with_suffix(".part").exists() or not (state.exists() or checkpoint.exists()):
            raise OSError(f"its last state in {state.parent} is not complete")
        if state.exists():  # else an earlier call has linked it
            checkpoint.unlink(missing_ok=True)
            try:
                os.link(state, checkpoint)
            except OSError:  # another file system
                part = checkpoint.with_suffix(".part")
                shutil.copyfile(state, part)
                part.replace(checkpoint)
        if spec.workload.settings.get("model") is not None:
            _export(spec, checkpoint, place / MODEL)


def ask_export(
    spec: WorkerSpec,
    checkpoints: Iterable[Path],
    to: Path,
    *,
    form: str | None = None,
    average: bool = False,
    most_s: float = math.inf,
) -> dict[str, Any] | str:
    """Make a child process, which loads torch, write what a slot has trained as a Hugging Face
    folder. Return its answer (`workers.hf.export`), or a text that says why there is none.
    """
    question = {
        "checkpoints": list(map(str, checkpoints)),
        "settings": dict(spec.workload.settings),
        "seed": spec.workload.seed,
        "slot": spec.slot,
        "to": str(to),
        "form": form,
        "average": average,
    }
    return ask_child("workers.hf.export", question, most_s)


def _export(spec: WorkerSpec, checkpoint: Path, to: Path) -> None:
    """Write a checkpoint as a Hugging Face folder.

    Raises:
        OSError: The disk cannot be written.
        NotExportedError: The model or a package on this PC refuses, or it takes too long.
    """
    shutil.rmtree(to, ignore_errors=True)
    told = ask_export(spec, [checkpoint], to, most_s=_EXPORT_MOST_S)
    if not to.is_dir():
        why, code = (told, None) if isinstance(told, str) else (told["refused"], told.get("errno"))
        # The libraries that write tensors raise errors of their own if the disk is full.
        is_full = shutil.disk_usage(to.parent).free < checkpoint.stat().st_size
        if code is not None or is_full:
            raise OSError(f"{why[:300]}; the disk is full" if is_full else why)
        raise NotExportedError(f"{MODEL}: {why[:300]}; its weights are in {CHECKPOINT}")
