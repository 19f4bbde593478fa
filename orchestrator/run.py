"""One run from its configuration to its exit code: stage, preflight, supervise, write the summary.

Does not parse arguments (`cli.py`) and does not exit. Whatever happens, what was started is torn down and, once a
run folder exists, its summary is written.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from orchestrator.cluster.base import Fleet
from orchestrator.commands import node_command
from orchestrator.config import Config, dump_config
from orchestrator.errors import NoClusterError, OrchestratorError, PreflightError, UsageError
from orchestrator.modes import Stage
from orchestrator.placement import Missing, Refusal, refusals, unnamed
from orchestrator.screen import Screen, own_screen
from orchestrator.supervisor import RunInfo, Supervisor
from orchestrator.watch.events import EventLog
from orchestrator.watch.live import LiveTable, PlainLines, Silent, Watcher
from orchestrator.watch.model import Snapshot
from orchestrator.watch.store import SampleStore
from orchestrator.watch.summary import exit_code_for, failure_dict, summary_dict, summary_text, write_summary

#: How long a fleet may take to show its nodes after connecting, before a missing one is called missing.
_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the user wants to see the run."""

    json: bool
    plain: bool
    wait_for_nodes: bool


def run(stage: Stage, options: Options) -> int:
    """Run `stage` and return the exit code.

    Raises:
        OrchestratorError: Nothing could be run; nothing was left behind.
    """
    folder = _run_folder(stage.config)
    started_at = time.time()
    interrupts = Interrupts()
    interrupts.install()
    with own_screen(folder / "ray.log") as screen:
        events = EventLog(folder / "events.jsonl")
        try:
            if not options.json:
                for line in stage.lines:
                    print(line, file=screen.err, flush=True)  # noqa: T201 - the user's terminal
            events.write("run_started", run_id=folder.name, workers=len(stage.plans))
            snapshot = _supervised(stage, options, folder, started_at, screen, events, interrupts)
            return _concluded(stage, options, folder, started_at, screen, events, snapshot, interrupts.asked)
        except BaseException as error:
            code = error.exit_code if isinstance(error, OrchestratorError) else 1
            outcome = "failed"
            if isinstance(error, KeyboardInterrupt):
                outcome, code = "interrupted", 130
            events.write("run_failed", error=str(error) or repr(error))
            write_summary(folder / "summary.json", failure_dict(str(error) or repr(error), code, outcome))
            raise
        finally:
            interrupts.restore()
            events.close()


def _supervised(  # noqa: PLR0913 - the parts of one run, each used here alone
    stage: Stage,
    options: Options,
    folder: Path,
    started_at: float,
    screen: Screen,
    events: EventLog,
    interrupts: Interrupts,
) -> Snapshot:
    store = SampleStore(folder / "samples.sqlite")
    with stage.fleet as fleet:
        interrupts.install()
        _preflight(stage.config, fleet, options)
        if not options.json:
            print(f"Run folder: {folder}", file=screen.err, flush=True)  # noqa: T201 - the user's terminal
        supervisor = Supervisor(
            info=RunInfo(
                run_id=folder.name, started_at_unix_s=started_at, duration_s=stage.config.run.duration_s
            ),
            config=stage.config,
            plans=stage.plans,
            fleet=fleet,
            watchers=(_viewer(options, screen), store),
            events=events,
            interrupted=lambda: interrupts.asked,
            problems=lambda: [problem for problem in (store.problem, events.problem) if problem is not None],
        )
        return supervisor.run()


def _concluded(  # noqa: PLR0913 - as above
    stage: Stage,
    options: Options,
    folder: Path,
    started_at: float,
    screen: Screen,
    events: EventLog,
    snapshot: Snapshot,
    was_interrupted: bool,  # noqa: FBT001 - a fact, not a mode
) -> int:
    outcome, code = exit_code_for(snapshot, stage.config.run.min_success_rate, was_interrupted)
    started = datetime.fromtimestamp(started_at, UTC).isoformat(timespec="milliseconds")
    summary: dict[str, Any] = summary_dict(snapshot, outcome, code, started)
    events.write("run_ended", outcome=outcome, exit_code=code)
    write_summary(folder / "summary.json", summary)
    if options.json:
        print(summary_text(summary), file=screen.out, flush=True)  # noqa: T201 - the one object of --json
    else:
        print(f"Outcome: {outcome}. Summary: {folder / 'summary.json'}", file=screen.err, flush=True)  # noqa: T201
    return code


def _viewer(options: Options, screen: Screen) -> Watcher:
    if options.json:
        return Silent()
    if options.plain or not screen.out.isatty():
        return PlainLines(screen.out)
    return LiveTable(Console(file=screen.out))


def _preflight(config: Config, fleet: Fleet, options: Options) -> None:
    """Compare the cluster with the plan before the first actor.

    Raises:
        PreflightError: Something is missing, and the user did not say that he will wait for it.
    """
    deadline = time.monotonic() + _SETTLE_S
    found = refusals(config, fleet.nodes())
    while found and time.monotonic() < deadline:
        time.sleep(0.1)  # a node that joined a moment ago may not be shown yet
        found = refusals(config, fleet.nodes())
    if not found:
        return
    absent = {refusal.node for refusal in found if refusal.missing is Missing.NODE}
    if options.wait_for_nodes and absent == {refusal.node for refusal in found}:
        return
    problems = [_cure(config, refusal) for refusal in found]
    nameless = unnamed(fleet.nodes())
    if absent and nameless:
        problems.append(
            f"the node at {', '.join(nameless)} has no label; a node started without --labels=node=NAME is not used"
        )
    if absent:
        problems.append("or start on what is there and let the others join later: add --wait-for-nodes")
    raise PreflightError(problems)


def _cure(config: Config, refusal: Refusal) -> str:
    return f"{refusal.text}; `python -m orchestrator up {refusal.node}` prints what to type on it: {_start(config, refusal.node)}"


def _start(config: Config, node: str) -> str:
    head = config.nodes[config.head_node].host or "HEAD_IP"
    address = config.cluster.address if config.cluster.address != "auto" else f"{head}:{config.cluster.port}"
    return node_command(config, node, address).line


def without_cluster(config: Config, error: NoClusterError) -> NoClusterError:
    """Return the error with what to type: how to start a cluster, and how to go on without one."""
    head = config.head_node
    return NoClusterError(
        f"{error}\n"
        f"  start one:       on {head}, type: {_start(config, head)}\n"
        f"                   (`python -m orchestrator up NODE` prints every step for each PC)\n"
        f"  or go on without one:\n"
        f"    --rehearse     every node of the configuration as a small copy on this machine\n"
        f"    --local        this machine alone, with what it really has"
    )


class Interrupts:
    """Turns the first Ctrl-C (or SIGTERM, or a closed terminal) into a question the run asks; the second raises."""

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.asked = False
        self._before = {number: signal.getsignal(number) for number in self._NUMBERS}

    def install(self) -> None:
        """Take the signals; to be called again after Ray has connected, which takes SIGTERM for itself."""
        for number in self._NUMBERS:
            signal.signal(number, self._ask)

    def restore(self) -> None:
        """Give the signals back to whom they belonged."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def _run_folder(config: Config) -> Path:
    """Make `runs/<run_id>/` with the configuration as used and the head's process id.

    Raises:
        UsageError: It cannot be made.
    """
    run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder = Path(config.run.dir) / run_id
    try:
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        (folder / "head.json").write_text(json.dumps({"pid": os.getpid()}), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the run folder {folder}: {error.strerror}; choose another with --run-dir") from error
    return folder
