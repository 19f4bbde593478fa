"""The verb `burn --sweep`: one setting of the cards in small steps, from the safest on, until a
result is wrong.

Each value is an ordinary run. The node agents set the cards for its length, and put back what the
cards had when it ends, however it ends.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from orchestrator.config.duration import format_duration
from orchestrator.config.schema import Config
from orchestrator.errors import UsageError
from orchestrator.lab.burn.phases import (
    MakeEnvironment,
    at_one_value,
    run_and_judge,
    say,
    write_answer,
)
from orchestrator.lab.burn.results import EXIT_INTERRUPTED, JudgedRun
from orchestrator.lab.burn.verdict import BurnCheck, BurnVerdict, JudgedWorker
from orchestrator.lab.sensors import ScriptedSensors
from orchestrator.record.summary import SCHEMA
from orchestrator.run import runner as runs
from orchestrator.run.environment import Environment, Mode
from orchestrator.run.node_setup import CardSettings
from orchestrator.run.terminal import Interrupts
from orchestrator.view.cells import MISSING, clean, decimals_for, number
from workers.policy.thermal import SLOW_MEMORY

#: Of each value: every half minute the bandwidth of the memory is measured, and a change needs two
#: measurements.
STEP_S: Final = 90.0

_ASKED = re.compile(r"(power|memory-offset)=(-?\d{1,5})\.\.(-?\d{1,5}):(\d{1,4})")
_VALUES_MOST: Final = 60


class SweptSetting(StrEnum):
    """What is set."""

    POWER = "power"
    MEMORY_OFFSET = "memory-offset"

    @property
    def unit(self) -> str:
        """Of its values."""
        return "W" if self is SweptSetting.POWER else "MHz"

    @property
    def step_most(self) -> int:
        """The largest step: the card must not jump over the place where results
        begin to be wrong.
        """
        return 50 if self is SweptSetting.POWER else 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What was asked for."""

    lever: SweptSetting
    values: tuple[int, ...]
    """In the order in which they are tried: power downwards, an offset upwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One card at one value. `None` is unknown."""

    node: str
    gpu_name: str | None
    gpu_uuid: str | None
    value: int
    watts: float | None
    rate: float | None
    """Work of all its workers."""
    rate_unit: str
    """`samples/s` of a training, else `TFLOP/s`."""
    checks: int
    temperature_max_c: float | None
    stop: str | None
    """Why no further value may be tried; `None`: all was right."""

    @property
    def per_watt(self) -> float | None:
        """Work for each joule, in units of the rate for each watt.

        `None` where either is unknown, or it went wrong.
        """
        if self.stop is not None or self.rate is None or not self.watts:
            return None
        return self.rate / self.watts


def parse_sweep(text: str) -> Sweep:
    """Read `power=200..350:25` or `memory-offset=0..500:50`.

    Raises:
        UsageError: It is something else, or its steps are too large; says what would be right.
    """
    match = _ASKED.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--sweep {text!r:.60} is no sweep; valid: power=200..350:25 (watts) or "
            "memory-offset=0..500:50 (MHz)"
        )
    lever, first, last, step = SweptSetting(match[1]), int(match[2]), int(match[3]), int(match[4])
    if not 0 < step <= lever.step_most:
        raise UsageError(
            f"--sweep the step must be 1 to {lever.step_most} {lever.unit}, not {step}"
        )
    if first > last or (lever is SweptSetting.POWER and first <= 0):
        raise UsageError(
            f"--sweep the lower end comes first, and is a value that a card can have: not {first}..{last}"
        )
    values = range(first, last + 1, step)
    if len(values) > _VALUES_MOST:
        raise UsageError(f"--sweep {len(values)} values are too many; at most {_VALUES_MOST}")
    return Sweep(
        lever=lever,
        values=tuple(reversed(values)) if lever is SweptSetting.POWER else tuple(values),
    )


def points_of(value: int, taken: Sequence[JudgedRun]) -> tuple[SweepPoint, ...]:
    """Return what each card did at a value: checked in the first of its runs,
    measured in the last.
    """
    cards: dict[tuple[str, str | None], list[list[JudgedWorker]]] = {}
    for index, one in enumerate(taken):
        for worker in one.workers:
            runs = cards.setdefault((worker.row.node, worker.row.gpu_uuid), [[] for _ in taken])
            runs[index].append(worker)
    errors = [one.error for one in taken if one.error is not None]
    return tuple(_point(value, runs, errors[0] if errors else None) for runs in cards.values())


def _point(value: int, runs: Sequence[Sequence[JudgedWorker]], error: str | None) -> SweepPoint:
    everyone = [worker for workers in runs for worker in workers]
    figures = [worker.figures for worker in runs[-1]]
    samples = _present(one.samples_per_s_mean for one in figures)
    rates = samples or _present(one.tflops_settled_mean for one in figures)
    checked = [_wrong(worker, is_checked=True) for worker in runs[0]]
    wrong = [*checked, *(_wrong(worker, is_checked=False) for worker in everyone), error]
    first = everyone[0].row
    return SweepPoint(
        node=first.node,
        gpu_name=first.gpu_name,
        gpu_uuid=first.gpu_uuid,
        value=value,
        # Each worker reads the same card.
        watts=max(_present(one.power_w_mean for one in figures), default=None),
        rate=sum(rates) if rates else None,
        rate_unit="samples/s" if samples else "TFLOP/s",
        checks=sum(worker.row.counts.verify_checks for worker in runs[0]),
        temperature_max_c=max(
            _present(worker.figures.temperature_max_c for worker in everyone), default=None
        ),
        stop=next((reason for reason in wrong if reason is not None), None),
    )


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _wrong(worker: JudgedWorker, *, is_checked: bool) -> str | None:
    """Return what a worker found.

    A run whose results nothing checked says nothing about the value.
    """
    results, errors = worker.findings[BurnCheck.RESULTS], worker.findings[BurnCheck.ERRORS]
    if results.verdict is BurnVerdict.FAIL or (
        is_checked and results.verdict is not BurnVerdict.PASS
    ):
        return f"{worker.row.slot}: {results.text}"
    if SLOW_MEMORY in worker.alarms:
        return (
            f"{worker.row.slot}: the bandwidth of its memory fell, as it does when transfers "
            "are repeated"
        )
    return f"{worker.row.slot}: {errors.text}" if errors.verdict is BurnVerdict.FAIL else None


def efficient(points: Iterable[SweepPoint]) -> tuple[SweepPoint, ...]:
    """Return the point of each card that does most work for each watt.

    No point of a card without a sensor.
    """
    cards: dict[tuple[str, str | None], list[SweepPoint]] = {}
    for point in points:
        if point.per_watt is not None:
            cards.setdefault((point.node, point.gpu_uuid), []).append(point)
    return tuple(max(card, key=lambda point: point.per_watt or 0.0) for card in cards.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What a sweep found."""

    sweep: Sweep
    points: tuple[SweepPoint, ...]
    error: str | None = None
    """Why a run could not be made, or ended early, where no card tells it."""
    interrupted: bool = False

    @property
    def stopped(self) -> str | None:
        """Why it ended before the last value; `None` if it did not."""
        return next((point.stop for point in self.points if point.stop is not None), self.error)

    @property
    def exit_code(self) -> int:
        """0 if every value was tried and nothing was wrong."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        return 0 if self.stopped is None else 1


def burn_sweep(
    config: Config,
    make_environment: MakeEnvironment,
    text: str,
    step_s: float,
    options: runs.Options,
) -> int:
    """Do what `--sweep TEXT` asks for, with so long a run at each value, and return the exit code.

    Raises:
        OrchestratorError: It asks for nothing, nothing could be run, or no card can be set.
    """
    sweep = parse_sweep(text)
    _check(make_environment(config), options)
    started = datetime.now(UTC)
    planned = at_one_value(config, step_s)
    points: tuple[SweepPoint, ...] = ()
    failure: str | None = None
    interrupts = Interrupts()
    interrupts.install()
    is_interrupted = False
    try:
        for value in sweep.values:
            if not options.json:
                say(
                    f"{sweep.lever} {value} {sweep.lever.unit}: "
                    f"{format_duration(step_s * len(planned))}"
                )
            at_value = replace(options, cards=_cards(sweep.lever, value))
            taken: list[JudgedRun] = []
            for take in planned:
                taken.append(
                    run_and_judge(
                        take, make_environment, at_value, is_first=not points and not taken
                    )
                )
                if interrupts.asked or not taken[-1].whole:
                    break
            is_interrupted = interrupts.asked or taken[-1].interrupted
            failure = next((one.error for one in taken if one.error is not None), None)
            if not is_interrupted:
                points += points_of(value, taken)
            if is_interrupted or failure or any(point.stop for point in points):
                break
    finally:
        interrupts.restore()
    result = SweepResult(sweep=sweep, points=points, error=failure, interrupted=is_interrupted)
    path = Path(config.run.dir) / f"sweep-{started:%Y%m%d-%H%M%S}.json"
    lines = sweep_lines(result)
    write_answer(path, sweep_dict(result), lines, as_json=options.json)
    return result.exit_code


def _check(environment: Environment, options: runs.Options) -> None:
    """Refuse what could set nothing.

    On the nodes of a cluster, their agents say whether they may.
    """
    if any(isinstance(each, ScriptedSensors) for each in options.experiments):
        return
    if environment.mode is Mode.REHEARSE:
        raise UsageError(
            "--sweep sets cards, and a rehearsal has none: add --fake-sensors FILE to rehearse it"
        )
    if not any(plan.spec.device == "cuda" for plan in environment.plans):
        raise UsageError("--sweep sets cards, and no node here has one")
    if environment.mode is Mode.LOCAL and os.geteuid() != 0:
        raise UsageError("--sweep sets cards, which only root may: type it with sudo")


def _cards(lever: SweptSetting, value: int) -> CardSettings:
    return (
        CardSettings(power_limit_w=value)
        if lever is SweptSetting.POWER
        else CardSettings(memory_offset_mhz=value)
    )


def sweep_dict(result: SweepResult) -> dict[str, Any]:
    """Return the result as JSON knows it; `null` is unknown."""
    sweep = result.sweep
    return {
        "schema": SCHEMA,
        "exit_code": result.exit_code,
        "lever": sweep.lever.value,
        "unit": sweep.lever.unit,
        "values": list(sweep.values),
        "interrupted": result.interrupted,
        "stopped": result.stopped,
        "points": [asdict(point) | {"rate_per_watt": point.per_watt} for point in result.points],
        "efficient": [
            asdict(point) | {"rate_per_watt": point.per_watt} for point in efficient(result.points)
        ],
    }


def sweep_lines(result: SweepResult) -> Iterator[str]:
    """Yield the result, line by line: each card with its values, then where it is efficient."""
    lever = result.sweep.lever
    best = {(point.node, point.gpu_uuid): point for point in efficient(result.points)}
    cards = dict.fromkeys((point.node, point.gpu_uuid) for point in result.points)
    for card in cards:
        points = [point for point in result.points if (point.node, point.gpu_uuid) == card]
        yield clean(f"{points[0].node}, {points[0].gpu_name or 'CPU'}")
        of_rate = f"{points[0].rate_unit:>12}{'per watt':>10}"
        yield f"{lever.unit:>8}{'watts':>8}{of_rate}{'max C':>7}{'checks':>8}"
        rates = [point.rate for point in points]
        for point in points:
            yield _line(point, decimals_for(rates))
        if card in best:
            yield _sentence(best[card], points, lever)
    if result.interrupted:
        yield "Interrupted: further values were not tried. The cards are as they were before."
    elif result.stopped is not None:
        yield clean(f"Stopped: {result.stopped}. The cards are as they were before.")
    else:
        yield "All values were tried, and nothing was wrong. The cards are as they were before."


def _line(point: SweepPoint, decimals: int) -> str:
    cells = (
        (number(point.watts, 0), 8),
        (number(point.rate, decimals), 12),
        (number(point.per_watt, 4), 10),
        (number(point.temperature_max_c, 0), 7),
        (str(point.checks), 8),
    )
    wrong = "" if point.stop is None else f"  WRONG: {clean(point.stop)}"
    return (
        f"{point.value:>8}"
        + "".join(f"{text or MISSING:>{width}}" for text, width in cells)
        + wrong
    )


def _sentence(best: SweepPoint, points: Sequence[SweepPoint], lever: SweptSetting) -> str:
    """Say where a card is efficient, beside where it is fastest."""
    fastest = max(
        (point for point in points if point.per_watt is not None),
        key=lambda point: point.rate or 0.0,
    )
    said = f"  efficient: {best.value} {lever.unit}"
    if best is fastest or not (fastest.rate and fastest.watts and best.rate and best.watts):
        return f"{said}, which is also the fastest"
    rate_pct, watts_pct = 100 * best.rate / fastest.rate, 100 * best.watts / fastest.watts
    return (
        f"{said}: {rate_pct:.0f} % of the fastest ({fastest.value} {lever.unit}) with "
        f"{watts_pct:.0f} % of its watts"
    )
