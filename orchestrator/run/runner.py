"""One run from its configuration to its exit code: environment, preflight, supervision, summary.

The preflight compares the cluster with the plan before the first actor, and says what to type if
they differ. Without it, an actor that fits on no node would stay pending in Ray without a message
and without a time limit. Does not parse arguments (`cli/app.py`) and does not exit. Everything that
was started is torn down, and once a run folder exists, the summary is written.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console

from orchestrator.config.load import dump_config
from orchestrator.config.schema import ClusterConfig, Config, NotifyConfig
from orchestrator.core.fleet import Fleet
from orchestrator.core.node_commands import firewall_lines, node_command
from orchestrator.core.placement import Target, idle_line, refusals
from orchestrator.core.run_outcome import outcome_of
from orchestrator.errors import NoClusterError, OrchestratorError, PreflightError, one_line
from orchestrator.jobs.model import Submitted
from orchestrator.jobs.queue import Queue, with_messages
from orchestrator.record.archive import StoredRun
from orchestrator.record.events import EVENTS_NAME, EventLog
from orchestrator.record.folders import command_for, go_on_command
from orchestrator.record.jobs import QUEUE_NAME, queue_of
from orchestrator.record.model import Snapshot
from orchestrator.record.store import STORE_NAME, RunFacts, RunStore
from orchestrator.record.summary import failure_dict, summary_dict, summary_text, write_file
from orchestrator.run import node_setup, resume, run_dir
from orchestrator.run.dispatcher import Dispatcher
from orchestrator.run.earlier import fetch_weights
from orchestrator.run.environment import Environment, Mode, adapted
from orchestrator.run.notify_urls import URLS_VARIABLE, notify_urls
from orchestrator.run.prediction import DIVIDES, divided_where_needed
from orchestrator.run.resume import Past
from orchestrator.run.supervisor import Clock, Outlets, Supervisor
from orchestrator.run.terminal import Interrupts, Screen, own_screen, show_report, start_notify
from orchestrator.view.cells import width_of, wrapped
from orchestrator.view.live import LiveTable, PlainLines, Watcher
from orchestrator.view.phrases import fault_lines, section
from workers.keeper.processes import start_time

_SUMMARY_NAME = "summary.json"

#: Lines from the end of a traceback, where the user's code is; events.jsonl has all of it.
_TRACEBACK_LINES = 20


class Faults(Protocol):
    """Faults that are injected into a run (`run --chaos`). The run does not know what they are."""

    description: str
    """Text for the user and the run's record. Nothing is learned from a run with faults."""

    def check(self, environment: Environment) -> None:
        """Raise `UsageError` if the faults make no sense in this environment."""

    def around(self, fleet: Fleet, events: EventLog, clock: Clock) -> Fleet:
        """Return a fleet that wraps `fleet` and injects the faults."""

    def on_event(self, entry: Mapping[str, Any]) -> None:
        """Receive an entry that the run has written into its event log."""

    def injected(self) -> list[dict[str, Any]]:
        """Return the faults that were injected, once the run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the user wants to see the run."""

    json: bool
    plain: bool
    wait_for_nodes: bool
    chaos: Faults | None = None
    apply_power_limit: bool = False
    yes_really: bool = False
    """Whether a memory offset may be set, too."""
    jobs: Callable[[Config, Target], tuple[Submitted, ...]] | None = None
    """Makes the jobs that this command adds to a run of jobs; they depend on the target."""
    stays: bool = False
    """Whether a run of jobs waits for more jobs when nothing is left to do."""
    judge: Callable[[Path], None] | None = None
    """Receives the folder of a run that the caller judges and reports on. Then `json` only means
    that this run prints nothing.
    """


def run(environment: Environment, options: Options) -> int:
    """Run `environment` and return the exit code; `OrchestratorError` if nothing could be run."""
    _check(environment, options)
    config = environment.config
    if config.train.start and (config.workload.name == "train" or options.jobs is not None):
        lines = fetch_weights(config.train.start, Path(config.run.dir))
        environment = replace(environment, lines=(*environment.lines, *lines))
    folder = run_dir.new_folder(config)
    return _in_folder(folder, environment, options, time.time(), None)


def resume_run(
    stored: StoredRun,
    options: Options,
    more_s: float | None = None,
    *,
    cluster: ClusterConfig | None = None,
) -> int:
    """Resume a run whose head has ended, in its own folder, and return the exit code; see
    `resume.environment_of`.

    `cluster` says where its cluster is now; `None`: where it was.

    Raises:
        OrchestratorError: It is under way, or over, or cannot be run here.
    """
    run_dir.check_mine(stored.folder)
    environment = resume.environment_of(stored, more_s, stays=options.stays)
    if cluster is not None:
        config = environment.config.model_copy(update={"cluster": cluster})
        environment = replace(environment, config=config)
    _check(environment, options)
    began_unix_s = stored.facts.started_at_unix_s
    return _in_folder(stored.folder, environment, options, began_unix_s, resume.past_of(stored))


def _check(environment: Environment, options: Options) -> None:
    if options.judge is None:
        notify_urls(environment.config.notify)
    if options.chaos is not None:
        options.chaos.check(environment)


def _in_folder(
    folder: Path,
    environment: Environment,
    options: Options,
    started_at_unix_s: float,
    past: Past | None,
) -> int:
    interrupts = Interrupts()
    interrupts.install()
    with run_dir.hold_folder(folder), own_screen(folder / "ray.log") as screen:
        record = _Record(
            folder=folder,
            screen=screen,
            options=options,
            started_at_unix_s=started_at_unix_s,
            past=past or Past(),
        )
        try:
            if past is None:
                # Before Ray starts: a head that is killed meanwhile leaves a run that can be
                # resumed. A resumed run keeps the record that it has until its fleet is connected.
                record.begin(environment)
            record.open_queue(environment)
            record.start_notify(environment.config.notify)
            return _in_environment(environment, record, interrupts)
        except BaseException as error:
            record.fail(error)
            is_before = record.supervisor is None
            if isinstance(error, NoClusterError) and environment.mode is Mode.CLUSTER and is_before:
                raise without_cluster(environment.config, error) from error
            raise
        finally:
            interrupts.restore()
            record.outlets.events.close()
            record.outlets.store.close()


def _in_environment(environment: Environment, record: _Record, interrupts: Interrupts) -> int:
    record.tell(f"Run folder: {record.folder}", *environment.lines)
    with environment.fleet as fleet:
        interrupts.install()  # Ray has replaced the handler of SIGTERM
        check_nodes(environment.config, fleet, wait_for_nodes=record.options.wait_for_nodes)
        target = environment.target
        if record.past.elapsed_s == 0 and (now := adapted(environment, fleet)) is not environment:
            environment = now
            record.tell(*environment.lines)
        config = divided_where_needed(
            environment.config, environment.target, interrupted=lambda: interrupts.asked
        )
        if config is not environment.config:
            record.tell(DIVIDES)
            environment = replace(environment, config=config)
        if environment.target != target:
            record.open_queue(environment)
        facts = record.begin(environment)
        record.outlets.events.write(
            "run_started",
            run_id=facts.run_id,
            workers=len(environment.plans),
            elapsed_s=facts.elapsed_s,
        )
        options, plans = record.options, environment.plans
        chaos = options.chaos
        if record.queue is None:
            addresses = {str(fact.name): fact.address for fact in fleet.nodes()}
            lines = firewall_lines(plans, addresses)
            record.tell(*filter(None, [idle_line(environment.config, plans)]), *lines)
        if chaos is not None:
            record.tell(f"Chaos: {chaos.description}")
        wanted = node_setup.wanted_settings(
            environment,
            plans,
            apply_power_limit=options.apply_power_limit,
            yes_really=options.yes_really,
            tell=record.tell,
        )
        clock = Clock()
        with node_setup.cards_set(
            fleet,
            wanted,
            tell=record.tell,
            events=record.outlets.events,
            interrupted=lambda: interrupts.asked,
        ):
            dispatcher = record.dispatcher(environment)
            slots = plans if dispatcher is None else tuple(dispatcher.resumed())
            record.supervisor = Supervisor(
                past=record.past,
                config=environment.config,
                plans=slots,
                fleet=fleet if chaos is None else chaos.around(fleet, record.outlets.events, clock),
                outlets=record.outlets,
                folder=record.folder,
                interrupted=lambda: interrupts.asked,
                clock=clock,
                dispatcher=dispatcher,
            )
            try:
                snapshot = record.supervisor.run()
            except NoClusterError as error:
                # At once: Ray needs several seconds to disconnect from a cluster that has ended.
                record.tell("The cluster has ended; closing the run ...")
                record.fail(error)
                raise
            missed = () if interrupts.asked else record.supervisor.shortfalls()
    return record.end(snapshot, missed, interrupted=interrupts.asked)


@dataclass(kw_only=True)
class _Record:
    """The records of a run in its folder, and its final lines on the screen."""

    folder: Path
    screen: Screen
    options: Options
    started_at_unix_s: float
    past: Past
    supervisor: Supervisor | None = None
    """Once set, the summary of a run that ends in an error has the last snapshot."""
    notify: subprocess.Popen[bytes] | None = None
    """The process of `notify`. It outlives the run, and the run does not wait for it."""
    queue: Queue | None = None
    """The queue of a run of jobs; `None` for other runs."""

    def __post_init__(self) -> None:
        judge, chaos = self.options.judge, self.options.chaos
        if judge is not None:
            judge(self.folder)
        self.outlets = Outlets(
            watchers=_viewers(self.options, self.screen),
            events=EventLog(
                self.folder / EVENTS_NAME, also=None if chaos is None else chaos.on_event
            ),
            store=RunStore(self.folder / STORE_NAME),
        )
        self._begun = self._ended = self._with_report = False

    def begin(self, environment: Environment) -> RunFacts:
        """Record what the run is, so that another head can resume it.

        Called again if the cluster changes the environment.
        """
        config = environment.config
        facts = RunFacts(
            run_id=self.folder.name,
            started_at_unix_s=self.started_at_unix_s,
            duration_s=config.run.duration_s,
            elapsed_s=self.past.elapsed_s,
            mode=environment.mode.value,
            device=environment.target.device,
            one_machine=environment.target.one_machine,
            config_yaml=dump_config(config),
            chaos=None if self.options.chaos is None else self.options.chaos.description,
            nodes_planned=tuple(config.nodes),
            head_pid=os.getpid(),
            head_started=start_time(os.getpid()),
            host=socket.gethostname(),
        )
        self._with_report = config.run.report and self.options.judge is None
        with contextlib.suppress(OSError):
            (self.folder / _SUMMARY_NAME).unlink(missing_ok=True)  # left by an interrupted head
        if facts.elapsed_s > 0:
            remaining_s = max(0.0, facts.duration_s - facts.elapsed_s)
            left = "" if self.options.jobs is not None else f"; {remaining_s:.0f} s remain"
            self.tell(f"Resuming after {facts.elapsed_s:.0f} s{left}")
        # The store has it too, and reports what is wrong with the disk.
        with contextlib.suppress(OSError):
            (self.folder / "config.yaml").write_text(facts.config_yaml, encoding="utf-8")
        self.outlets.store.begin(facts)
        self._begun = True
        self.outlets.store.commit()
        return facts

    def open_queue(self, environment: Environment) -> None:
        """Open the queue of a run of jobs, and store it with the jobs that this command adds.

        Called again if the cluster changes the target: then nothing has been decided yet.
        """
        folder, added = self.folder / QUEUE_NAME, self.options.jobs
        if added is None and not folder.exists():
            return
        folder.mkdir(mode=0o700, exist_ok=True)
        # A queue that was stored for another target has these same jobs, and is replaced.
        queue = queue_of(self.folder) if self.queue is None else Queue()
        submitted = added(environment.config, environment.target) if added else ()
        self.queue = with_messages(queue, submitted, time.time())
        self.outlets.store.queue(self.queue)
        if not self.outlets.store.commit():
            raise OrchestratorError(str(self.outlets.store.problem))

    def dispatcher(self, environment: Environment) -> Dispatcher | None:
        """Return the dispatcher, which names the slots of a run of jobs; `None` for other runs."""
        if self.queue is None:
            return None
        return Dispatcher(
            folder=self.folder / QUEUE_NAME,
            config=environment.config,
            target=environment.target,
            events=self.outlets.events,
            store=self.outlets.store,
            queue=self.queue,
            stays=self.options.stays,
            before_unix_s=self.past.updated_at_unix_s,
        )

    def start_notify(self, settings: NotifyConfig) -> None:
        """Start the process that sends notifications if there are addresses for them, and remove
        the addresses from the environment that workers inherit.
        """
        is_wanted = self.options.judge is None and bool(notify_urls(settings))
        with_addresses = dict(os.environ)
        os.environ.pop(URLS_VARIABLE, None)
        if is_wanted:
            self.notify = start_notify(self.folder, self.tell, with_addresses)

    def tell(self, *lines: str) -> None:
        """Print lines for the user; nothing with `--json`."""
        if not self.options.json:
            for line in lines:
                _say(wrapped(line, width_of(self.screen.err)), self.screen.err)

    def end(self, snapshot: Snapshot, missed: Sequence[str], *, interrupted: bool) -> int:
        """Write the summary of a run that came to its end, with what it `missed`, and return its
        exit code.
        """
        outcome, code = outcome_of(missed, interrupted=interrupted)
        notices = tuple(dict.fromkeys((*snapshot.notices, *missed)))
        summary = self._summary(replace(snapshot, notices=notices), outcome, code)
        self.outlets.events.write("run_ended", outcome=outcome, exit_code=code, missed=list(missed))
        place = self._write(summary)
        self.outlets.store.incomplete |= self.outlets.events.incomplete
        self.outlets.store.end(outcome, code, None, summary["faults"])
        self._ended = True
        if self.options.json and self.options.judge is None:
            _say(summary_text(summary), self.screen.out)
        self.tell(*section("injected faults", fault_lines(summary["faults"])))
        if self.supervisor is not None and (error := self.supervisor.workload_error) is not None:
            lines = error.rstrip().splitlines()[-_TRACEBACK_LINES:]
            self.tell("", "last error of the workload", *(f"  {one_line(line)}" for line in lines))
        self.tell(*section("what fell short", missed))
        self.tell(f"Outcome: {outcome}. Summary: {place}")
        following = f"See what happened: {command_for(self.folder, 'report')}"
        if interrupted:
            following = f"Go on: {go_on_command(self.folder)}"
        elif self.queue is not None:
            following = f"See the results: {command_for(self.folder, 'jobs', 'results')}"
        self.tell(following)
        self._report()
        return code

    def fail(self, error: BaseException) -> None:
        """Write the summary of a run that ended in an error; the caller reports the error."""
        if self._ended or not self._begun:
            # The error came after the summary was written, or before there was anything to record.
            return
        text = str(error) or repr(error)
        outcome, code = "failed", error.exit_code if isinstance(error, OrchestratorError) else 1
        if isinstance(error, KeyboardInterrupt):
            outcome, code = "interrupted", 130
        self._ended = True
        self.outlets.events.write("run_failed", error=text)
        if self.supervisor is None:
            summary = failure_dict(text, code, outcome)
        else:
            summary = self._summary(self.supervisor.snapshot(), outcome, code, text)
        self._write(summary)
        self.outlets.store.end(outcome, code, text, summary["faults"])
        if outcome == "failed":
            self._report()

    def _report(self) -> None:
        if self._with_report:
            show_report(self.folder, self.tell)

    def _summary(
        self, snapshot: Snapshot, outcome: str, code: int, error: str | None = None
    ) -> dict[str, Any]:
        chaos = self.options.chaos
        faults = [] if chaos is None else chaos.injected()
        started = datetime.fromtimestamp(self.started_at_unix_s, UTC).isoformat(
            timespec="milliseconds"
        )
        return summary_dict(snapshot, outcome, code, started, error, faults=faults)

    def _write(self, summary: dict[str, Any]) -> str:
        """Write the summary, if possible, and return its path, or why it was not written."""
        path = self.folder / _SUMMARY_NAME
        try:
            write_file(path, summary_text(summary) + "\n")
            return str(path)
        except OSError as error:
            return f"not written, {path}: {error.strerror}"


def _say(text: str, stream: TextIO) -> None:
    """Print to a terminal that may be gone: a closed window must not undo a finished run."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def _viewers(options: Options, screen: Screen) -> tuple[Watcher, ...]:
    if options.json:
        return ()
    if options.plain or not screen.out.isatty():
        return (PlainLines(screen.out),)
    return (LiveTable(Console(file=screen.out)),)


#: How long a fleet may take to list its nodes after connecting, before a node counts as missing.
_SETTLE_S = 1.0


def check_nodes(config: Config, fleet: Fleet, *, wait_for_nodes: bool) -> None:
    """Compare cluster and plan before the first actor.

    `PreflightError` if they differ, unless only nodes are missing and the user waits for them.
    """
    deadline = time.monotonic() + _SETTLE_S
    while (refused := refusals(config, fleet.nodes())) and time.monotonic() < deadline:
        time.sleep(0.1)  # a node that joined a moment ago may not be listed yet
    if not refused:
        return
    absent = {refusal.node for refusal in refused if refusal.is_absent}
    if wait_for_nodes and absent == {refusal.node for refusal in refused}:
        return
    problems = []
    for refusal in refused:
        node, command = refusal.node, node_command(config, refusal.node, fleet.address()).line
        problems.append(
            f"{refusal.text}; on {node}, type: {command}  (`orchestrator up {node}` prints every "
            "step)"
        )
    nameless = sorted(fact.address for fact in fleet.nodes() if fact.name is None)
    if absent and nameless:
        problems.append(
            f"the node at {', '.join(nameless)} has no label; a node started without "
            "--labels=node=NAME is not used"
        )
    if absent:
        problems.append(
            "or start on what is there and let the others join later: add --wait-for-nodes"
        )
    raise PreflightError(problems)


def without_cluster(config: Config, error: NoClusterError) -> NoClusterError:
    """Return the error with the commands that start a cluster, and the options that need none."""
    head = config.head_node
    return NoClusterError(
        f"{error}\n"
        f"  start one:       on {head}, type: python -m orchestrator up {head} --exec\n"
        f"                   (without --exec it only prints the commands; for other PCs: up NODE)\n"
        f"  or go on without one:\n"
        f"    --rehearse     every node of the configuration as a small copy on this machine\n"
        f"    --local        this machine alone, with what it really has"
    )
