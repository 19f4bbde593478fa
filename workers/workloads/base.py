"""The contract between the engine and what it computes, matmul or a user's own step, and how that
is found by name.

A workload turns the two numbers a policy moves, size and batch, into tensors and work. It does not
catch out-of-memory, choose sizes, sleep or report: the engine does. See docs/workloads.md for an
example.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch

from workers.elastic.loop import Loop
from workers.messages import Cause, IncompatibleError, Progress, TeamOrders, TeamStatus
from workers.policy.base import Run, Stages
from workers.settings import MemorySettings, Scalar, TeamSpec
from workers.verification.check import Check

_BUILT_IN: Final = {
    "matmul": "workers.workloads.matmul:Matmul",
    "train": "workers.workloads.train:Train",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadContext:
    """What a workload is given once, before its first step."""

    device: torch.device
    """Where its tensors must be."""
    dtype: torch.dtype
    """The element type to compute in, as far as the workload has a choice."""
    seed: int
    """For whatever it draws at random."""
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    """The section `train:` of cluster.yaml."""
    slot: str = ""
    """Such as `pc1/3`."""
    state_dir: Path | None = None
    """Where on this machine the slot's state of this run may be kept; made by who needs it. `None`:
    nowhere.
    """
    incarnation: int = 0
    """Counts the processes of the slot in the run."""
    fresh: bool = True
    """Whether this is the slot's first process in the run: what lies in `state_dir` is then not to
    be continued.
    """
    checkpoint: Path | None = None
    """The file with the head's copy of what an earlier process of the slot had in `saved`; it may
    be older than what lies here.
    """
    memory: MemorySettings | None = None
    """The section `memory:` of cluster.yaml, for a workload that fills its share of the device."""
    tell: Callable[..., None] = lambda *_, **__: None
    """Adds an event to the run's event log: its name, and figures or text by keyword."""
    team: TeamSpec | None = None
    """With whom the slot shares its work; `None`: it works by itself."""
    team_orders: Callable[[], TeamOrders | None] = lambda: None
    """Returns the newest orders of that team; `None`: there are none yet."""
    pause: Callable[..., None] = lambda **_: None
    """Called within a step, between two parts, while it waits for others. With `tells=True` the
    head hears at once how the slot is. What it raises ends the turn, as in `run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one good step did."""

    flop: float = 0.0
    """Floating-point operations, for TFLOP/s; 0 when the workload does not count them."""
    partial: bool = False
    """Whether there was less left to do than this size and batch allow: then nothing is learned
    from its memory.
    """


class Workload(ABC):
    """A workload. Subclass it, or write a class with the same methods."""

    #: The memory of a step grows with size^size_power x batch^batch_power, beside what is fixed. 0:
    #: a number that does not change memory, and is never changed to save some. A guess is enough:
    #: what a step really takes is measured.
    size_power: float = 2.0
    batch_power: float = 1.0

    #: Whether a step needs what `needed_bytes` says and no more, even where it holds more than that.
    #: Then it begins at the largest that is said to fit, and what steps hold is not looked at.
    needs_are_exact: bool = False

    #: What it holds beyond what its step needs, to fill its share of the device, in bytes; `None`:
    #: it takes what its steps need.
    claim_bytes: int | None = None

    #: Whether all is done that there was to do, and whatever must outlive the process is written.
    #: Looked at after each step; a class may make it a property. The slot is
    #: then DONE, and its process is ended.
    finished: bool = False

    #: Whether `save_soon` was called, and `save` has not been able to write since: a slot that is
    #: to rest or to end goes on until then. A class may make it a property.
    save_due: bool = False

    #: The last of each figure that it has judged itself by, such as the loss of validation. A
    #: queue of jobs compares them.
    metrics: Mapping[str, float] = MappingProxyType({})

    #: The newest file with its state, which then goes to the head piece by piece; `None`: it stays
    #: here.
    saved: Path | None = None

    #: What the table says of it while it works, such as a checkpoint that cannot be written; empty:
    #: nothing.
    notice: str = ""

    #: What it says instead while it waits for another process; empty: it does not, or not for long.
    waits_for: str = ""

    #: How it stands in its team; `None`: it has none. A class may make it a property.
    team: TeamStatus | None = None

    @classmethod
    def prepare(cls, settings: Mapping[str, Scalar]) -> None:
        """Import what it needs beside its own module, before the device is opened and the cap is
        set: imports are no memory of the workload. Allocate nothing here.
        """
        del settings  # by default all is imported with its module

    def __init__(self, context: WorkloadContext) -> None:
        """Keep the context; allocate nothing large here, memory is found in `step`."""
        self.context = context

    def run(self, loop: Loop[Run]) -> StepResult | None:
        """Do one step, in one part or more: each is handed to `loop.run`, which calls it with what
        fits now, and again, smaller, after an out-of-memory. By default a step is one part, `step`.

        What `loop.run` raises before a part begins ends the turn: let it pass, and go on with the
        next part when this is called again.
        """

        def part(run: Run) -> StepResult | None:
            done = self.step(run.size, run.batch)
            if isinstance(done, StepResult) and done.partial:
                loop.was_partial()
            return done

        return loop.run(part)

    def step(self, size: int, batch: int) -> StepResult | None:
        """Do one unit of work of about 0.1 to 1 s at this size and batch.

        Called again after an out-of-memory, with the same numbers or smaller ones, and must then
        start from the beginning: a step counts only when it returns. May raise whatever torch
        raises.
        """
        del size, batch
        raise NotImplementedError(f"{type(self).__name__} defines neither step nor run")

    @abstractmethod
    def release(self) -> None:
        """Drop every tensor, so that nothing this workload holds keeps memory.

        Called when memory has run out.
        """

    def shed(self) -> None:
        """Drop what a failed step has left, and keep the state that took many steps to make. Drops
        all by default.

        Called after every step that failed, and when far more is held between steps than before.
        """
        self.release()

    def park(self) -> int:
        """Move the state to host memory, so that no tensor is left on the device; return the bytes
        that wait there.

        Called when not even the smallest step fits. By default all is dropped, and nothing waits.
        """
        self.release()
        return 0

    def unpark(self) -> None:  # noqa: B027 - by default nothing waits
        """Move the state back; called before the next step if `park` returned more than 0.

        May run out of memory: the state must then still be in host memory, and this is called again
        later.
        """

    def stages(self) -> Stages | None:
        """Offer the only batches there are, and how often more can be saved than a smaller batch
        does; `None`: any size, and any batch up to `workload.batch`.

        For workloads whose memory does not follow size and batch alone; they define `run`.
        """
        return None

    def save(self) -> None:  # noqa: B027 - by default there is nothing to save
        """Write the state down if that is due. Called after each good step; what it takes does not
        count as the step's.

        While `save_due` says so, also called about once a second while no step is done, such as while
        the state waits in host memory.
        On a CPU what it takes of host memory does not count; on a card the cap holds here too.
        """

    def save_soon(self) -> None:  # noqa: B027 - as above
        """Have `save` write the state the next time that it can, due or not: the user has asked for
        it.
        """

    def progress(self) -> Progress | None:
        """Tell how far it is, about once a second, between two steps.

        `None`: it has no end and keeps no state between steps.
        """
        return None

    def attend(self) -> None:  # noqa: B027 - as above
        """Take note that the slot is at work, about once a second: also while it rests for its
        duty, or its card is too hot. Not called while it is held.
        """

    def needed_bytes(self, size: int, batch: int) -> int | None:
        """The least memory a step of this size and batch takes, or `None` if it cannot be told
        beforehand.
        """
        del size, batch  # not used by default
        return None

    def check(self, seed: int) -> Check | None:
        """Verify the latest result; `None`: there is nothing to verify, or this workload cannot.

        Called between two steps now and then, about 1 % of the time. Must leave the next step as it
        would have been, and should take no memory beyond what the last step held. May raise
        whatever torch raises.

        Args:
            seed: For what it draws at random. Counts up: a workload with several kinds of check
            takes them in turn.
        """
        del seed  # the default cannot
        return None


def find_workload(name: str) -> type[Workload]:
    """Import the workload `matmul` or `train`, or the user's `package.module:Class`.

    Raises:
        IncompatibleError: The name cannot be imported, or names something that is no workload.
    """
    module_name, _, class_name = _BUILT_IN.get(name, name).partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except IncompatibleError:
        raise
    except Exception as error:
        raise IncompatibleError(
            f"workload {name!r} cannot be loaded on this machine: {type(error).__name__}: {error}; "
            f"install it here, or start from the folder that holds {module_name.split('.')[0]}.py",
            cause=Cause.BAD_CONFIG,
        ) from error
    if not (isinstance(found, type) and issubclass(found, Workload)):
        raise IncompatibleError(
            f"workload {name!r} is not a subclass of workers.workloads.base.Workload"
        )
    return found
