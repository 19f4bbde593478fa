"""The Ray actor of a slot, around one program: an engine of ours, or a program of the user.

Its constructor only keeps the worker's specification, so that Ray can start it again anywhere at
any time, with the same arguments. It imports no torch: its program is a process of its own, which
ends and is started again without Ray. The resume state travels in each directive. Does not import
Ray, which reads its settings when it is imported.
"""

from __future__ import annotations

import os
from dataclasses import replace

from orchestrator.cluster.kept_engine import KeptEngine, ProgramEnded
from workers.command.engine import CommandEngine
from workers.command.folder import CommandFolder
from workers.messages import Directive, Report
from workers.settings import WorkerSpec


class WorkerActor:
    """One slot's worker, driven by directives."""

    def __init__(self, spec: WorkerSpec, folder: CommandFolder | None = None) -> None:
        """Start nothing. `folder` is where a program of the user finds its own."""
        self._spec = spec
        self._problem: str | None = None
        if folder is not None and spec.command is not None:
            self._problem = folder.problem
            self._spec = replace(spec, command=replace(spec.command, cwd=folder.path))
        self._worker: KeptEngine | CommandEngine | None = None

    def process_ids(self, incarnation: int) -> tuple[int, int | None]:
        """Return the id of this process, and of the one that computes, which it starts.

        Asked before its first slice, it tells that both have come up.
        """
        worker, own = self._opened(), os.getpid()
        return own, worker.process_id(incarnation) if isinstance(worker, KeptEngine) else own

    def run_slice(self, directive: Directive) -> Report | ProgramEnded:
        """Run one slice and report."""
        return self._opened().run_slice(directive)

    def _opened(self) -> KeptEngine | CommandEngine:
        if self._worker is None:
            self._worker = load_worker(self._spec, self._problem)
        return self._worker


def load_worker(spec: WorkerSpec, problem: str | None = None) -> KeptEngine | CommandEngine:
    """Return what runs the program of a slot; `problem` says why its folder is not here."""
    if spec.command is None:
        return KeptEngine(spec)
    # What its PC says of torch is for it to read; only cards are numbered as NVML does.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return CommandEngine(spec, problem)
