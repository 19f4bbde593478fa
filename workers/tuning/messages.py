"""What an arm is told, what it answers, and where its process begins.

    context = fork_context()
    context.Process(target=run_arm, args=(connection, spec))

Pickled through a pipe between a head and its own child process. Loads neither torch nor Ray, before
the process is a child of the fork server. That has imported torch once, so that an arm begins in
milliseconds and shares the library's memory. It has not touched a card: a context of CUDA does not
survive a fork.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Final

from workers.host.cuda_environment import set_for_cuda, workspace_of
from workers.settings import WorkerSpec

#: Named, not imported: the head, which imports this module, never loads torch.
_ARM: Final = "workers.tuning.arm"

#: The first optimiser of a process imports it, which takes 1.5 s of a core: more than all else that
#: an arm begins with.
_SLOW: Final = "torch._dynamo"

NO_ROOM: Final = "does not fit the cap"
"""How a refusal begins that is about memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpec:
    """One arm: what it computes, under which cap."""

    name: str
    spec: WorkerSpec
    """Budget and device. Its workload says what is computed: `train` or `matmul`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The section `train:` of this arm; empty for matmul."""
    plain: Mapping[str, Any] = field(default_factory=dict)
    """The section of the baseline. Its loss judges all arms, whatever each one is trained on."""
    seed: int = 0
    """Of weights and order; all arms read the same data."""
    log: Path
    """Where output of the process goes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What its environment needs before CUDA starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Make the training, and do the first optimiser steps.

    Their losses are compared with the baseline's.
    """

    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What the first steps were."""

    losses: tuple[float, ...] = ()
    """Of each optimiser step."""
    weights_sha256: str | None = None
    """After the last of them."""
    validation_loss: float | None = None
    """After the last of them, on samples that were not trained on; `None`: the task cannot tell."""
    first_step_s: float = 0.0
    """What the first step took, compilation included."""
    step_s: float = 0.0
    """The median of the other ones."""
    peak_bytes: int = 0
    """The highest use of the device by tensors in a step. Turns are not looked at: what parking
    leaves on a CPU's heap differs between equal arms by 15 %, and these peaks by 1 % (measured)."""
    flop: float | None = None
    """Of what a turn counts one of, in `Done.samples`: the operations of the model, without what is
    repeated.
    """
    micro: int = 0
    """Samples computed at once. Less than asked, if those did not fit."""
    device_name: str = ""
    card: str = "cpu"
    """UUID of the card, or `cpu`."""
    device_bytes: int | None = None
    """All of the device's memory."""
    driver: str | None = None
    torch: str = ""
    host_bytes: int = 0
    """Resident memory of the process, on the host."""
    parked_bytes: int = 0
    """Host memory that its state takes between two turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Work for so long, and at least so many steps; then park."""

    seconds: float
    least_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What was done in a turn."""

    samples: float
    """Samples, or tokens where lengths differ; for matmul 10^9 operations."""
    seconds: float
    """While the device computed. Going back to the device and parking are not counted."""
    clock_mhz: float | None = None
    throttled: bool = False
    neighbour_share: float | None = None
    """What other programs used of the machine's processors meanwhile; `None` on a card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Compute the validation loss as it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The loss on samples that were not trained on, and after how many steps."""

    validation_loss: float | None
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
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
