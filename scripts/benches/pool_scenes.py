"""What happens on the simulated card of `pool.py`: whose steps take what, who comes and goes. Drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from benches.pool_card import CARD_BYTES, LARGEST, Job
from workers.units import MIB

Wishes = tuple[tuple[float, int], ...]
Happenings = dict[str, Any]
"""Fields of a scene."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What happens on the card."""

    name: str
    duration_s: float
    tenants: tuple[Wishes, ...] = ()
    """For each tenant: (second, bytes it wants from then on)."""
    deaths: tuple[tuple[float, int], ...] = ()
    """(second, index of the worker whose process ends)."""
    modest: int | None = None
    """Index of a worker whose largest step is small."""
    disturbed_at_s: tuple[float, ...] = ()
    """When a tenant comes or goes, beyond what it always does."""


def jobs(seed: int, workers: int, cap_bytes: int, *, modest: int | None) -> list[Job]:
    """Draw the workers' jobs: other fixed parts, other items, other times."""
    draw = Random(f"{seed}/jobs")  # noqa: S311 - a simulation, no secret
    made = []
    for index in range(workers):
        fixed_bytes = int(draw.uniform(0.03, 0.15) * cap_bytes)
        item_bytes = int(draw.uniform(1.0, 4.0) * MIB)
        items_at_cap = cap_bytes / item_bytes
        half_items = int(items_at_cap * draw.uniform(0.1, 0.5))
        step_s = draw.uniform(0.1, 2.5)
        made.append(
            Job(
                fixed_bytes=fixed_bytes,
                item_bytes=item_bytes,
                half_items=half_items,
                rate_per_s=(half_items + items_at_cap) / step_s,
                largest=int(0.1 * items_at_cap) if index == modest else LARGEST,
            )
        )
    return made


def _constant(_draw: Random, _workers: int, _duration_s: float) -> Happenings:
    """Nobody else: what the budgets allow is there."""
    return {}


def _crowded(draw: Random, _workers: int, _duration_s: float) -> Happenings:
    """Somebody has a part of the card and keeps it."""
    return {"tenants": (((0.0, int(draw.uniform(0.2, 0.5) * CARD_BYTES)),),)}


def _game(draw: Random, _workers: int, duration_s: float) -> Happenings:
    """A game runs when the workers start, ends, comes back, and ends."""
    level = int(draw.uniform(0.3, 0.55) * CARD_BYTES)
    times = [duration_s * (quarter / 4 + draw.uniform(-0.05, 0.05)) for quarter in (1, 2, 3)]
    wishes = ((0.0, level), (times[0], 0), (times[1], level), (times[2], 0))
    return {"tenants": (wishes,), "disturbed_at_s": tuple(times)}


def _neighbour(draw: Random, _workers: int, duration_s: float) -> Happenings:
    """A job next door whose memory goes up and down by some percent of the card, every second."""
    level, jitter = draw.uniform(0.25, 0.4), draw.uniform(0.005, 0.015)
    wishes = tuple(
        (float(second), int((level + draw.uniform(-jitter, jitter)) * CARD_BYTES)) for second in range(int(duration_s))
    )
    return {"tenants": (wishes,)}


def _visits(draw: Random, _workers: int, duration_s: float) -> Happenings:
    """A job that takes a part of the card for half a minute to two, ends, and comes again."""
    at_s, wishes, here = 0.0, [], True
    while at_s < duration_s:
        wishes.append((at_s, int(draw.uniform(0.15, 0.4) * CARD_BYTES) if here else 0))
        at_s += draw.uniform(30.0, 120.0)
        here = not here
    return {"tenants": (tuple(wishes),), "disturbed_at_s": tuple(at_s for at_s, _ in wishes)}


def _restart(draw: Random, workers: int, duration_s: float) -> Happenings:
    """Somebody has a part of the card, and a worker's process dies now and then."""
    deaths, at_s = [], draw.uniform(60.0, 90.0)
    while at_s < duration_s:
        deaths.append((at_s, draw.randrange(workers)))
        at_s += draw.uniform(60.0, 120.0)
    return {"tenants": (((0.0, int(draw.uniform(0.2, 0.5) * CARD_BYTES)),),), "deaths": tuple(deaths)}


def _modest(draw: Random, workers: int, _duration_s: float) -> Happenings:
    """Somebody has a part of the card, and one worker wants little of the rest."""
    tenants = (((0.0, int(draw.uniform(0.2, 0.5) * CARD_BYTES)),),)
    return {"tenants": tenants, "modest": draw.randrange(workers)}


SCENES: dict[str, Callable[[Random, int, float], Happenings]] = {
    "constant": _constant,
    "crowded": _crowded,
    "game": _game,
    "neighbour": _neighbour,
    "visits": _visits,
    "restart": _restart,
    "modest": _modest,
}


def scenes(seed: int, workers: int, duration_s: float) -> list[Scene]:
    """Draw the scenes of a seed."""
    made = []
    for name, draw_scene in SCENES.items():
        draw = Random(f"{seed}/{name}/scene")  # noqa: S311 - a simulation, no secret
        made.append(Scene(name=name, duration_s=duration_s, **draw_scene(draw, workers, duration_s)))
    return made
