"""Which members of a sweep go on at a milestone: ASHA that pauses.

ASHA (Li et al., 2020, arXiv 1810.05934) lets the best of every `factor` members that reached a
milestone go on. Here the others are paused, not ended, and go on later when enough others came in
behind them. Only the order in which milestones were reached counts, so a queue that is read back
gives the same decisions. Those of other sweeps must have been left out, and those of members that
failed may be: they hold a place else. Pure; it starts, pauses and ends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TypeAlias

from orchestrator.jobs.model import Milestones, Standing

#: A job, a milestone that it has reached, and its metric there.
Reach: TypeAlias = tuple[str, int, float]


def milestones_of(rule: Milestones, steps: int | None) -> tuple[int, ...]:
    """Return the steps at which members of so many steps are compared, the smallest first.

    The last step is not among them: a member that gets there is done.
    """
    milestones = []
    step, last = rule.first or 0, rule.last or steps or 0
    while 0 < step < min(last, steps or last):
        milestones.append(step)
        step *= rule.factor
    return tuple(milestones)


def next_of(standing: Standing, step: int | None) -> int | None:
    """Return the first milestone that a job has not passed, if it has reached it by now."""
    rule, job = standing.job.milestones, standing.job
    ahead = milestones_of(rule, job.steps) if rule is not None else ()
    return next((each for each in ahead if standing.milestone < each <= (step or 0)), None)


def ranking(rule: Milestones, reached: Sequence[Reach], milestone: int) -> tuple[str, ...]:
    """Return the members that reached a milestone, the best first; of equal ones the earlier.

    A value that is not finite ranks last. A job that reached it more than once, after a step back
    to a checkpoint, counts with its first value.
    """
    values: dict[str, float] = {}
    for job, step, value in reached:
        if step == milestone:
            values.setdefault(job, value if rule.is_min else -value)
    ranks = {job: (0, it) if math.isfinite(it) else (1, 0.0) for job, it in values.items()}
    return tuple(sorted(values, key=ranks.__getitem__))


def promotable(
    rule: Milestones, reached: Sequence[Reach], paused: Collection[str], *, is_idle: bool = False
) -> str | None:
    """Return the paused member that is to go on next, or `None` where all are to wait. One that has
    just reached its milestone is as if it were paused there.

    A member goes on when by now it is among the best of its milestone; the furthest first, then
    the best. `is_idle` says that a card is free which no job that is queued can use: then one
    more goes on at each milestone than otherwise. So no card idles while candidates are left
    that are nearly as good, and a sweep too small for its factor still brings one to the end. At
    most one more at each milestone: the sweep ends when this returns `None` and none of it runs.
    """
    last = {job: step for job, step, _ in reached if job in paused}
    for milestone in sorted(set(last.values()), reverse=True):
        ranked = ranking(rule, reached, milestone)
        for job in ranked[: len(ranked) // rule.factor + is_idle]:
            if last.get(job) == milestone:
                return job
    return None
