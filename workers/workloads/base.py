"""The contract between the engine and its work, matmul or a user's own step; and how a workload is
found by its name.

A workload turns the two numbers that a policy changes, size and batch, into tensors and work. It
does not catch out-of-memory, choose sizes, sleep or report: the engine does. See docs/workloads.md
for an example.
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
    """What the engine gives a workload once, before its first step."""

    device: torch.device
    """The device of all its tensors."""
    dtype: torch.dtype
    """The element type to compute in, if the workload has a choice."""
    seed: int
    """Seed of all its random numbers."""
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    """The section `train:` of cluster.yaml."""
    slot: str = ""
    """Name of the slot, such as `pc1/3`."""
    state_dir: Path | None = None
    """Folder on this machine for the slot's state of this run; the workload creates it. `None`: no
    state may be kept.
    """
    incarnation: int = 0
    """Number of the slot's process in the run, from 0."""
    fresh: bool = True
    """Whether this is the slot's first process in the run: then it must not continue what lies in
    `state_dir`.
    """
    checkpoint: Path | None = None
    """The file with the head's copy of what an earlier process of the slot had as `saved`; the
    state in `state_dir` may be newer.
    """
    memory: MemorySettings | None = None
    """The section `memory:` of cluster.yaml, for a workload that fills its share of the device."""
    tell: Callable[..., None] = lambda *_, **__: None
    """Adds an event to the run's event log: its name, and figures or text as keywords."""
    team: TeamSpec | None = None
    """The team that shares the slot's work; `None`: the slot works by itself."""
    team_orders: Callable[[], TeamOrders | None] = lambda: None
    """Returns the newest orders of that team; `None`: there are none yet."""
    pause: Callable[..., None] = lambda **_: None
    """To be called within a step, between two parts, while the workload waits for other slots. With
    `tells=True` the head gets a status at once. An exception from it ends the turn, as in `run`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one good step did."""

    flop: float = 0.0
    """Floating-point operations, for TFLOP/s; 0 if the workload does not count them."""
    partial: bool = False
    """Whether less work was left than this size and batch allow; then the engine learns nothing
    from the memory of the step.
    """


class Workload(ABC):
    """A workload. Subclass it, or write a class with the same methods."""

    #: The memory of a step grows with size^size_power x batch^batch_power, plus a fixed part. 0:
    #: the number does not affect memory, and is never changed to save some. An estimate is enough:
    #: the engine measures what a step really takes.
    size_power: float = 2.0
    batch_power: float = 1.0

    #: Whether a step needs exactly `needed_bytes`, even if it holds more than that. Then the engine
    #: begins at the largest step that fits by `needed_bytes`, and ignores what steps hold.
    needs_are_exact: bool = False

    #: Bytes that it holds to fill its share of the device, beyond the needs of its step; `None`: it
    #: holds only what its steps need.
    claim_bytes: int | None = None

    #: Whether all work is done, and everything that must outlive the process is written. Read after
    #: each step; a class may make it a property. Then the slot is DONE, and its process is ended.
    finished: bool = False

    #: Whether `save` has not been able to write since `save_soon` was called: a slot that must rest
    #: or end goes on until then. A class may make it a property.
    save_due: bool = False

    #: The last value of each figure that it judges itself by, such as the validation loss. A queue
    #: of jobs compares them.
    metrics: Mapping[str, float] = MappingProxyType({})

    #: The newest file with its state, which is then sent to the head in pieces; `None`: nothing is
    #: sent.
    saved: Path | None = None

    #: A note for the table while it works, such as a checkpoint that cannot be written; empty:
    #: none.
    notice: str = ""

    #: Shown instead of `notice` while it waits for another process; empty: it does not wait, or not
    #: for long.
    waits_for: str = ""

    #: Its status in its team; `None`: it has none. A class may make it a property.
    team: TeamStatus | None = None

    @classmethod
    def prepare(cls, settings: Mapping[str, Scalar]) -> None:
        """Import what it needs besides its own module, before the device is opened and the cap is
        set: imports are no memory of the workload. Allocate nothing here.
        """
        del settings  # by default importing its module is enough

    def __init__(self, context: WorkloadContext) -> None:
        """Keep the context. Allocate nothing large here, but in `step`, where that may fail."""
        self.context = context

    def run(self, loop: Loop[Run]) -> StepResult | None:
        """Do one step, in one part or more. `loop.run` calls each part with what fits now, and
        again, smaller, after an out-of-memory. By default a step is one part, `step`.

        If `loop.run` raises before a part begins, the turn has ended: let the exception pass, and
        go on with the next part when `run` is called again.
        """

        def part(run: Run) -> StepResult | None:
            done = self.step(run.size, run.batch)
            if isinstance(done, StepResult) and done.partial:
                loop.was_partial()
            return done

        return loop.run(part)

    def step(self, size: int, batch: int) -> StepResult | None:
        """Do one unit of work of about 0.1 to 1 s at this size and batch.

        After an out-of-memory it is called again with the same numbers or smaller ones, and must
        start from the beginning: a step counts only when it returns. May raise whatever torch
        raises.
        """
        del size, batch
        raise NotImplementedError(f"{type(self).__name__} defines neither step nor run")

    @abstractmethod
    def release(self) -> None:
        """Drop every tensor, so that this workload holds no memory.

        Called when memory has run out.
        """

    def shed(self) -> None:
        """Drop what a failed step has left, but keep state that took many steps to make. By default
        drop all.

        Called after every failed step, and when far more is held between steps than before.
        """
        self.release()

    def park(self) -> int:
        """Move the state to host memory, so that no tensor is left on the device; return its bytes.

        Called when not even the smallest step fits. By default all is dropped, and the result is 0.
        """
        self.release()
        return 0

    def unpark(self) -> None:  # noqa: B027 - by default nothing waits
        """Move the state back; called before the next step if `park` returned more than 0.

        May run out of memory. Then the state must still be in host memory, and this is called again
        later.
        """

    def stages(self) -> Stages | None:
        """Return the only possible batches, and levels that save more memory than a smaller batch
        does; `None`: any size is possible, and any batch up to `workload.batch`.

        For workloads whose memory does not follow size and batch alone; they define `run`.
        """
        return None

    def save(self) -> None:  # noqa: B027 - by default there is nothing to save
        """Write the state if that is due. Called after each good step; its time does not count as
        the step's.

        While `save_due` is true, it is also called about once a second when no step is done, for
        example while the state waits in host memory. On a CPU the host memory that it takes does
        not count; on a card the cap holds here too.
        """

    def save_soon(self) -> None:  # noqa: B027 - as above
        """Make `save` write the state the next time it can, due or not: the user has asked for
        it.
        """

    def progress(self) -> Progress | None:
        """Return the progress; called about once a second, between two steps.

        `None`: the work has no end, and keeps no state between steps.
        """
        return None

    def attend(self) -> None:  # noqa: B027 - as above
        """Called about once a second while the slot is at work, also while it rests for its duty or
        its card is too hot. Not called while the slot is held.
        """

    def needed_bytes(self, size: int, batch: int) -> int | None:
        """Return the least bytes that a step of this size and batch needs; `None`: not known in
        advance.
        """
        del size, batch  # unused by default
        return None

    def check(self, seed: int) -> Check | None:
        """Verify the latest result; `None`: there is nothing to verify, or this workload cannot.

        Called now and then between two steps, for about 1 % of the time. Must not affect the next
        step, and should take no memory beyond that of the last step. May raise whatever torch
        raises.

        Args:
            seed: For random draws. Counts up: a workload with several kinds of checks alternates by
                it.
        """
        del seed  # the default cannot verify
        return None


def find_workload(name: str) -> type[Workload]:
    """Import the workload `matmul` or `train`, or the user's `package.module:Class`.

    Raises:
        IncompatibleError: The name cannot be imported, or names something else than a workload.
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
