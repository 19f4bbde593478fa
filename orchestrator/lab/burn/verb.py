"""The verb `burn`: runs the phases one after the other, judges each, and returns the exit code.

Each run is an ordinary run with its own run folder, which `runs` and `report` know. The caps of a
worker are for the life of its process and a run ends every process it has started, so Ray too is
started again for each rehearsed run. Does not judge (`verdict.py`) and does not know what a phase
changes (`phases.py`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from orchestrator.config.duration import format_duration
from orchestrator.config.gpu_specs import PROFILES, match_profile
from orchestrator.config.schema import Config
from orchestrator.errors import ArchiveError, OrchestratorError, one_line
from orchestrator.lab.burn import phases
from orchestrator.lab.burn.drawing import result_lines
from orchestrator.lab.burn.phases import Phase, Take
from orchestrator.lab.burn.results import EXIT_INTERRUPTED, BurnResult, Taken, by_phase, result_dict
from orchestrator.lab.burn.verdict import Measured, Sample, judge
from orchestrator.record.archive import read_events
from orchestrator.record.model import Row, Snapshot
from orchestrator.record.summary import summary_text, write_summary
from orchestrator.run import runner as runs
from orchestrator.run.environment import Environment, Mode
from orchestrator.run.terminal import Interrupts
from orchestrator.view.cells import glyphs_for
from workers.host.machine import visible_cards

#: Samples of a long run with a thousand workers must fit into memory.
_SAMPLES_MOST = 600

_SAMPLE_EVERY_S = 1.0

MakeEnvironment: TypeAlias = Callable[[Config], Environment]
"""From a configuration to its target: the cluster, a rehearsal, or this machine."""


def burn(
    config: Config,
    make_environment: MakeEnvironment,
    heat_s: float,
    wanted: Collection[Phase],
    options: runs.Options,
) -> int:
    """Run the phases, print the result, and return the exit code: 0 only if all of them passed.

    The second phase takes `heat_s`; the others are never longer.

    Raises:
        OrchestratorError: Nothing could be run. What ends a later run is a failure of its phase.
    """
    started = datetime.now(UTC)
    mode, types = _surveyed(make_environment(config))
    planned = phases.takes(config, types, heat_s, wanted)
    taken: list[Taken] = []
    interrupts = Interrupts()
    interrupts.install()
    try:
        for take in planned:
            taken.append(_taken(take, make_environment, options, is_first=not taken))
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
    _tell(result, Path(config.run.dir) / f"burn-{started:%Y%m%d-%H%M%S}.json", as_json=options.json)
    return result.exit_code


def _surveyed(environment: Environment) -> tuple[Mode, dict[str, tuple[str, ...]]]:
    """Return the target, and the number types of each node on it."""
    here = visible_cards() if environment.mode is not Mode.CLUSTER else ()
    devices = {plan.spec.node: plan.spec.device for plan in environment.plans}
    types: dict[str, tuple[str, ...]] = {}
    for name, node in environment.config.nodes.items():
        profile = (
            match_profile(here[0].name, here[0].total_bytes) if here else PROFILES.get(node.gpu)
        )
        capability = None if profile is None else profile.compute_capability
        types[name] = phases.number_types(devices[name], capability)
    return environment.mode, types


def _taken(
    take: Take, make_environment: MakeEnvironment, options: runs.Options, *, is_first: bool
) -> Taken:
    """Say which run comes, and run it."""
    what = "" if take.dtype is None else f", {take.dtype}"
    if not options.json:
        say(
            f"Phase {take.phase.value} of 3, {take.phase.title}{what}: "
            f"{format_duration(take.config.run.duration_s)}"
        )
    return run_and_judge(take, make_environment, options, is_first=is_first)


def run_and_judge(
    take: Take, make_environment: MakeEnvironment, options: runs.Options, *, is_first: bool
) -> Taken:
    """Run a run and judge it.

    What cannot be run is an error of the verb for the first one, else of its phase.
    """
    length_s = take.config.run.duration_s
    sampler = Sampler(length_s)
    code, error = 1, None
    try:
        environment = make_environment(take.config)
        # The lines about scaling are printed by the first run only.
        shown = environment if is_first else replace(environment, lines=())
        code = runs.run(shown, replace(options, judge=sampler))
    except OrchestratorError as failure:
        if is_first:
            raise
        error = str(failure)
    except (
        KeyboardInterrupt
    ):  # the second Ctrl-C: the run is torn down, and what was measured is still reported
        code = EXIT_INTERRUPTED
    folder = None if sampler.last is None else Path(take.config.run.dir) / sampler.last.run_id
    return Taken(
        take=take,
        workers=tuple(judge(measured) for measured in sampler.measured(*told(folder))),
        folder=folder,
        elapsed_s=0.0 if sampler.last is None else sampler.last.elapsed_s,
        interrupted=code == EXIT_INTERRUPTED,
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


def _tell(result: BurnResult, path: Path, *, as_json: bool) -> None:
    """Print the result, and keep it beside the run folders."""
    told = result_dict(result)
    place = str(path)
    try:
        write_summary(path, told)
    except OSError as error:
        place = f"not written, {path}: {error.strerror}"
    with contextlib.suppress(
        OSError, ValueError
    ):  # the terminal may be gone; the exit code and the file are not
        if as_json:
            print(summary_text(told), flush=True)  # noqa: T201 - the answer
            return
        console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        for piece in result_lines(result, console.width, glyphs_for(sys.stdout.encoding)):
            console.print(piece)
        say(f"Result: {place}")


def say(line: str) -> None:
    """Print a line where the result is not."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - the terminal


class Sampler:
    """Keeps what the verdict on a run of this planned length needs: samples of every worker, and
    the last snapshot.

    A watcher beside the one that shows the run. It sees nothing that the snapshot does not show.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._every_s = max(_SAMPLE_EVERY_S, length_s / _SAMPLES_MOST)
        self._due_s = 0.0
        self._samples: dict[str, list[Sample]] = {}
        self.last: Snapshot | None = None
        """The latest picture of the run; `None` if it never came to one."""

    def update(self, snapshot: Snapshot) -> None:
        """Take a sample of every worker, if one is due and the planned time has begun."""
        self.last = snapshot
        if 0.0 < snapshot.elapsed_s < snapshot.duration_s and snapshot.elapsed_s >= self._due_s:
            self._due_s = snapshot.elapsed_s + self._every_s
            for row in snapshot.rows:
                self._samples.setdefault(row.slot, []).append(_sample(row, snapshot.elapsed_s))

    def close(self, snapshot: Snapshot) -> None:
        """Take the run as it ended."""
        self.last = snapshot

    def measured(
        self, alarms: Mapping[str, Sequence[str]], unchecked: Mapping[str, str]
    ) -> tuple[Measured, ...]:
        """Return what was seen of every worker.

        By slot, which alarms were raised, and why checks ended.
        """
        rows = () if self.last is None else self.last.rows
        return tuple(
            Measured(
                row=row,
                length_s=self._length_s,
                samples=tuple(self._samples.get(row.slot, ())),
                alarms=tuple(dict.fromkeys(alarms.get(row.slot, ()))),
                unchecked=unchecked.get(row.slot),
            )
            for row in rows
        )


def _sample(row: Row, at_s: float) -> Sample:
    return Sample(
        at_s=at_s,
        state=row.state,
        tflops=row.tflops,
        reserved_bytes=row.reserved_bytes,
        # Temperatures that are hot for a card are normal for a processor.
        temperature_c=row.temperature_c if row.temperature_of == "card" else None,
        throttle_pct=row.throttle_pct,
        power_w=row.power_w,
        samples_per_s=row.progress.samples_per_s,
    )
