"""The messages of an arm of `tune`, and the start of its process.

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

#: A name, not an import: the head imports this module and must never load torch.
_ARM: Final = "workers.tuning.arm"

#: The first optimiser of a process imports this module, which takes 1.5 s of CPU time: more than
#: the rest of an arm's start.
_SLOW: Final = "torch._dynamo"

#: An arm reports the losses of this many first optimiser steps.
LOSSES_MOST: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an arm did in one turn."""

    speed: float
    """Samples per second, tokens per second if lengths differ, or for matmul 10^9 operations per
    second.
    """
    losses: tuple[float, ...]
    """Losses of the first optimiser steps since the process began; empty for matmul."""
    peak_bytes: int
    """Peak memory of tensors on the device in a step of the turn."""
    subject: Mapping[str, str | None]
    """What was measured: `device`, `card` (its UUID), `driver`, `torch`."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The arm cannot run these settings on this machine; its process ends."""

    reason: str


def fork_context() -> ForkServerContext:
    """Return the multiprocessing context that starts arms.

    The first start of the fork server in this process decides what it preloads.
    """
    # The fork server inherits this environment and loads torch, which reads its allocator from it.
    set_for_cuda(os.environ, None)
    multiprocessing.set_forkserver_preload([_ARM, _SLOW])
    return multiprocessing.get_context("forkserver")


def run_arm(connection: Connection, spec: WorkerSpec, log: Path) -> None:
    """Answer messages until the other end is closed; write the output of the process to `log`. The
    spec's workload is `train` or `matmul`.

    Ignores Ctrl-C: the head handles it, and closes the other end.
    """
    # Forget the inherited folder of the head's sockets. The arm makes its own, which is removed
    # with its loader processes.
    getattr(multiprocessing.current_process(), "_config", {}).pop("tempdir", None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)  # standard output belongs to the head
    os.dup2(output, 2)
    # Set what this arm requests: otherwise it would measure another allocator or card than a run.
    set_for_cuda(os.environ, workspace_of(spec.workload.settings))
    importlib.import_module(_ARM).serve(connection, spec)
