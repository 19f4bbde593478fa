"""`up NODE --exec --stay`: keeps this PC's Ray node. Polls, asks `core/rejoin.py` what to do, does
it, says it.

Every process is ended by its process id, found by the mark that `up` sets. This process has the
mark too, so that `stop --node` ends it together with the node.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import IO

import psutil

from orchestrator.cli import nodes
from orchestrator.cluster import ray_programs
from orchestrator.cluster.connect import reach
from orchestrator.core.node_commands import NODE_MARK, NodeCommand
from orchestrator.core.rejoin import Action, Node, NodePhase, NodeSample, turn
from orchestrator.errors import NoClusterError, UsageError, one_line
from orchestrator.run.terminal import Interrupts

_POLL_EVERY_S = 1.0

#: Less than `stop --node` grants this process, which ends the same processes meanwhile.
_GRACE_S = 4.0

_FLAG = "--stay"

_ENDED = "Ray has ended on this PC"

_ANSWERS = {ray_programs.MEMBER: True, ray_programs.NOT_A_MEMBER: False}


def keep(command: NodeCommand) -> int:
    """Keep the node until Ctrl-C, SIGTERM or `stop --node`, then end it; return the exit code.

    Raises:
        UsageError: The node is kept already, there is no token, or Ray is not installed.
    """
    node = command.environment[NODE_MARK]
    if (
        os.environ.get(NODE_MARK) != node
    ):  # the mark must be in the environment that the kernel shows
        os.execve(  # noqa: S606
            sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, NODE_MARK: node}
        )
    refuse_a_second(node)
    nodes.ray_start(command)  # fails where Ray is not installed
    nodes.get_token(command)
    interrupts, known = Interrupts(), Node()
    interrupts.install()
    with tempfile.TemporaryFile() as reports:
        here = _LocalNode(command, reports)
        try:
            while not interrupts.asked:
                known, action = turn(known, here.poll())
                here.do(action)
                here.say(known)
                time.sleep(_POLL_EVERY_S)
        finally:
            _show(f"ending {node}", is_last=True)
            here.end()
            interrupts.restore()
    return 130


def refuse_a_second(node: str) -> None:
    """Raise a UsageError if a process on this PC keeps the node already."""
    for process in nodes.processes_of(node):
        with suppress(psutil.Error):  # gone
            if _FLAG in process.cmdline():
                raise UsageError(
                    f"process {process.pid} keeps {node} already; to end it: python -m "
                    f"orchestrator stop --node {node}"
                )


class _LocalNode:
    """The node's processes on this PC, and the way to the head."""

    def __init__(self, command: NodeCommand, reports: IO[bytes]) -> None:
        """Find what runs already. What `ray start` prints goes to `reports`."""
        self._command = command
        self._node = command.environment[NODE_MARK]
        self._reports = reports
        self._raylet: psutil.Process | None = None
        self._needed: list[psutil.Process] = []
        self._start: subprocess.Popen[bytes] | None = None
        self._started: dict[psutil.Process, str] = {}
        self._question: subprocess.Popen[bytes] | None = None
        self._unreachable = ""
        self._failure = _ENDED
        self._said = ""
        self._find()

    def poll(self) -> NodeSample:
        """Poll the processes and, from every PC but the head's own, the head."""
        is_member = None
        if self._start is not None and self._start.poll() is not None:
            if self._start.returncode == 0:
                self._find()
            else:  # what it has started all the same is no node
                self._failure = f"`ray start` has failed: {self._last_words()}"
            self._start = None
        if self._question is not None and self._question.poll() is not None:
            is_member = _ANSWERS.get(self._question.returncode)
            if is_member is False:
                self._failure = "the head has declared this node dead, or has begun a new cluster"
            self._question = None
        self._unreachable = (
            "" if self._command.is_head else _why_unreachable(self._command.head_address)
        )
        return NodeSample(
            now_s=time.monotonic(),
            is_reachable=not self._unreachable,
            is_starting=self._start is not None,
            is_in_vain=self._start is not None and self._has_lost_one(self._start.pid),
            is_running=bool(self._needed) and not any(map(nodes.has_ended, self._needed)),
            is_asking=self._question is not None,
            is_member=is_member,
        )

    def do(self, action: Action) -> None:
        """Start, ask or end, without waiting for what was started."""
        if action is Action.START:
            self.end()  # a worker whose raylet has died may still hold its card
            argv, environment = nodes.ray_start(self._command)
            self._reports.seek(0)
            self._reports.truncate()
            self._failure = _ENDED
            self._start = subprocess.Popen(  # noqa: S603 - the command that `up` prints
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._reports,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the terminal's Ctrl-C is for this process, which ends it
            )
        elif action is Action.ASK and self._raylet is not None:
            module = [
                sys.executable,
                "-m",
                ray_programs.__name__,
                "is-member",
                self._command.head_address,
                _node_id(self._raylet),
            ]
            self._question = subprocess.Popen(  # noqa: S603 - our own module
                module,
                env={**os.environ, **self._command.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        elif action is Action.END:
            if self._start is not None and not self._unreachable:
                lost = [log for process, log in self._started.items() if nodes.has_ended(process)]
                late = f"`ray start` did not end in time: {self._last_words()}"
                self._failure = (
                    f"what `ray start` has started has ended, see {lost[0]}" if lost else late
                )
            self.end()

    def end(self) -> None:
        """End all that was started for the node, here or by `up` before."""
        nodes.end(nodes.processes_of(self._node), _GRACE_S)
        self._start = self._question = self._raylet = None
        self._needed, self._started = [], {}

    def say(self, known: Node) -> None:
        """Show the node's state: one line that changes in a terminal, else a line
        for each change.
        """
        head = self._command.head_address
        if known.phase is NodePhase.STARTING:
            text = "starting the head" if self._command.is_head else f"joining the head at {head}"
        elif known.phase is NodePhase.DOWN:
            pause = f"{self._failure}; next try after {known.pause_s:.0f} s"
            text = f"waiting: {self._unreachable}" if self._unreachable else pause
        elif known.in_doubt:
            text = (
                "up, but "
                f"{self._unreachable or f'it is not sure whether the head at {head} still counts it in'}"
            )
        else:
            text = (
                "up, the head"
                if self._command.is_head
                else f"up, a member of the cluster of {head}"
            )
        if text != self._said:
            self._said = text
            _show(f"{time.strftime('%H:%M:%S')} {self._node}: {one_line(text)}")

    def _find(self) -> None:
        by_name: dict[str, psutil.Process] = {}
        for process in nodes.processes_of(self._node):
            with suppress(psutil.Error):  # it has ended
                known = by_name.setdefault(process.name(), process)
                if (
                    process.create_time() < known.create_time()
                ):  # a raylet that starts a worker forks before it
                    by_name[process.name()] = process
        self._raylet = by_name.get("raylet")
        names = self._names
        self._needed = [by_name[name] for name in names] if by_name.keys() >= set(names) else []

    @property
    def _names(self) -> tuple[str, ...]:
        """What the processes are called that the node needs."""
        return ("raylet", "gcs_server") if self._command.is_head else ("raylet",)

    def _has_lost_one(self, pid: int) -> bool:
        """Say whether a process has ended that `ray start` has started and the node needs."""
        with suppress(psutil.Error):  # it has ended, which the next poll sees
            for child in psutil.Process(pid).children():
                if child not in self._started and child.name() in self._names:
                    self._started[child] = _option(child, "--stderr_filepath=")
        return any(map(nodes.has_ended, self._started))

    def _last_words(self) -> str:
        self._reports.seek(0)
        lines = self._reports.read().decode("utf-8", "replace").split("\n")
        return next(
            (line.strip() for line in reversed(lines) if line.strip()), "it has printed nothing"
        )[:300]


def _why_unreachable(address: str) -> str:
    try:
        reach(address)
    except NoClusterError as error:
        return str(error)
    return ""


def _node_id(raylet: psutil.Process) -> str:
    """The id by which the cluster knows a raylet."""
    return _option(raylet, "--node_id=")


def _option(process: psutil.Process, option: str) -> str:
    """Return what an option of a process says; nothing if it has none, or has ended."""
    try:
        return next(
            (word.removeprefix(option) for word in process.cmdline() if word.startswith(option)), ""
        )
    except psutil.Error:
        return ""


def _show(line: str, *, is_last: bool = False) -> None:
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        line = f"\r\x1b[2K{line[: width - 1]}"
    with suppress(OSError):  # a node is kept without a reader, too
        sys.stdout.write(f"{line}\n" if is_last or not sys.stdout.isatty() else line)
        sys.stdout.flush()
