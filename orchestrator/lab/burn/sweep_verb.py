"""The verb `burn --sweep`: a run for each value, the cards set by the node agents, until anything
is wrong.

Each run is an ordinary one, and when it ends, however it ends, the agents put back what the cards
had. So they also do if this process is killed. Does not decide which value comes next, nor what is
efficient (`sweep.py`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from orchestrator.config.duration import format_duration
from orchestrator.config.schema import Config
from orchestrator.errors import UsageError
from orchestrator.lab.burn import phases
from orchestrator.lab.burn.results import EXIT_INTERRUPTED, Taken
from orchestrator.lab.burn.sweep import (
    STEP_S,
    Lever,
    Point,
    Sweep,
    efficient,
    next_value,
    parse_sweep,
    points_of,
)
from orchestrator.lab.burn.verb import MakeEnvironment, run_and_judge, say
from orchestrator.lab.sensors import FakeSensors
from orchestrator.record.summary import SCHEMA, summary_text, write_summary
from orchestrator.run import runner as runs
from orchestrator.run.environment import Environment, Mode
from orchestrator.run.node_setup import CardSettings
from orchestrator.run.terminal import Interrupts
from orchestrator.view.cells import Glyphs, decimals_for, glyphs_for, number

_ROOT: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What a sweep found."""

    sweep: Sweep
    points: tuple[Point, ...]
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


def typed(
    text: str,
    config: Config,
    make_environment: MakeEnvironment,
    step_s: float | None,
    options: runs.Options,
) -> int:
    """Do what `--sweep TEXT` asks for, with so long a run at each value.

    `UsageError` if it asks for nothing.
    """
    try:
        sweep = parse_sweep(text)
    except ValueError as error:
        raise UsageError(f"--sweep {error}") from error
    return burn_sweep(config, make_environment, sweep, step_s or STEP_S, options)


def burn_sweep(
    config: Config,
    make_environment: MakeEnvironment,
    sweep: Sweep,
    step_s: float,
    options: runs.Options,
) -> int:
    """Try the values one after the other, print what was seen, and return the exit code.

    Raises:
        OrchestratorError: Nothing could be run, or no card can be set.
    """
    _check(make_environment(config), options)
    started = datetime.now(UTC)
    takes = phases.at_one_value(config, step_s)
    points: tuple[Point, ...] = ()
    error: str | None = None
    interrupts = Interrupts()
    interrupts.install()
    is_interrupted = False
    try:
        while (
            not is_interrupted
            and error is None
            and (value := next_value(sweep, points)) is not None
        ):
            if not options.json:
                say(
                    f"{sweep.lever} {value} {sweep.lever.unit}: "
                    f"{format_duration(step_s * len(takes))}"
                )
            chosen = replace(options, cards=_cards(sweep.lever, value))
            taken: list[Taken] = []
            for take in takes:
                taken.append(
                    run_and_judge(take, make_environment, chosen, is_first=not points and not taken)
                )
                if interrupts.asked or not taken[-1].whole:
                    break
            is_interrupted = interrupts.asked or taken[-1].interrupted
            error = next((one.error for one in taken if one.error is not None), None)
            if not is_interrupted:
                points += points_of(value, taken)
    finally:
        interrupts.restore()
    result = SweepResult(sweep=sweep, points=points, error=error, interrupted=is_interrupted)
    _tell(result, Path(config.run.dir) / f"sweep-{started:%Y%m%d-%H%M%S}.json", options)
    return result.exit_code


def _check(environment: Environment, options: runs.Options) -> None:
    """Refuse what could set nothing.

    On the nodes of a cluster, their agents say whether they may.
    """
    if any(isinstance(each, FakeSensors) for each in options.experiments):
        return
    if environment.mode is Mode.REHEARSE:
        raise UsageError(
            "--sweep sets cards, and a rehearsal has none: add --fake-sensors FILE to rehearse it"
        )
    if not any(plan.spec.device == "cuda" for plan in environment.plans):
        raise UsageError("--sweep sets cards, and no node here has one")
    if environment.mode is Mode.LOCAL and os.geteuid() != _ROOT:
        raise UsageError("--sweep sets cards, which only root may: type it with sudo")


def _cards(lever: Lever, value: int) -> CardSettings:
    return (
        CardSettings(power_limit_w=value)
        if lever is Lever.POWER
        else CardSettings(memory_offset_mhz=value)
    )


def _tell(result: SweepResult, path: Path, options: runs.Options) -> None:
    told, glyphs = sweep_dict(result), glyphs_for(sys.stdout.encoding)
    place = str(path)
    try:
        write_summary(path, told)
    except OSError as failure:
        place = f"not written, {path}: {failure.strerror}"
    with contextlib.suppress(
        OSError, ValueError
    ):  # the terminal may be gone; the exit code and the file are not
        for line in (
            [summary_text(told)]
            if options.json
            else [*sweep_lines(result, glyphs), f"Result: {place}"]
        ):
            print(line, flush=True)  # noqa: T201 - the answer


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


def sweep_lines(result: SweepResult, glyphs: Glyphs) -> Iterator[str]:
    """Yield the result, line by line: each card with its values, then where it is efficient."""
    lever = result.sweep.lever
    best = {(point.node, point.gpu_uuid): point for point in efficient(result.points)}
    cards = dict.fromkeys((point.node, point.gpu_uuid) for point in result.points)
    for card in cards:
        points = [point for point in result.points if (point.node, point.gpu_uuid) == card]
        yield glyphs.clean(f"{points[0].node}, {points[0].gpu_name or 'CPU'}")
        yield f"{lever.unit:>8}{'watts':>8}{points[0].rate_unit:>12}{'per watt':>10}{'max C':>7}{'checks':>8}"
        rates = [point.rate for point in points]
        for point in points:
            yield _line(point, decimals_for(rates), glyphs)
        if card in best:
            yield _sentence(best[card], points, lever)
    if result.interrupted:
        yield "Interrupted: further values were not tried. The cards are as they were before."
    elif result.stopped is not None:
        yield glyphs.clean(f"Stopped: {result.stopped}. The cards are as they were before.")
    else:
        yield "All values were tried, and nothing was wrong. The cards are as they were before."


def _line(point: Point, decimals: int, glyphs: Glyphs) -> str:
    cells = (
        (number(point.watts, 0), 8),
        (number(point.rate, decimals), 12),
        (number(point.per_watt, 4), 10),
        (number(point.temperature_max_c, 0), 7),
        (str(point.checks), 8),
    )
    wrong = "" if point.stop is None else f"  WRONG: {glyphs.clean(point.stop)}"
    return (
        f"{point.value:>8}"
        + "".join(f"{text or glyphs.missing:>{width}}" for text, width in cells)
        + wrong
    )


def _sentence(best: Point, points: Sequence[Point], lever: Lever) -> str:
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
