"""Random trainings, each by a plain loop and by `ElasticStep` in random parts. The results are
equal except for rounding, or `ElasticStep` refuses in one sentence.

A draw is a set of features, which are small functions that change a `Course`. Each feature has its
own random numbers, so that a draw without it is otherwise the same. Only the tested course has
parts, out-of-memory errors, recomputation and a restart, which must not change the result. With
dropout, which `ElasticStep` keys by sample, the reference is `ElasticStep` with whole batches.
"""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import tests.training.features
import tests.training.loops  # noqa: F401 - both modules register features
from tests.training.courses import FEATURES, STEPS, Course, Feature
from workers.training.elastic import ElasticStep
from workers.training.errors import TrainingError

Outcome: TypeAlias = Literal[
    "void", "equal", "refused", "told", "unequal", "raw error", "refused what is right",
    "a refusal changed something", "a refusal of several lines",
]  # fmt: skip

FINE: Final = ("void", "equal", "refused", "told")

#: Tolerances relative to the largest number of a tensor, at least 1. Rounding of 2^-53 and 2^-24
#: grows about 1,000 times in 20 steps; a missing or doubled gradient differs by more than 10^-4.
_TOLERANCES: Final = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.1}

#: A course with a larger number, or NaN, has diverged, and rounding has grown with it.
_DIVERGED: Final = 1000.0


# ---- What is drawn

#: A draw has one feature of each group.
GROUPS: Final = tuple(
    [each for each in FEATURES if each.of == group] for group in ("model", "reduction", "optimizer")
)


def drawn(seed: int) -> list[Feature]:
    """Draw the features of a course."""
    of = random.Random(seed)  # noqa: S311 - no secret
    density = of.choice([0.3, 1.0, 2.0])
    wanted = {
        of.choices(group, [feature.share for feature in group])[0].name for group in GROUPS
    } | {
        feature.name
        for feature in FEATURES
        if not feature.of and of.random() < feature.share * density
    }
    return compatible([feature for feature in FEATURES if feature.name in wanted])


def compatible(features: Sequence[Feature]) -> list[Feature]:
    """Return the features without those that exclude, or are excluded by, an earlier one."""
    chosen: list[Feature] = []
    for feature in features:
        if all(
            feature.name not in each.without.split() and each.name not in feature.without.split()
            for each in chosen
        ):
            chosen.append(feature)
    return chosen


# ---- How a course is trained


def plain_step(course: Course, step: int, place: int) -> float:
    """Do one step as in a plain torch loop; an optimiser may refuse an update without gradients."""
    optimizers, course.place = course.sets()[place], place
    batch, count = course.whole(step)
    loss = course.loss(batch) / (1 if count is None else count)
    loss.backward()
    groups = [group for each in optimizers for group in each.param_groups]
    trained = [one for group in groups for one in group["params"]]
    course.is_idle = course.is_idle or all(one.grad is None for one in trained)
    if course.clip is not None:
        nn.utils.clip_grad_norm_(trained, course.clip)
    for each in optimizers:
        each.step()
    course.model.zero_grad()
    course.outside.zero_grad()
    return float(loss)


class ByElastic:
    """ElasticSteps, one for each optimiser of a course."""

    def __init__(self, course: Course) -> None:
        hazards, make = course.hazards, cast("Any", ElasticStep)
        self.steps = [
            make(
                course.model,
                one[0] if len(one) == 1 else one,
                clip=course.clip,
                sleep=lambda _: None,
                on_hazard=None if hazards is None else hazards.append,
            )
            for one in course.sets()
        ]

    def __call__(self, course: Course, step: int, place: int) -> float:
        elastic, course.place = self.steps[place], place
        elastic.most_rows = course.most[step] if course.tested else None
        batch, count = course.whole(step)
        return float(elastic.step(batch, course.loss, count))


def restarted(course: Course, old: ByElastic, step: int) -> tuple[Course, ByElastic]:
    """Make new objects, and load the states that a loop saves into them."""
    new = Course(course.seed, course.features, tested=course.tested)
    for done, event in itertools.product(range(step), new.structure):
        event(done)
    by_elastic = ByElastic(new)
    pairs: list[tuple[Any, Any]] = [(course.model, new.model), (course.outside, new.outside)]
    pairs += zip(course.optimizers, new.optimizers, strict=True)
    pairs += zip(course.schedulers, new.schedulers, strict=True)
    if course.average is not None:
        pairs.append((course.average, new.average))
    pairs += zip(old.steps, by_elastic.steps, strict=True)
    for saved, made in pairs:
        made.load_state_dict(saved.state_dict())
    new.seen, new.hazards, new.restart = course.seen, course.hazards, None
    for module, was in zip(new.model.modules(), course.model.modules(), strict=True):
        module.training = was.training
    return new, by_elastic


def train(course: Course, *, elastic: bool) -> Iterator[tuple[Course, str]]:
    """Train; yield the course before it is made elastic, before each step, and at the end."""
    torch.manual_seed(course.seed)
    yield course, "begin"
    do: Any = ByElastic(course) if elastic else plain_step
    for step in range(STEPS):
        if course.tested and course.restart == step:
            course, do = restarted(course, do, step)
        course.step = step
        for event in (*course.structure, *course.before):
            event(step)
        yield course, f"step {step}"
        losses = [do(course, step, place) for place in range(len(course.sets()))]
        course.seen["loss"] += losses
        for scheduler in course.schedulers:
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*losses[:1] if plateau else ())
        course.place = 0
        for event in course.after:
            event(step)
    yield course, "end"


# ---- What came out


@dataclass
class Result:
    """The result of one draw."""

    outcome: Outcome
    said: str = ""
    at: str = ""

    @property
    def fine(self) -> bool:
        return self.outcome in FINE


def difference(
    wanted: dict[str, Tensor], found: dict[str, Tensor], coarsest: torch.dtype
) -> str | None:
    """Describe the largest difference that exceeds rounding; `None` if there is none."""
    if wanted.keys() != found.keys():
        lost, added = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
        return f"lost {lost[:3]}, added {added[:3]}"
    worst, told = 1.0, None
    for name, tensor in wanted.items():
        typed = name.startswith("state ") or tensor.dtype == found[name].dtype
        if tensor.shape != found[name].shape or not typed:  # loading may change types of states
            return f"{name} is {found[name].dtype} {tuple(found[name].shape)}"
        if not tensor.numel():
            continue
        one, other = tensor.double(), found[name].double()
        scale = max(1.0, float(one.abs().max())) * _TOLERANCES[coarsest]
        off = float((one - other).abs().max())
        if not off <= worst * scale:
            worst, told = off / scale, f"{name} is off by {off:.2g} of {float(one.abs().max()):.2g}"
    return told


def coarsest_of(course: Course) -> torch.dtype:
    """Return the type with the lowest precision."""
    types = {parameter.dtype for _, parameter in course.named()} | {course.dtype}
    return max(types, key=lambda dtype: torch.finfo(dtype).eps)


def everything(course: Course) -> dict[str, Tensor]:
    """Return the state and the observed numbers of a course."""
    seen = {f"seen {name}": torch.tensor(values) for name, values in course.seen.items()}
    return course.state() | {name: each.double() for name, each in seen.items()}


def states_of(course: Course, *, elastic: bool) -> list[dict[str, Tensor]]:
    """Return the states before each step and at the end."""
    reached = train(course, elastic=elastic)
    return [everything(each) for each, place in reached if place != "begin"]


def run(seed: int, features: Sequence[Feature]) -> Result:
    """Train by the plain loop (with dropout by `ElasticStep` in whole batches), then in parts."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        try:
            course = Course(seed, features, tested=False)
            if not course.optimizers:
                return Result("void", "no parameter has an optimiser")
            wanted = states_of(course, elastic=False)
        except Exception as error:  # noqa: BLE001 - the plain loop itself fails
            return Result("void", f"{type(error).__name__}: {error}")
        if not all(float(each.abs().max()) < _DIVERGED for each in wanted[-1].values()):
            return Result("void", "diverged")
        may_refuse = course.is_idle or any(feature.is_ != "right" for feature in features)
        if course.dropout:
            try:
                wanted = states_of(Course(seed, features, tested=False), elastic=True)
            except Exception as error:  # noqa: BLE001 - `failed` judges it
                return failed(error, "whole", may_refuse=may_refuse)
        return compared(seed, features, wanted, may_refuse=may_refuse)


def compared(
    seed: int, features: Sequence[Feature], wanted: list[dict[str, Tensor]], *, may_refuse: bool
) -> Result:
    """Train by `ElasticStep` in parts, and judge the result."""
    course, place, reached = Course(seed, features, tested=True), "begin", list[dict[str, Tensor]]()
    coarsest = coarsest_of(course)
    try:
        for course, place in train(course, elastic=True):  # noqa: B020 - the last one
            reached += [everything(course)] if place != "begin" else []
    except Exception as error:  # noqa: BLE001 - `failed` judges it
        result = failed(error, place, may_refuse=may_refuse)
        if result.outcome == "refused" and place != "begin":
            changed = difference(reached[-1], everything(course), coarsest)
            if changed is not None and len(course.sets()) == 1:
                return Result("a refusal changed something", f"{changed}: {error}", place)
        if result.outcome != "refused" or not reached:
            return result
    else:
        result = Result("equal")
    told = difference(wanted[len(reached) - 1], reached[-1], coarsest)
    if told is None:
        return result
    if course.hazards and all(each.is_ != "wrong" for each in features):
        return Result("told", course.hazards[0])
    return Result("unequal", told, place)


def failed(error: Exception, place: str, *, may_refuse: bool) -> Result:
    """Judge an error: a refusal must be allowed, and must be one line."""
    if not isinstance(error, TrainingError):
        return Result("raw error", f"{type(error).__name__}: {str(error)[:300]}", place)
    if "\n" in str(error):
        return Result("a refusal of several lines", str(error), place)
    return Result("refused" if may_refuse else "refused what is right", str(error), place)


def told_of(seed: int) -> tuple[Result, str]:
    """Run a draw, and describe a failure."""
    features = drawn(seed)
    result = run(seed, features)
    names = " ".join(feature.name for feature in features)
    if result.fine:
        return result, names
    said = f"seed {seed}: {result.outcome} ({result.at or 'end'}): {result.said}"
    return result, f"{said}\n  drawn: {names}"
