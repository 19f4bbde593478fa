"""The verb `burn`: three phases of validation, each made of runs that are judged.

1. Caps and precision: one short run for each number type, results checked densely.
2. Heat: every worker at full duty, for as long as the user asks.
3. Full load: the configuration as it is.

Each run is an ordinary run with its own run folder, which `runs` and `report` know. The caps of a
worker are for the life of its process and a run ends every process it has started, so Ray too is
started again for each rehearsed run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console, RenderableType

from orchestrator.config.duration import format_duration
from orchestrator.config.gpu_specs import ARCHITECTURES, PROFILES, match_profile
from orchestrator.config.schema import Config, WorkloadConfig
from orchestrator.errors import ArchiveError, OrchestratorError, one_line
from orchestrator.lab.burn.results import (
    EXIT_INTERRUPTED,
    BurnResult,
    JudgedRun,
    PlannedRun,
    by_phase,
    result_dict,
    result_lines,
)
from orchestrator.lab.burn.verdict import BurnPhase, Look, Measured, judge
from orchestrator.record.archive import read_events
from orchestrator.record.model import Snapshot
from orchestrator.record.summary import summary_text, write_summary
from orchestrator.run import runner as runs
from orchestrator.run.environment import Environment, Mode
from orchestrator.run.terminal import Interrupts
from workers.host.machine import visible_cards

#: Long enough for the air in a closed case to become as warm as it will.
HEAT_S = 3600.0

#: Long enough for a worker to climb to its cap and to check some hundred results.
_PRECISION_S = 30.0

#: Share of the time for checks in the first phase: one result in a few, and the caps stay filled
#: meanwhile.
_DENSE_SHARE = 0.25

#: Edge of the products where the configuration's sizes are meant for another workload: large enough
#: to heat any card.
_SIZE = 8192

#: Optimiser steps that no run of a sweep ends in its time.
_STEPS_MANY = 1_000_000

#: In the order in which they are tried.
_TYPES = ("fp32", "tf32", "fp16", "bf16")

#: A processor runs tf32 as fp32, and fp16 as the fastest type of 16 bits that it has.
_PROCESSOR_TYPES = ("fp32", "fp16")


def number_types(device: str, compute_capability: tuple[int, int] | None) -> tuple[str, ...]:
    """Return the number types to try: those the device has units for, all on an unknown card."""
    if device == "cpu":
        return _PROCESSOR_TYPES
    units = ARCHITECTURES.get(compute_capability or (0, 0))
    return tuple(name for name in _TYPES if units is None or name in units.multiply_adds)


def planned_runs(
    config: Config, types: Mapping[str, Sequence[str]], heat_s: float, wanted: Collection[BurnPhase]
) -> tuple[PlannedRun, ...]:
    """Return the runs of the phases that are wanted, in their order.

    Args:
        config: As loaded.
        types: Of each node, as `number_types` says; other names than the configuration's stand for
            all of its nodes (`--local` has a node of its own).
        heat_s: Length of the second phase; the others are never longer.
        wanted: Which phases.
    """
    planned: list[PlannedRun] = []
    for dtype in _TYPES if BurnPhase.CAPS in wanted else ():
        able = {node for node, names in types.items() if dtype in names}
        if able:
            planned.append(_precision(config, dtype, able, min(heat_s, _PRECISION_S)))
    if BurnPhase.HEAT in wanted:
        heat = _changed(
            config,
            heat_s,
            workload=_matmul(config),
            nodes=_sized(config),
            compute_share_mode="none",
        )
        planned.append(PlannedRun(phase=BurnPhase.HEAT, config=heat))
    if BurnPhase.FULL_LOAD in wanted:
        full = _changed(config, min(heat_s, config.run.duration_s))
        planned.append(PlannedRun(phase=BurnPhase.FULL_LOAD, config=full))
    return tuple(planned)


def at_one_value(config: Config, length_s: float) -> tuple[PlannedRun, ...]:
    """Return the runs at each value of a sweep: checked products, then a configured training."""
    checked = _changed(
        config,
        length_s,
        workload=_matmul(config),
        nodes=_sized(config),
        verify={"share": max(config.verify.share, _DENSE_SHARE)},
        compute_share_mode="none",
    )
    planned = [PlannedRun(phase=BurnPhase.CAPS, config=checked)]
    if config.workload.name == "train":
        trained = _changed(
            config,
            length_s,
            compute_share_mode="none",
            train={"steps": _STEPS_MANY, "epochs": None},
        )
        planned.append(PlannedRun(phase=BurnPhase.FULL_LOAD, config=trained))
    return tuple(planned)


def _precision(config: Config, dtype: str, able: Set[str], length_s: float) -> PlannedRun:
    """Return the run of one number type, on the nodes that can do it."""
    sized = _sized(config)
    nodes = {
        name: {**sized[name], "dtype": None}
        for name in sized
        if name in able or able.isdisjoint(sized)
    }
    changed = _changed(
        config,
        length_s,
        workload={**_matmul(config), "dtype": dtype},
        verify={"share": max(config.verify.share, _DENSE_SHARE)},
        cluster={"head": config.cluster.head if config.cluster.head in nodes else None},
        nodes=nodes,
    )
    return PlannedRun(phase=BurnPhase.CAPS, config=changed, dtype=dtype)


def _matmul(config: Config) -> dict[str, object]:
    """Return what makes the workload matmul.

    The size and batch of another one mean something else.
    """
    own = (
        {} if config.workload.name == "matmul" else {"size": None, "batch": WorkloadConfig().batch}
    )
    return {"name": "matmul", **own}


def _sized(config: Config) -> dict[str, dict[str, object]]:
    """Return the nodes with sizes for matmul; those of another workload mean something else."""
    own = {} if config.workload.name == "matmul" else {"size": _SIZE}
    return {name: {**node, **own} for name, node in config.model_dump()["nodes"].items()}


def _changed(config: Config, length_s: float, **changes: object) -> Config:
    """Return the configuration with other values.

    Those of a section are added to what it has, nodes are replaced.
    """
    data = config.model_dump()
    for key, value in {**changes, "run": {"duration": f"{length_s:.3f}s"}}.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) and key != "nodes" else value
    return Config.model_validate(data)


#: Of each worker in a long run.
_SAMPLES_MOST = 600

_SAMPLE_EVERY_S = 1.0

MakeEnvironment: TypeAlias = Callable[[Config], Environment]
"""From a configuration to its target: the cluster, a rehearsal, or this machine."""


def burn(
    config: Config,
    make_environment: MakeEnvironment,
    heat_s: float,
    wanted: Collection[BurnPhase],
    options: runs.Options,
) -> int:
    """Run the phases, print the result, and return the exit code: 0 only if all of them passed.

    The second phase takes `heat_s`; the others are never longer.

    Raises:
        OrchestratorError: Nothing could be run. What ends a later run is a failure of its phase.
    """
    started = datetime.now(UTC)
    mode, types = _surveyed(make_environment(config))
    planned = planned_runs(config, types, heat_s, wanted)
    taken: list[JudgedRun] = []
    interrupts = Interrupts()
    interrupts.install()
    try:
        for take in planned:
            what = "" if take.dtype is None else f", {take.dtype}"
            if not options.json:
                say(
                    f"Phase {take.phase.value} of 3, {take.phase.title}{what}: "
                    f"{format_duration(take.config.run.duration_s)}"
                )
            taken.append(run_and_judge(take, make_environment, options, is_first=not taken))
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
    path = Path(config.run.dir) / f"burn-{started:%Y%m%d-%H%M%S}.json"
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    lines = result_lines(result, console.width)
    write_answer(path, result_dict(result), lines, as_json=options.json)
    return result.exit_code


def _surveyed(environment: Environment) -> tuple[Mode, dict[str, tuple[str, ...]]]:
    """Return the target, and the number types of each node on it."""
    cards = visible_cards() if environment.mode is not Mode.CLUSTER else ()
    devices = {plan.spec.node: plan.spec.device for plan in environment.plans}
    types: dict[str, tuple[str, ...]] = {}
    for name, node in environment.config.nodes.items():
        profile = PROFILES.get(node.gpu)
        if cards:
            profile = match_profile(cards[0].name, cards[0].total_bytes)
        capability = None if profile is None else profile.compute_capability
        types[name] = number_types(devices[name], capability)
    return environment.mode, types


def run_and_judge(
    take: PlannedRun, make_environment: MakeEnvironment, options: runs.Options, *, is_first: bool
) -> JudgedRun:
    """Run a run and judge it.

    What cannot be run is an error of the verb for the first one, else of its phase.
    """
    length_s = take.config.run.duration_s
    sampler = SnapshotSampler(length_s)
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
    except KeyboardInterrupt:
        # The second Ctrl-C: the run is torn down, and what was measured is still reported.
        code = EXIT_INTERRUPTED
    folder = None if sampler.last is None else Path(take.config.run.dir) / sampler.last.run_id
    return JudgedRun(
        take=take,
        workers=tuple(judge(measured) for measured in sampler.measured(*warnings_of(folder))),
        folder=folder,
        elapsed_s=0.0 if sampler.last is None else sampler.last.elapsed_s,
        interrupted=code == EXIT_INTERRUPTED,
        error=error,
    )


def warnings_of(folder: Path | None) -> tuple[dict[str, list[str]], dict[str, str]]:
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


def write_answer(
    path: Path, answer: Mapping[str, Any], lines: Iterable[RenderableType], *, as_json: bool
) -> None:
    """Keep an answer as JSON beside the run folders, and print it: as JSON, or as lines."""
    place = str(path)
    try:
        write_summary(path, answer)
    except OSError as error:
        place = f"not written, {path}: {error.strerror}"
    # The terminal may be gone; the exit code and the file are not.
    with contextlib.suppress(OSError, ValueError):
        if as_json:
            print(summary_text(answer), flush=True)  # noqa: T201 - the answer
            return
        console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
        for line in lines:
            console.print(line, soft_wrap=isinstance(line, str))
        say(f"Result: {place}")


def say(line: str) -> None:
    """Print a line where the result is not."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - the terminal


class SnapshotSampler:
    """Keeps what the verdict on a run of this planned length needs: samples of every worker, and
    the last snapshot.

    A watcher beside the one that shows the run. It sees nothing that the snapshot does not show.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._every_s = max(_SAMPLE_EVERY_S, length_s / _SAMPLES_MOST)
        self._due_s = 0.0
        self._looks: dict[str, list[Look]] = {}
        self.last: Snapshot | None = None
        """The latest picture of the run; `None` if it never came to one."""

    def update(self, snapshot: Snapshot) -> None:
        """Take a sample of every worker, if one is due and the planned time has begun."""
        self.last = snapshot
        if 0.0 < snapshot.elapsed_s < snapshot.duration_s and snapshot.elapsed_s >= self._due_s:
            self._due_s = snapshot.elapsed_s + self._every_s
            for row in snapshot.rows:
                self._looks.setdefault(row.slot, []).append((snapshot.elapsed_s, row))

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
                looks=tuple(self._looks.get(row.slot, ())),
                alarms=tuple(dict.fromkeys(alarms.get(row.slot, ()))),
                unchecked=unchecked.get(row.slot),
            )
            for row in rows
        )
