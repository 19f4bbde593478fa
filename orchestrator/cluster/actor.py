"""The Ray actor of a slot, around one engine.

Its constructor only keeps the worker's specification and touches no device, so that Ray can start
it again anywhere at any time, with the same arguments. That of a spare (`spares.py`) gets none:
each of its processes is told the slot's before its first slice. The resume state travels in each
directive. It keeps no threads and no clock, and one file: what its process prints between two
reports. This is the one place where the head's code meets the engine's, and it runs in the worker's
process.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from workers.host.captured_output import CapturedOutput
from workers.host.cuda_environment import set_for_cuda, workspace_of
from workers.messages import Directive, Report, Verdict
from workers.settings import WorkerSpec

if TYPE_CHECKING:
    from workers.command.engine import CommandEngine
    from workers.command.folder import CommandFolder
    from workers.engine.engine import Engine


#: What every training imports: 2.3 s of a core.
_OF_TRAININGS = ("workers.engine.engine", "workers.workloads.train", "torch._dynamo")

#: Exit status of a process that ends itself because its device no longer answers (sysexits.h,
#: EX_UNAVAILABLE).
EXIT_POISONED = 69

#: The report of the slice before is sent by another thread of this process: on a busy machine it
#: was lost with it.
_LAST_WORDS_S = 1.0


class WorkerActor:
    """One worker process, driven by directives."""

    def __init__(self, spec: WorkerSpec | None = None, folder: CommandFolder | None = None) -> None:
        self._spec = spec
        self._problem: str | None = None
        if spec is None:
            load_ahead()
        elif folder is not None and spec.command is not None:
            self._problem = folder.problem
            self._spec = replace(spec, command=replace(spec.command, cwd=folder.path))
        self._engine: Engine | CommandEngine | None = None
        self._output: CapturedOutput | None = None
        self._poisoned = False

    def process_id(self, spec: WorkerSpec | None = None) -> int:
        """Return the id of this process.

        Asked before its first slice, it tells that the process has come up. A spare is told its
        slot's specification by it.
        """
        self._spec = self._spec or spec
        return os.getpid()

    def run_slice(self, directive: Directive) -> Report | None:
        """Run one slice and report; `None`: nothing was run, as this spare has no slot yet.

        A process whose context is corrupted has said so in its last report; the next directive ends
        it, and Ray starts a fresh one in its place. It cannot end itself any earlier: a report must
        outlive its process.
        """
        if self._poisoned:
            time.sleep(_LAST_WORDS_S)
            os._exit(
                EXIT_POISONED
            )  # not sys.exit: nothing may touch the broken device on the way out
        if self._spec is None:
            return None
        if self._output is None and self._spec.command is None:
            self._output = CapturedOutput(f"{self._spec.run_id}-{self._spec.slot}")
        if self._engine is None:
            # Ctrl-C is the head's: a KeyboardInterrupt in this process is the workload's own error.
            signal.signal(signal.SIGINT, lambda _number, _frame: None)
            self._engine = load_engine(self._spec, self._problem)
        report = self._engine.run_slice(directive)
        self._poisoned = report.verdict is Verdict.CONTEXT_CORRUPTED
        # A program of the user has a log of its own.
        return report if self._output is None else replace(report, output=self._output.take())


def load_ahead() -> None:
    """Load what a training imports; open no device, and use no setting of a job."""
    set_for_cuda(os.environ, None)
    with suppress(Exception):  # the first slice tells it
        for name in _OF_TRAININGS:
            importlib.import_module(name)


def load_engine(spec: WorkerSpec, problem: str | None = None) -> Engine | CommandEngine:
    """Load torch and the engine, or what runs a program of the user; what CUDA reads from the
    environment must be there before.

    `problem` says why the folder of a program is not here.
    """
    if spec.command is None:
        set_for_cuda(os.environ, workspace_of(spec.workload.settings))
    else:  # what its PC says of torch is for it to read; only cards are numbered as NVML does
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if spec.command is not None:
        from workers.command.engine import CommandEngine  # noqa: PLC0415 - not in the head

        return CommandEngine(spec, problem)
    # Torch belongs in the worker, never in the head.
    from workers.engine.engine import Engine  # noqa: PLC0415

    return Engine(spec)
