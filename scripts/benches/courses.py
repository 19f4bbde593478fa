"""How memory that others leave to a worker comes and goes: eight courses, drawn at random.

A course is a list of (second, available bytes), the first at second 0; a level holds until the next. None of them is a
recording. How much is taken, and how often, is set such that the rules of today score, where memory is precious and as
a mean over many seeds, what they scored when the targets were set: 0.77 for accelerate's, 0.66 for toma's, 0.73 for the
guide's; AIMD, with 10,000 items a second to grow back in, comes to 0.89.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from workers.units import GIB

_LOW_GIB, _HIGH_GIB = 1.2, 8.0

Course = list[tuple[float, float]]


def _constant(draw: Random, _duration_s: float) -> Course:
    return [(0.0, draw.uniform(_LOW_GIB, _HIGH_GIB) * GIB)]


def _steps(draw: Random, duration_s: float) -> Course:
    """Another level every two to five minutes."""
    points, at_s = [], 0.0
    while at_s < duration_s:
        points.append((at_s, draw.uniform(_LOW_GIB, _HIGH_GIB) * GIB))
        at_s += draw.uniform(120.0, 300.0)
    return points


def _squeeze(draw: Random, duration_s: float) -> Course:
    """High at first; then one or two cuts, and what is cut stays cut."""
    return _in_parts(draw, duration_s, draw.uniform(5.0, _HIGH_GIB), at_once=(0.25, 0.5), each=(0.45, 0.7))


def _release(draw: Random, duration_s: float) -> Course:
    """Low at first; more is released, at once or in two parts."""
    return _in_parts(draw, duration_s, draw.uniform(_LOW_GIB, 2.2), at_once=(2.5, 3.6), each=(1.6, 1.9))


def _in_parts(
    draw: Random, duration_s: float, level: float, at_once: tuple[float, float], each: tuple[float, float]
) -> Course:
    points = [(0.0, level * GIB)]
    parts = draw.choice((1, 2))
    for part in range(parts):
        level = min(_HIGH_GIB, max(_LOW_GIB, level * draw.uniform(*(at_once if parts == 1 else each))))
        points.append((duration_s * (draw.uniform(0.2, 0.4) if part == 0 else draw.uniform(0.5, 0.7)), level * GIB))
    return points


def _game(draw: Random, duration_s: float) -> Course:
    """A desktop that takes a little more or less each second; twice a game takes most of the memory for minutes."""
    level, jitter = draw.uniform(4.0, _HIGH_GIB), draw.uniform(0.02, 0.08)
    games = []
    for half in (0.0, 0.5):
        begin_s = duration_s * (half + draw.uniform(0.08, 0.2))
        games.append((begin_s, begin_s + duration_s * draw.uniform(0.08, 0.25), draw.uniform(0.18, 0.35)))
    points = []
    for second in range(int(duration_s) + 1):
        left = next((share for begin_s, end_s, share in games if begin_s <= second < end_s), 1.0)
        points.append((float(second), level * left * (1 - jitter * draw.random()) * GIB))
    return points


def _neighbour(draw: Random, duration_s: float) -> Course:
    """A job that takes a fixed amount for minutes, ends, and comes again."""
    level = draw.uniform(4.0, _HIGH_GIB)
    amount = level * draw.uniform(0.45, 0.75)
    here, at_s, points = draw.random() < 0.5, 0.0, []
    while at_s < duration_s:
        points.append((at_s, (level - amount * here) * GIB))
        here = not here
        at_s += draw.uniform(60.0, 240.0)
    return points


def _leak(draw: Random, duration_s: float) -> Course:
    """A neighbour that takes more and more, and gives all of it back when it restarts."""
    high = draw.uniform(4.0, _HIGH_GIB)
    low = max(_LOW_GIB, high * draw.uniform(0.2, 0.4))
    points, begin_s = [], 0
    length_s = draw.randint(120, 300)
    for second in range(int(duration_s) + 1):
        if second - begin_s >= length_s:
            begin_s, length_s = second, draw.randint(120, 300)
        points.append((float(second), (high - (high - low) * (second - begin_s) / length_s) * GIB))
    return points


def _walk(draw: Random, duration_s: float) -> Course:
    """A small step each second, reflected where it would leave the bounds."""
    level, step = draw.uniform(2.5, 6.0), draw.uniform(0.04, 0.1)
    points = []
    for second in range(int(duration_s) + 1):
        points.append((float(second), level * GIB))
        level += draw.gauss(0.0, step)
        level = 2 * _LOW_GIB - level if level < _LOW_GIB else level
        level = 2 * _HIGH_GIB - level if level > _HIGH_GIB else level
    return points


COURSES: Mapping[str, Callable[[Random, float], Course]] = {
    "constant": _constant,
    "steps": _steps,
    "squeeze": _squeeze,
    "release": _release,
    "game": _game,
    "neighbour": _neighbour,
    "leak": _leak,
    "walk": _walk,
}
