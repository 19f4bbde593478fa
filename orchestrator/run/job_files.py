"""What a job leaves: its folder in the queue's folder, filled when an attempt has ended well.

A training leaves its last checkpoint there, and one of a Hugging Face folder its model as such a
folder; a command on another PC what it wrote into its own folder. Done by threads and a child
process: the head must not stand still meanwhile. Does not know what is in a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import OrchestratorError, one_line
from orchestrator.jobs.model import Job, Kind
from orchestrator.record.events import EventLog
from orchestrator.run.child import ask_child
from workers.settings import WorkerSpec

FILES: Final = "files"
CHECKPOINT: Final = "checkpoint.pt"
MODEL: Final = "model"


class JobFiles:
    """The folders of the jobs of one run."""

    def __init__(self, queue_folder: Path, *, one_machine: bool, events: EventLog) -> None:
        """Touch nothing yet; `one_machine`: commands write into their folders here themselves."""
        self._folder = queue_folder.absolute()
        self._one_machine = one_machine
        self._events = events
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="job-files")
        self._under_way: dict[tuple[str, int], Future[None]] = {}

    def of(self, name: str) -> Path:
        """Return the folder of a job."""
        return self._folder / FILES / name

    def are_there(self, job: Job, attempt: int, spec: WorkerSpec) -> bool:
        """Whether all that an attempt leaves is in the job's folder; begin to fill it.

        What cannot be written is told once, and not waited for.
        """
        if job.kind is Kind.COMMAND and self._one_machine:
            return True  # it has written them itself
        key = (job.name, attempt)
        if key not in self._under_way:
            self._under_way[key] = self._threads.submit(self._fill, job, spec)
        future = self._under_way[key]
        if not future.done():
            return False
        failure = future.exception()
        if failure is not None:
            self._under_way[key] = Future()
            self._under_way[key].set_result(None)
            reason = one_line(f"{type(failure).__name__}: {failure}")
            self._events.write("job_files_failed", job=job.name, reason=reason)
        return True

    def drop_state(self, name: str) -> None:
        """Remove the head's copy of the state of a job that needs it no more, and tell its size."""
        path = self._state(name)
        with contextlib.suppress(OSError):
            size_bytes = path.stat().st_size
            path.unlink()
            self._events.write("job_state_removed", job=name, size_bytes=size_bytes)

    def _state(self, name: str) -> Path:
        return self._folder.parent / "states" / f"{name}.pt"

    def _fill(self, job: Job, spec: WorkerSpec) -> None:
        place = self.of(job.name)
        place.mkdir(parents=True, exist_ok=True)
        if job.kind is Kind.COMMAND:
            self._fetch(spec, place)
            return
        checkpoint, state = place / CHECKPOINT, self._state(job.name)
        if not state.exists():
            return  # it had ended before, and was told of again
        checkpoint.unlink(missing_ok=True)
        try:
            os.link(state, checkpoint)
        except OSError:  # another file system
            shutil.copyfile(state, checkpoint)
        if spec.workload.settings.get("model") is not None:
            _export(spec, checkpoint, place / MODEL)

    @staticmethod
    def _fetch(spec: WorkerSpec, place: Path) -> None:
        # It imports ray.
        from orchestrator.cluster.checkpoint_copy import copied  # noqa: PLC0415

        copied(spec.node, str(spec.run_id), spec.slot, "**/*", place)


def _export(spec: WorkerSpec, checkpoint: Path, to: Path) -> None:
    """Have a child process, which loads torch, write a folder of Hugging Face.

    `OrchestratorError` if it does not.
    """
    shutil.rmtree(to, ignore_errors=True)
    request: Mapping[str, Any] = {
        "checkpoints": [str(checkpoint)],
        "settings": dict(spec.workload.settings),
        "seed": spec.workload.seed,
        "run_id": spec.run_id,
        "slot": spec.slot,
        "to": str(to),
        "form": None,
        "average": False,
    }
    told = ask_child("workers.hf.export", request)
    if not to.is_dir():
        why = told if isinstance(told, str) else told.get("refused")
        raise OrchestratorError(f"{to} was not written: {one_line(str(why))[:300]}")
