"""One run from its configuration to its exit code: environment, preflight, supervise, write the summary.

Does not parse arguments (`cli/app.py`) and does not exit. What was started is always torn down, and once a run folder
exists, its summary is always written.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from orchestrator.cluster.orphan_reaper import start_time
from orchestrator.config.load import dump_config
from orchestrator.core.chaos.plan import ChaosPlan, check
from orchestrator.core.placement import SlotPlan
from orchestrator.errors import NoClusterError, OrchestratorError, UsageError
from orchestrator.run import fake_sensors, fault_injection, node_setup, preflight, resume, run_dir
from orchestrator.run.environment import Environment, Mode
from orchestrator.run.fault_injection import FaultInjector
from orchestrator.run.learned_limits import LearnedLimits
from orchestrator.run.run_info import Past, RunInfo
from orchestrator.run.signals import Interrupts
from orchestrator.run.stdio import Screen, own_screen, shared_screen
from orchestrator.run.supervisor import Supervisor
from orchestrator.watch.archive import StoredRun
from orchestrator.watch.events import EventLog
from orchestrator.watch.live import LiveTable, PlainLines, Silent, Watcher
from orchestrator.watch.model import Snapshot
from orchestrator.watch.phrases import fault_lines
from orchestrator.watch.records import STORE_NAME, RunFacts
from orchestrator.watch.sinks import Outlets
from orchestrator.watch.store import RunStore
from orchestrator.watch.summary import exit_code_for, failure_dict, summary_dict, summary_text, write_summary
from workers.learned_limits.store import LimitStore

_SUMMARY_NAME = "summary.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the user wants to see the run."""

    json: bool
    plain: bool
    wait_for_nodes: bool
    chaos: ChaosPlan | None = None
    """Faults to inject."""
    yes_really: bool = False
    """The user confirmed that the faults are for a real cluster."""
    fake_sensors: Path | None = None
    """A script of sensors to rehearse heat with."""
    apply_power_limit: bool = False
    """Set the power limits of the configuration until the run ends."""
    judge: Watcher | None = None
    """A watcher that judges the run and reports on it: then `json` only means that this run prints nothing."""


def run(environment: Environment, options: Options) -> int:
    """Run `environment` and return the exit code.

    Raises:
        OrchestratorError: Nothing could be run; nothing was left behind.
    """
    _check_fake_sensors(environment, options)
    folder = run_dir.new_folder(environment.config)
    return _in_folder(folder, environment, options, time.time(), None)


def go_on(stored: StoredRun, options: Options) -> int:
    """Resume a run whose head has ended, in its own folder, and return the exit code.

    Raises:
        OrchestratorError: It is under way, or over, or cannot be run here.
    """
    run_dir.check_mine(stored.folder)
    environment = resume.environment_of(stored)
    _check_fake_sensors(environment, options)
    return _in_folder(stored.folder, environment, options, stored.facts.started_at_unix_s, resume.past_of(stored))


def _check_fake_sensors(environment: Environment, options: Options) -> None:
    if options.fake_sensors is not None:
        fake_sensors.check(options.fake_sensors, is_rehearsal=environment.mode is Mode.REHEARSE)
    if environment.mode is Mode.DEBUG:
        _check_debug(options)
    if options.chaos is None:
        return
    is_rehearsal = environment.mode is not Mode.CLUSTER
    if not is_rehearsal and not options.yes_really:
        raise UsageError(
            "--chaos kills workers of a real cluster; try it with --rehearse, or say that you mean it: --yes-really"
        )
    check(options.chaos, environment.config.nodes, environment.config.head_node, is_rehearsal=is_rehearsal)


def _check_debug(options: Options) -> None:
    if options.json:
        raise UsageError("--json keeps standard output for one object; with --debug the debugger talks there")
    if options.chaos is not None:
        raise UsageError("--chaos ends worker processes; with --debug there is none but this one")
    if options.apply_power_limit:
        raise UsageError("--apply-power-limit needs an agent on each node, which --debug does not start")


def _in_folder(
    folder: Path, environment: Environment, options: Options, started_at_unix_s: float, past: Past | None
) -> int:
    interrupts = Interrupts()
    interrupts.install()
    is_debug = environment.mode is Mode.DEBUG
    with run_dir.owned(folder), shared_screen() if is_debug else own_screen(folder / "ray.log") as screen:
        record = _Record(
            folder=folder,
            screen=screen,
            options=replace(options, plain=options.plain or is_debug),
            started_at_unix_s=started_at_unix_s,
            past=past or Past(),
        )
        try:
            if past is None:
                # Before Ray is started: a head that is killed meanwhile leaves a run that can be resumed. One that is
                # resumed has its record, and keeps it until there is something to resume.
                record.begun(environment)
            return _in_environment(environment, record, interrupts)
        except NoClusterError as error:
            record.failed(error)
            raise (
                preflight.without_cluster(environment.config, error) if environment.mode is Mode.CLUSTER else error
            ) from error
        except BaseException as error:
            record.failed(error)
            raise
        finally:
            interrupts.restore()
            record.outlets.events.close()


def _in_environment(environment: Environment, record: _Record, interrupts: Interrupts) -> int:
    record.tell(f"Run folder: {record.folder}", *environment.lines)
    with environment.fleet as fleet:
        interrupts.install()  # Ray has taken SIGTERM for itself
        preflight.check(environment.config, fleet, wait_for_nodes=record.options.wait_for_nodes)
        settled = environment.settle(environment, fleet)
        if settled is not environment:
            record.tell(*settled.lines)
        info = record.begun(settled)
        record.outlets.events.write(
            "run_started", run_id=info.run_id, workers=len(settled.plans), elapsed_s=info.past.elapsed_s
        )
        learned_limits = LearnedLimits(_limits(settled, record), record.outlets.events)
        with node_setup.kept(
            settled,
            fleet,
            _with_sensors(settled, record),
            run_id=info.run_id,
            apply_power_limit=record.options.apply_power_limit,
            interrupted=lambda: interrupts.asked,
            tell=record.tell,
            events=record.outlets.events,
        ) as plans:
            faults = _injector(settled, record)
            supervisor = Supervisor(
                info=info,
                config=settled.config,
                plans=learned_limits.sent_along(fault_injection.with_faults(plans, record.options.chaos)),
                fleet=fleet,
                outlets=record.outlets,
                interrupted=lambda: interrupts.asked,
                learned_limits=learned_limits,
                injector=faults,
            )
            record.watch(supervisor.snapshot, faults)
            snapshot = supervisor.run()
    return record.ended(snapshot, settled.config.run.min_success_rate, interrupted=interrupts.asked)


def _with_sensors(environment: Environment, record: _Record) -> tuple[SlotPlan, ...]:
    script = record.options.fake_sensors
    if script is None:
        return environment.plans
    record.tell(f"Sensors: faked by {script}")
    return fake_sensors.with_sensors(environment.plans, script, record.folder / "fake-sensors", record.past.elapsed_s)


def _limits(environment: Environment, record: _Record) -> LimitStore | None:
    """Return the store of learned limits; with injected failures nothing is learned that holds without them."""
    return LimitStore() if environment.config.memory.remember and record.options.chaos is None else None


def _injector(environment: Environment, record: _Record) -> FaultInjector | None:
    plan = record.options.chaos
    if plan is None:
        return None
    record.tell(f"Chaos: {plan.describe()}")
    return FaultInjector(plan, environment.plans, environment.config.head_node, record.outlets.events)


class _Record:
    """The records of a run: its folder, and its final lines on the screen."""

    def __init__(self, *, folder: Path, screen: Screen, options: Options, started_at_unix_s: float, past: Past) -> None:
        self.folder = folder
        self.screen = screen
        self.options = options
        self.started_at_unix_s = started_at_unix_s
        self.past = past
        store = RunStore(folder / STORE_NAME)
        self.outlets = Outlets(
            watchers=(_viewer(options, screen), *(() if options.judge is None else (options.judge,))),
            events=EventLog(folder / "events.jsonl", also=store.event),
            store=store,
        )
        self._look: Callable[[], Snapshot] | None = None
        self._injector: FaultInjector | None = None
        self._begun = self._ended = False

    def begun(self, environment: Environment) -> RunInfo:
        """Record what the run is, so that another head can resume it; again if the cluster changes the environment."""
        info = RunInfo(
            run_id=self.folder.name,
            started_at_unix_s=self.started_at_unix_s,
            duration_s=environment.config.run.duration_s,
            past=self.past,
        )
        self._begun = True
        with contextlib.suppress(OSError):
            (self.folder / _SUMMARY_NAME).unlink(missing_ok=True)  # of a head that was interrupted
        if info.past.elapsed_s > 0:
            self.tell(f"Resuming after {info.past.elapsed_s:.0f} s; {info.remaining_s:.0f} s remain")
        config_yaml = dump_config(environment.config)
        with contextlib.suppress(OSError):  # the store keeps it too, and says what is wrong with the disk
            (self.folder / "config.yaml").write_text(config_yaml, encoding="utf-8")
        self.outlets.store.begin(
            RunFacts(
                run_id=info.run_id,
                started_at_unix_s=info.started_at_unix_s,
                duration_s=info.duration_s,
                elapsed_s=info.past.elapsed_s,
                min_success_rate=environment.config.run.min_success_rate,
                mode=environment.mode.value,
                device=environment.target.device,
                one_machine=environment.target.one_machine,
                config_yaml=config_yaml,
                chaos=None if self.options.chaos is None else self.options.chaos.describe(),
                nodes_planned=tuple(environment.config.nodes),
                head_pid=os.getpid(),
                head_started=start_time(os.getpid()),
                host=socket.gethostname(),
            )
        )
        self.outlets.store.commit()
        return info

    def watch(self, look: Callable[[], Snapshot], injector: FaultInjector | None) -> None:
        """Remember how to take a snapshot of the run, so that a run that ends in an error is reported too."""
        self._look = look
        self._injector = injector

    @property
    def _faults(self) -> list[dict[str, Any]]:
        return [] if self._injector is None else self._injector.faults()

    @property
    def _fault_counts(self) -> list[dict[str, Any]]:
        return [] if self._injector is None else self._injector.counts()

    def tell(self, *lines: str) -> None:
        """Print lines for the user; with `--json` nothing is printed."""
        if not self.options.json:
            for line in lines:
                _say(line, self.screen.err)

    def ended(self, snapshot: Snapshot, min_success_rate: float, *, interrupted: bool) -> int:
        """Write the summary of a run that came to its end, and return its exit code."""
        incomplete = self.outlets.incomplete or self.past.incomplete
        outcome, code = exit_code_for(snapshot, min_success_rate, interrupted=interrupted, incomplete=incomplete)
        summary = summary_dict(
            snapshot, outcome, code, self._started(), faults=self._faults, fault_counts=self._fault_counts
        )
        self.outlets.events.write("run_ended", outcome=outcome, exit_code=code)
        place = self._write(summary)
        self.outlets.store.incomplete |= self.outlets.events.incomplete
        self.outlets.store.end(outcome, code, None, self._faults)
        self._ended = True
        if self.options.json and self.options.judge is None:
            _say(summary_text(summary), self.screen.out)
        faults = fault_lines(self._faults)
        self.tell(*(["Injected faults:"] if faults else []), *(f"  {line}" for line in faults))
        self.tell(f"Outcome: {outcome}. Summary: {place}")
        return code

    def failed(self, error: BaseException) -> None:
        """Write the summary of a run that did not; the caller reports the error."""
        if self._ended or not self._begun:
            return  # what went wrong, went wrong after the summary, or before there was anything to add to the record
        text = str(error) or repr(error)
        outcome, code = "failed", error.exit_code if isinstance(error, OrchestratorError) else 1
        if isinstance(error, KeyboardInterrupt):
            outcome, code = "interrupted", 130
        self.outlets.events.write("run_failed", error=text)
        if self._look is None:
            self._write(failure_dict(text, code, outcome))
        else:
            self._write(
                summary_dict(
                    self._look(),
                    outcome,
                    code,
                    self._started(),
                    text,
                    faults=self._faults,
                    fault_counts=self._fault_counts,
                )
            )
        self.outlets.store.end(outcome, code, text, self._faults)

    def _started(self) -> str:
        return datetime.fromtimestamp(self.started_at_unix_s, UTC).isoformat(timespec="milliseconds")

    def _write(self, summary: dict[str, Any]) -> str:
        """Write the summary if the folder can take it; return where it is, or why it is not."""
        path = self.folder / _SUMMARY_NAME
        try:
            write_summary(path, summary)
        except OSError as error:
            return f"not written, {path}: {error.strerror}"
        return str(path)


def _say(text: str, stream: TextIO) -> None:
    """Print to a terminal that may be gone: a closed window must not undo a finished run."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def _viewer(options: Options, screen: Screen) -> Watcher:
    if options.json:
        return Silent()
    if options.plain or not screen.out.isatty():
        return PlainLines(screen.out)
    return LiveTable(Console(file=screen.out))
