"""How far the training of a slot is, over all of its processes. Pure.

A process that goes on from a checkpoint does some steps again that the one before had done and told
of. It cannot know how many; the statuses of both together say it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workers.messages import NO_PROGRESS, Progress, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What was told of it so far."""

    last: Progress = NO_PROGRESS
    """By the last process that told anything."""
    incarnation: int | None = None
    """Of that process."""
    redone_before: int = 0
    """Steps done again by the processes before it, and by it because they had got further than
    their checkpoint.
    """

    @property
    def progress(self) -> Progress:
        """The last that was told, with the steps that were done again by all processes."""
        if self.last.train_step is None:
            return self.last
        return replace(self.last, redone_steps=self.redone_before + (self.last.redone_steps or 0))


#: Nothing was told.
NO_TRAINING = Training()


def follow(training: Training, status: Status) -> Training:
    """Take a status into account; one without progress changes nothing."""
    last = status.progress
    if last is None:
        return training
    if status.incarnation == training.incarnation:
        return replace(training, last=last)
    redone = training.redone_before + (training.last.redone_steps or 0)
    if last.train_step is not None:
        # Where it began: its first status may come after some steps.
        from_step = (
            last.train_step if last.saved_step is None else min(last.train_step, last.saved_step)
        )
        redone += max(0, (training.last.train_step or 0) - from_step)
    return Training(last=last, incarnation=status.incarnation, redone_before=redone)
