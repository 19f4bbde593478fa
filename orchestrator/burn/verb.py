"""The verb `burn`: runs the phases one after the other, judges each, and returns the exit code.

Each run is an ordinary run with its own run folder, which `runs` and `report` know. The caps of a worker are for the
life of its process and a run ends every process it has started, so Ray too is started again for each rehearsed run.
Does not judge (`verdict.py`) and does not know what a phase changes (`phases.py`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from orchestrator.burn import phases
from orchestrator.burn.drawing import result_lines
from orchestrator.burn.phases import Phase, Take
from orchestrator.burn.results import BurnResult, Taken, by_phase, result_dict
from orchestrator.burn.sampler import Sampler
from orchestrator.burn.verdict import judge
from orchestrator.cluster import local_gpus
from orchestrator.config.duration import format_duration
from orchestrator.config.gpu_specs import PROFILES, match_profile
from orchestrator.config.schema import Config
from orchestrator.errors import ArchiveError, OrchestratorError, one_line
from orchestrator.run import runner as runs
from orchestrator.run.environment import Environment, Mode
from orchestrator.run.signals import Interrupts
from orchestrator.watch.archive import read_events
from orchestrator.watch.cells import glyphs_for
from orchestrator.watch.summary import summary_text, write_summary

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asks for."""

    config: Config
    make_environment: Callable[[Config], Environment]
    """From a configuration to its target: the cluster, a rehearsal, or this machine."""
    heat_s: float
    phases: Collection[Phase]
    json: bool
    plain: bool
    fake_sensors: Path | None
    apply_power_limit: bool


def burn(wish: Wish) -> int:
    """Run the phases, print the result, and return the exit code: 0 only if all of them passed.

    Raises:
        OrchestratorError: Nothing could be run. What ends a later run is a failure of its phase.
    """
    started = datetime.now(UTC)
    mode, types = _surveyed(wish.make_environment(wish.config))
    planned = phases.takes(wish.config, types, wish.heat_s, wish.phases)
    taken: list[Taken] = []
    interrupts = Interrupts()
    interrupts.install()
    try:
        for take in planned:
            taken.append(_taken(take, wish, is_first=not taken))
            if interrupts.asked or not taken[-1].whole:
                break
    finally:
        interrupts.restore()
    result = BurnResult(
        started_at=started.isoformat(timespec="milliseconds"),
        mode=mode.value,
        phases=by_phase(taken),
        # Also between two runs.
        interrupted=taken[-1].interrupted or (interrupts.asked and len(taken) < len(planned)),
    )
    _tell(result, Path(wish.config.run.dir) / f"burn-{started:%Y%m%d-%H%M%S}.json", wish)
    return result.exit_code


def _surveyed(environment: Environment) -> tuple[Mode, dict[str, tuple[str, ...]]]:
    """Return the target, and the number types of each node on it."""
    here = local_gpus.cards() if environment.mode is not Mode.CLUSTER else ()
    devices = {plan.spec.node: plan.spec.device for plan in environment.plans}
    types: dict[str, tuple[str, ...]] = {}
    for name, node in environment.config.nodes.items():
        profile = match_profile(here[0].name, here[0].total_bytes) if here else PROFILES.get(node.gpu)
        capability = None if profile is None else profile.compute_capability
        types[name] = phases.number_types(devices[name], capability)
    return environment.mode, types


def _taken(take: Take, wish: Wish, *, is_first: bool) -> Taken:
    """Run a run and judge it.

    Raises:
        OrchestratorError: It could not be run, and it is the first one.
    """
    length_s = take.config.run.duration_s
    what = "" if take.dtype is None else f", {take.dtype}"
    if not wish.json:
        _say(f"Phase {take.phase.value} of 3, {take.phase.title}{what}: {format_duration(length_s)}")
    sampler = Sampler(length_s)
    options = runs.Options(
        json=wish.json,
        plain=wish.plain,
        wait_for_nodes=False,
        fake_sensors=wish.fake_sensors,
        apply_power_limit=wish.apply_power_limit,
        judge=sampler,
    )
    code, error = 1, None
    try:
        environment = wish.make_environment(take.config)
        # The lines about scaling are printed by the first run only.
        code = runs.run(environment if is_first else replace(environment, lines=()), options)
    except OrchestratorError as failure:
        if is_first:
            raise
        error = str(failure)
    except KeyboardInterrupt:  # the second Ctrl-C: the run is torn down, and what was measured is still reported
        code = _INTERRUPTED
    folder = None if sampler.last is None else Path(take.config.run.dir) / sampler.last.run_id
    return Taken(
        take=take,
        workers=tuple(judge(measured) for measured in sampler.measured(*told(folder))),
        folder=folder,
        elapsed_s=0.0 if sampler.last is None else sampler.last.elapsed_s,
        interrupted=code == _INTERRUPTED,
        error=error,
    )


def told(folder: Path | None) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the alarms that each slot's card raised, and why its results were checked no more.

    Neither where the run could store nothing.
    """
    alarms: dict[str, list[str]] = {}
    unchecked: dict[str, str] = {}
    if folder is not None:
        with contextlib.suppress(ArchiveError):
            for event in read_events(folder, ["alarm_raised", "checks_ended"]):
                slot = event.slot or ""
                if event.event == "checks_ended":
                    unchecked[slot] = one_line(str(event.details.get("text")))
                else:
                    alarms.setdefault(slot, []).append(str(event.details.get("alarm")))
    return alarms, unchecked


def _tell(result: BurnResult, path: Path, wish: Wish) -> None:
    """Print the result, and keep it beside the run folders."""
    told = result_dict(result)
    place = str(path)
    try:
        write_summary(path, told)
    except OSError as error:
        place = f"not written, {path}: {error.strerror}"
    with contextlib.suppress(OSError, ValueError):  # the terminal may be gone; the exit code and the file are not
        if wish.json:
            print(summary_text(told), flush=True)  # noqa: T201 - the answer
            return
        console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        for piece in result_lines(result, console.width, glyphs_for(sys.stdout.encoding)):
            console.print(piece)
        _say(f"Result: {place}")


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - the terminal
