"""One run from its configuration to its exit code: stage, preflight, supervise, write the summary.

Does not parse arguments (`cli.py`) and does not exit. Whatever happens, what was started is torn down and, once a
run folder exists, its summary is written.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from orchestrator import preflight
from orchestrator.config import Config, dump_config
from orchestrator.errors import OrchestratorError, UsageError
from orchestrator.interrupts import Interrupts
from orchestrator.modes import Stage
from orchestrator.screen import Screen, own_screen
from orchestrator.supervisor import RunInfo, Supervisor
from orchestrator.watch.events import EventLog
from orchestrator.watch.live import LiveTable, PlainLines, Silent, Watcher
from orchestrator.watch.model import Snapshot
from orchestrator.watch.store import SampleStore
from orchestrator.watch.summary import exit_code_for, failure_dict, summary_dict, summary_text, write_summary


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
    interrupts = Interrupts()
    interrupts.install()
    with own_screen(folder / "ray.log") as screen:
        record = _Record(folder=folder, screen=screen, options=options, started_at_unix_s=time.time())
        try:
            return _staged(stage, record, interrupts)
        except BaseException as error:
            record.failed(error)
            raise
        finally:
            interrupts.restore()
            record.events.close()


def _staged(stage: Stage, record: _Record, interrupts: Interrupts) -> int:
    record.tell(*stage.lines)
    with stage.fleet as fleet:
        interrupts.install()  # Ray has taken SIGTERM for itself
        preflight.check(stage.config, fleet, wait_for_nodes=record.options.wait_for_nodes)
        settled = stage.settle(stage, fleet)
        if settled is not stage:
            record.tell(*settled.lines)
        record.tell(f"Run folder: {record.folder}")
        (record.folder / "config.yaml").write_text(dump_config(settled.config), encoding="utf-8")
        record.events.write("run_started", run_id=record.folder.name, workers=len(settled.plans))
        store = SampleStore(record.folder / "samples.sqlite")
        supervisor = Supervisor(
            info=RunInfo(
                run_id=record.folder.name,
                started_at_unix_s=record.started_at_unix_s,
                duration_s=settled.config.run.duration_s,
            ),
            config=settled.config,
            plans=settled.plans,
            fleet=fleet,
            watchers=(_viewer(record.options, record.screen), store),
            events=record.events,
            interrupted=lambda: interrupts.asked,
            problems=lambda: [text for text in (store.problem, record.events.problem) if text is not None],
        )
        record.watch(supervisor.snapshot)
        snapshot = supervisor.run()
    outcome, code = exit_code_for(snapshot, settled.config.run.min_success_rate, interrupts.asked)
    record.ended(snapshot, outcome, code)
    return code


class _Record:
    """What a run leaves to read: its folder, and its last words on the screen."""

    def __init__(self, *, folder: Path, screen: Screen, options: Options, started_at_unix_s: float) -> None:
        self.folder = folder
        self.screen = screen
        self.options = options
        self.started_at_unix_s = started_at_unix_s
        self.events = EventLog(folder / "events.jsonl")
        self._look: Callable[[], Snapshot] | None = None
        self._ended = False

    def watch(self, look: Callable[[], Snapshot]) -> None:
        """Remember how to look at the run: what it did until then is told even if it ends in an error."""
        self._look = look

    def tell(self, *lines: str) -> None:
        """Say something to the person at the terminal; a program that reads `--json` is told nothing."""
        if not self.options.json:
            for line in lines:
                _say(line, self.screen.err)

    def ended(self, snapshot: Snapshot, outcome: str, code: int) -> None:
        """Write the summary of a run that came to its end."""
        summary = summary_dict(snapshot, outcome, code, self._started())
        self.events.write("run_ended", outcome=outcome, exit_code=code)
        place = self._write(summary)
        self._ended = True
        if self.options.json:
            _say(summary_text(summary), self.screen.out)
        self.tell(f"Outcome: {outcome}. Summary: {place}")

    def failed(self, error: BaseException) -> None:
        """Write the summary of a run that did not; the caller reports the error."""
        if self._ended:
            return  # what went wrong, went wrong after the summary
        text = str(error) or repr(error)
        outcome, code = "failed", error.exit_code if isinstance(error, OrchestratorError) else 1
        if isinstance(error, KeyboardInterrupt):
            outcome, code = "interrupted", 130
        self.events.write("run_failed", error=text)
        if self._look is None:
            self._write(failure_dict(text, code, outcome))
        else:
            self._write(summary_dict(self._look(), outcome, code, self._started(), text))

    def _started(self) -> str:
        return datetime.fromtimestamp(self.started_at_unix_s, UTC).isoformat(timespec="milliseconds")

    def _write(self, summary: dict[str, Any]) -> str:
        """Write the summary if the folder can take it; return where it is, or why it is not."""
        path = self.folder / "summary.json"
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


def _run_folder(config: Config) -> Path:
    """Make `runs/<run_id>/` with the configuration as used and the head's process id.

    Raises:
        UsageError: It cannot be made.
    """
    run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder = Path(config.run.dir) / run_id
    try:
        folder.mkdir(parents=True)
        (folder / "head.json").write_text(json.dumps({"pid": os.getpid()}), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write the run folder {folder}: {error.strerror}; choose another with --run-dir"
        ) from error
    return folder
