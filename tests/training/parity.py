"""How far two trainings are apart, in units of what another seed changes."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from statistics import fmean

from tests.training.scene import trainer
from workers.training.trainer import Trainer

STEPS = 30


def losses(run: Trainer, limit: int = 5, level: int = 0) -> list[float]:
    """Train to the end; return the loss of each step."""
    found: list[float] = []
    while not run.finished:
        if run.micro_batch(limit, level).updated:
            found.append(run.course.losses[-1])
    return found


def late_gap(one: list[float], other: list[float]) -> float:
    """Return the mean difference in the last half."""
    half = len(one) // 2
    return fmean(abs(a - b) for a, b in zip(one[half:], other[half:], strict=True))


@cache
def seed_noise(kind: str) -> float:
    """Return the gap that three seeds have among each other on average."""
    courses = [losses(trainer(kind, seed=seed, steps=STEPS)) for seed in (1, 2, 3)]
    return fmean(late_gap(one, other) for one, other in combinations(courses, 2))
