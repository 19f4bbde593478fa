"""The progress of a slot's training over all of its processes. Pure.

A process that continues from a checkpoint repeats steps that the process before had already
reported. It cannot know how many; this module counts them from the statuses of both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workers.messages import NO_PROGRESS, Progress, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The reported progress of a training."""

    last: Progress = NO_PROGRESS
    """The last progress that any process reported."""
    incarnation: int | None = None
    """The incarnation of that process."""
    redone_before: int = 0
    """Steps that earlier processes repeated, plus those that this process must repeat because the
    one before got further than its checkpoint.
    """

    @property
    def progress(self) -> Progress:
        """The last reported progress, with the repeated steps of all processes."""
        if self.last.train_step is None:
            return self.last
        return replace(self.last, redone_steps=self.redone_before + (self.last.redone_steps or 0))


#: No process has reported yet.
NO_TRAINING = Training()


def follow(training: Training, status: Status) -> Training:
    """Return the training after a status; a status without progress changes nothing."""
    last = status.progress
    if last is None:
        return training
    if status.incarnation == training.incarnation:
        return replace(training, last=last)
    redone = training.redone_before + (training.last.redone_steps or 0)
    if last.train_step is not None:
        # The step at which the process began; its first status may come some steps later.
        from_step = (
            last.train_step if last.saved_step is None else min(last.train_step, last.saved_step)
        )
        redone += max(0, (training.last.train_step or 0) - from_step)
    return Training(last=last, incarnation=status.incarnation, redone_before=redone)
