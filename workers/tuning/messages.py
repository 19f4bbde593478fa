"""What an arm of `tune` is told, what it answers, and where its process begins.

    context = fork_context()
    context.Process(target=run_arm, args=(connection, spec, log))

The head sends how many seconds a turn lasts, and the arm answers with a `Turn`, or once `Refused`.

This module loads neither torch nor Ray: the fork server has imported torch once, so that an arm
begins in milliseconds. The fork server has not touched a card, because a context of CUDA does not
survive a fork.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Final

from workers.host.cuda_environment import set_for_cuda, workspace_of
from workers.settings import WorkerSpec

#: Named, not imported: the head, which imports this module, never loads torch.
_ARM: Final = "workers.tuning.arm"

#: The first optimiser of a process imports it, which takes 1.5 s of a core: more than all else that
#: an arm begins with.
_SLOW: Final = "torch._dynamo"

#: Of so many first optimiser steps an arm tells the losses.
LOSSES_MOST: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an arm did in one turn."""

    speed: float
    """Samples a second, or tokens where lengths differ; for matmul 10^9 operations."""
    losses: tuple[float, ...]
    """Of the first optimiser steps since its process began; empty for matmul."""
    peak_bytes: int
    """The highest use of the device by tensors in a step of it."""
    subject: Mapping[str, str | None]
    """What it holds for: `device`, `card` (its UUID), `driver`, `torch`."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The arm cannot do that on this machine; its process ends."""

    reason: str


def fork_context() -> ForkServerContext:
    """Return how to start arms.

    Whatever starts the fork server first in this process decides what it has imported.
    """
    # The fork server loads torch, which reads there which allocator to use. It inherits this
    # process's environment.
    set_for_cuda(os.environ, None)
    multiprocessing.set_forkserver_preload([_ARM, _SLOW])
    return multiprocessing.get_context("forkserver")


def run_arm(connection: Connection, spec: WorkerSpec, log: Path) -> None:
    """Answer until the other end is closed; what the process prints goes into `log`. The spec's
    workload says what is computed: `train` or `matmul`.

    Ctrl-C is for the head, which closes the other end.
    """
    # The folder of the head's sockets is inherited. The arm makes one of its own, which goes with
    # its loader processes.
    getattr(multiprocessing.current_process(), "_config", {}).pop("tempdir", None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)  # standard output belongs to the head
    os.dup2(output, 2)
    # After what the arm asks for: another allocator than that of a run would be measured, or
    # another card.
    set_for_cuda(os.environ, workspace_of(spec.workload.settings))
    importlib.import_module(_ARM).serve(connection, spec)
