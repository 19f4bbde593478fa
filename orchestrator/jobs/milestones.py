"""Which members of a sweep continue at a milestone: ASHA with pauses.

ASHA (Li et al., 2020, arXiv 1810.05934) lets the best of every `factor` members that reached a
milestone continue. Here the others are paused, not ended: they continue later, once enough worse
members have reached the milestone. Decisions depend only on the order in which milestones were
reached, so a queue that is read back decides the same. The caller passes members of one sweep; it
may leave out failed ones, which otherwise keep their rank. Pure; starts, pauses and ends no job.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TypeAlias

from orchestrator.jobs.model import Milestones, Standing

#: A job, a milestone that it has reached, and its metric there.
Reach: TypeAlias = tuple[str, int, float]


def milestones_of(rule: Milestones, steps: int | None) -> tuple[int, ...]:
    """Return the milestones of a member that trains for `steps` steps, in increasing order.

    Its last step is not a milestone: there the member is done.
    """
    milestones = []
    step, last = rule.first or 0, rule.last or steps or 0
    while 0 < step < min(last, steps or last):
        milestones.append(step)
        step *= rule.factor
    return tuple(milestones)


def next_of(standing: Standing, step: int | None) -> int | None:
    """Return the job's next milestone if it is at most `step`, else `None`."""
    rule, job = standing.job.milestones, standing.job
    ahead = milestones_of(rule, job.steps) if rule is not None else ()
    return next((each for each in ahead if standing.milestone < each <= (step or 0)), None)


def ranking(rule: Milestones, reached: Sequence[Reach], milestone: int) -> tuple[str, ...]:
    """Return the members that reached `milestone`, best first; among equals, the earlier is first.

    Values that are not finite rank last. A job that reached the milestone several times, because it
    restarted from a checkpoint, counts with its first value.
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
    """Return the paused member that continues next, or `None` if all wait.

    The caller counts a member that has just reached its milestone as paused. A member continues
    once it is among the best 1/`factor` of its milestone; higher milestones first, then the best.

    `is_idle` says that a free card has no queued job that can use it. Then each milestone lets one
    more member continue: no card is idle while good members wait, and a sweep smaller than `factor`
    still finishes one. The sweep ends when this returns `None` and no member runs.
    """
    last = {job: step for job, step, _ in reached if job in paused}
    for milestone in sorted(set(last.values()), reverse=True):
        ranked = ranking(rule, reached, milestone)
        for job in ranked[: len(ranked) // rule.factor + is_idle]:
            if last.get(job) == milestone:
                return job
    return None
