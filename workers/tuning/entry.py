"""Where the process of an arm begins. Loads no torch before the process is a child of the fork
server.

    context = fork_context()
    context.Process(target=run_arm, args=(connection, spec))

The fork server has imported torch once, so that an arm begins in milliseconds and shares the
library's memory. It has not touched a card: a context of CUDA does not survive a fork.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Final

from workers.host.cuda_environment import set_for_cuda, workspace_of
from workers.tuning.messages import ArmSpec

#: Named, not imported: the head, which imports this module, never loads torch.
_ARM: Final = "workers.tuning.arm"

#: The first optimiser of a process imports it, which takes 1.5 s of a core: more than all else that
#: an arm begins with.
_SLOW: Final = "torch._dynamo"


def fork_context() -> ForkServerContext:
    """Return how to start arms.

    Whatever starts the fork server first in this process decides what it has imported.
    """
    # The fork server loads torch, which reads there which allocator to use. It inherits this
    # process's environment.
    set_for_cuda(os.environ, None)
    multiprocessing.set_forkserver_preload([_ARM, _SLOW])
    return multiprocessing.get_context("forkserver")


def run_arm(connection: Connection, spec: ArmSpec) -> None:
    """Answer until the other end is closed. Ctrl-C is for the head, which closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)  # standard output belongs to the head
    os.dup2(log, 2)
    os.environ.update(spec.environment)
    # After what the arm asks for: another allocator than that of a run would be measured, or
    # another card.
    set_for_cuda(os.environ, workspace_of(spec.settings))
    importlib.import_module(_ARM).serve(connection, spec)
