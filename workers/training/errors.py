"""The errors of a training, each with a sentence for the person who can act.

None of them is an out-of-memory, whatever text it quotes, so no smaller step follows. Therefore
none is a `RuntimeError`, whose text `workers.oom` reads.
"""

from __future__ import annotations

import importlib
from types import ModuleType


class TrainingError(Exception):
    """Base of the errors below."""


class TaskError(TrainingError):
    """The task cannot be trained: no parameters, no data, or nothing of that name."""


class NotLoadedError(TaskError):
    """The code of a task is not on this machine, or cannot be imported."""


def optional_library(name: str, need: str) -> ModuleType:
    """Import a library of the extra `hf`. `need`: the feature that needs it, for the message.

    Raises:
        TaskError: The library is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TaskError(f"{need} ({error}); type: pip install 'oom-orchestrator[hf]'") from error


class NotFiniteError(TrainingError):
    """The loss or its gradient is NaN or infinite; the weights are those of the last good step."""

    def __init__(self, what: str, value: float, step: int) -> None:
        super().__init__(what, value, step)  # pickle needs the arguments
        self.step = step
        """The number of the optimiser step that was not done, counted from 0."""

    def __str__(self) -> str:
        what, value, step = self.args
        return (
            f"the {what} of optimiser step {step} is {value}; training stopped, and the weights "
            "are those of the step before; lower the learning rate, or the largest norm of the "
            "gradient"
        )


class UpdateInterruptedError(TrainingError):
    """An update of the weights was interrupted, so they belong to no step.

    Load a checkpoint; never run the step again.
    """


class StateMismatchError(TrainingError):
    """A saved state is incomplete or of another model or version; nothing was loaded."""
