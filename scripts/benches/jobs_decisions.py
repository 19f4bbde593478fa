"""How good the decisions of the queue are: placement and milestones, in virtual time.

    PYTHONPATH=. python scripts/benches/jobs_decisions.py

Prints one JSON object. `tests/jobs/` plays the same with fewer draws. Nothing is measured on a
card; what a step takes and what a curve does are drawn.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Run as a script it stands beside the packages, not in them.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from orchestrator.jobs.milestones import goes_on, milestones_of, promotable
from orchestrator.jobs.model import Card, Milestones
from orchestrator.jobs.placement import Candidate, Resident, estimate, plan
from workers.units import GIB

SPEEDS = (1.75, 1.0)
CARDS = (
    Card(name="pc1", node="pc1", title="RTX 3090", room_bytes=23 * GIB, speed=SPEEDS[0]),
    Card(name="pc2", node="pc2", title="RTX 3070", room_bytes=7 * GIB, speed=SPEEDS[1]),
)
RULE = Milestones(rule="asha", metric="loss", is_min=True, first=500, factor=3, last=13500)
MEMBERS = 27


def _random(*key: object) -> random.Random:
    return random.Random(repr(key))  # noqa: S311 - a simulation


# --- placement


def candidates_of(lengths_s: Sequence[float]) -> list[Candidate]:
    """Return jobs of so many seconds on a card of speed 1."""
    return [
        Candidate(name=f"job-{place}", seconds={card.name: length / card.speed for card in CARDS})
        for place, length in enumerate(lengths_s)
    ]


def shortest_makespan(lengths_s: Sequence[float]) -> float:
    """Return the makespan of the best of all assignments."""
    best = math.inf
    for places in itertools.product(range(len(SPEEDS)), repeat=len(lengths_s)):
        load = [0.0] * len(SPEEDS)
        for length, place in zip(lengths_s, places, strict=True):
            load[place] += length / SPEEDS[place]
        best = min(best, max(load))
    return best


def first_come_makespan(lengths_s: Sequence[float]) -> float:
    """Return the makespan where the next job goes to the first free card, whatever its speed."""
    free_s = [0.0] * len(SPEEDS)
    for length in lengths_s:
        place = min(range(len(SPEEDS)), key=lambda each: free_s[each])
        free_s[place] += length / SPEEDS[place]
    return max(free_s)


def placement(draws: int = 500) -> dict[str, float]:
    """Return the mean makespan against the best one and against first-come.

    The uncertain ones are with lengths that the plan knows only within a factor (lognormal, sigma
    0.5), as before anything is measured.
    """
    ours, best, first, misled = [], [], [], []
    for seed in range(draws):
        draw = _random("placement", seed)
        lengths = [3600 * draw.lognormvariate(0, 1) for _ in range(draw.randint(4, 8))]
        ours.append(estimate(candidates_of(lengths), CARDS, {}).makespan_s)
        best.append(shortest_makespan(lengths))
        first.append(first_come_makespan(lengths))
        misled.append(_played(lengths, [each * draw.lognormvariate(0, 0.5) for each in lengths]))
    return {
        "draws": draws,
        "to_optimum_mean": _mean_ratio(ours, best),
        "to_first_come_mean": _mean_ratio(ours, first),
        "optimum_to_first_come_mean": _mean_ratio(best, first),
        "uncertain_to_optimum_mean": _mean_ratio(misled, best),
        "uncertain_to_first_come_mean": _mean_ratio(misled, first),
    }


def _mean_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.fmean(a / b for a, b in zip(over, under, strict=True))


def _played(lengths_s: Sequence[float], told_s: Sequence[float]) -> float:
    """Return the makespan of jobs whose lengths the plan is told wrongly, until each ends."""
    left = {each.name: each for each in candidates_of(told_s)}
    true_s = {f"job-{place}": length for place, length in enumerate(lengths_s)}
    free_s = {card.name: 0.0 for card in CARDS}
    told_free_s = dict(free_s)
    now_s = 0.0
    while left:
        residents = {
            name: [Resident(name="x", budget_bytes=0, ends_at_s=max(now_s, told_free_s[name]))]
            for name, end_s in free_s.items()
            if end_s > now_s
        }
        for start in plan(list(left.values()), CARDS, residents, now_s).starts:
            speed = next(card.speed for card in CARDS if card.name == start.card)
            told_free_s[start.card] = now_s + left.pop(start.job).seconds[start.card]
            free_s[start.card] = now_s + true_s[start.job] / speed
        now_s = min((end_s for end_s in free_s.values() if end_s > now_s), default=now_s)
    return max(free_s.values())


def decision_ms(count: int, repeats: int = 9) -> float:
    """Return the median processor time of one plan with so many jobs, in ms."""
    draw = _random("decision", count)
    jobs = [
        Candidate(
            name=f"job-{place}", priority=draw.randint(0, 2), queued_at_s=draw.uniform(0, 20_000),
            seconds={"pc1": draw.lognormvariate(0, 1)},
            memory_bytes=int(draw.uniform(1, 24) * GIB),
        )
        for place in range(count)
    ]  # fmt: skip
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        plan(jobs, CARDS, {}, 20_000.0)
        times.append(time.process_time() - begin)
    return 1000 * statistics.median(times)


# --- milestones


@dataclass(frozen=True, slots=True)
class Curve:
    """A learning curve: a power law that falls from `floor + height` to `floor`."""

    floor: float
    height: float
    rate: float

    def at(self, step: int) -> float:
        return self.floor + self.height * math.pow(step / 100, -self.rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What became of a sweep."""

    cost: float
    """Steps done, as a share of all members' last ones."""
    kept: tuple[bool, bool]
    """Whether the best and the second best of all came to the end."""
    first_card: Mapping[str, int]
    stopped: frozenset[str]
    crossings: float
    """Share of the pairs whose order at the first milestone is not that at the end."""
    span: float
    """Time it took, as a share of the time of all members to the end on both cards."""


def curves_of(seed: int) -> dict[str, Curve]:
    draw = _random("curves", seed)
    return {
        f"lr-{place}": Curve(
            floor=3.0 + 0.5 * abs(draw.gauss(0, 1)), height=draw.uniform(1, 5),
            rate=draw.uniform(0.1, 0.8),
        )
        for place in range(MEMBERS)
    }  # fmt: skip


def play_sweep(seed: int, noise: float, rule: Milestones = RULE) -> SweepResult:
    """Play a sweep on two unequal cards. `noise` is the standard deviation of a value.

    A free card takes the member that is to go on, else the next that has not begun, else, with
    nothing left, one more of those that wait.
    """
    curves = curves_of(seed)
    draw = _random("noise", seed)
    queued, paused = list(curves), set[str]()
    reached: list[tuple[str, int, float]] = []
    step = dict.fromkeys(curves, 0)
    first_card: dict[str, int] = {}
    on_card: dict[int, tuple[float, str]] = {}
    now_s = 0.0

    def ahead(name: str) -> int:
        return next((each for each in milestones_of(rule) if each > step[name]), rule.last)

    while True:
        for card, speed in enumerate(SPEEDS):
            if card in on_card:
                continue
            name = promotable(rule, reached, paused)
            if name is None and queued:
                name = queued.pop(0)
            name = name or promotable(rule, reached, paused, is_idle=True)
            if name is not None:
                paused.discard(name)
                first_card.setdefault(name, card)
                on_card[card] = (now_s + (ahead(name) - step[name]) / speed, name)
        if not on_card:
            break

        card = min(on_card, key=lambda each: on_card[each])
        now_s, name = on_card.pop(card)
        step[name] = ahead(name)
        if step[name] < rule.last:
            reached.append((name, step[name], curves[name].at(step[name]) + draw.gauss(0, noise)))
            if goes_on(rule, reached, name, step[name]):
                end_s = now_s + (ahead(name) - step[name]) / SPEEDS[card]
                on_card[card] = (end_s, name)
            else:
                paused.add(name)

    best = sorted(curves, key=lambda each: curves[each].at(rule.last))[:2]
    pairs = list(itertools.combinations(curves.values(), 2))
    crossed = sum(
        (a.at(rule.first) < b.at(rule.first)) != (a.at(rule.last) < b.at(rule.last))
        for a, b in pairs
    )
    return SweepResult(
        cost=sum(step.values()) / (MEMBERS * rule.last),
        kept=(step[best[0]] == rule.last, step[best[1]] == rule.last), first_card=first_card,
        stopped=frozenset(paused), crossings=crossed / len(pairs),
        span=now_s / (MEMBERS * rule.last / sum(SPEEDS)),
    )  # fmt: skip


def milestones(draws: int = 200, noise: float = 0.05) -> dict[str, float]:
    results = [play_sweep(seed, noise) for seed in range(draws)]
    fates = [
        (card, name in result.stopped)
        for result in results
        for name, card in result.first_card.items()
    ]
    fast, slow = (
        statistics.fmean(is_stopped for on, is_stopped in fates if on == card) for card in (0, 1)
    )
    fmean = statistics.fmean
    return {
        "draws": draws, "noise": noise, "crossings": fmean(each.crossings for each in results),
        "cost_mean": fmean(each.cost for each in results),
        "cost_most": max(each.cost for each in results),
        "span_mean": fmean(each.span for each in results),
        "one_of_best_two_kept": fmean(any(each.kept) for each in results),
        "best_kept": fmean(each.kept[0] for each in results),
        "stopped_fast_card": fast, "stopped_slow_card": slow,
    }  # fmt: skip


def main() -> None:
    figures = {
        "placement": placement(),
        "plan_ms_200": decision_ms(200),
        "plan_ms_10000": decision_ms(10_000),
        "milestones": [milestones(noise=noise) for noise in (0.02, 0.05)],
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
