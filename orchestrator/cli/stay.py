"""`up NODE --exec --stay`: starts `ray start --block` again whenever it has ended.

Ray's own node does not end when its head begins a new cluster, or has declared it dead (ray issue
64349). So this program asks the head whether the node is a member, after each start and whenever
the head was out of reach. Processes are found by the mark that `up` sets and ended by process id.
This process has the mark too: `stop --node` ends it together with the node.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

import psutil

from orchestrator.cli import nodes
from orchestrator.cluster import ray_programs
from orchestrator.cluster.connect import reach
from orchestrator.core.node_commands import NODE_MARK, NodeCommand
from orchestrator.errors import NoClusterError, UsageError, one_line
from orchestrator.run.terminal import Interrupts

_LOOK_EVERY_S, _ASK_EVERY_S = 1.0, 3.0
#: The pause after a node has ended doubles up to the second, unless it was up for so long.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _STEADY_S = 1.0, 60.0, 60.0
#: A start that has not joined by then is tried again. The longest of 25 took 25 s on a loaded PC.
_LONGEST_START_S = 180.0
#: Less than `stop --node` grants this process, which ends the same processes meanwhile.
_GRACE_S = 4.0


def keep(command: NodeCommand) -> int:
    """Keep the node until Ctrl-C, SIGTERM or `stop --node`, then end it; return the exit code.

    Raises:
        UsageError: The node runs already, there is no token, or Ray is not installed.
    """
    node = command.environment[NODE_MARK]
    if os.environ.get(NODE_MARK) != node:  # the kernel must show the mark
        again = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, again, {**os.environ, NODE_MARK: node})  # noqa: S606
    refuse_a_second(node)
    nodes.ray_start(command)  # fails where Ray is not installed
    nodes.get_token(command)
    kept = _Kept(command, node)
    kept.interrupts.install()
    pause_s = _FIRST_PAUSE_S / 2
    try:
        while True:
            kept.wait_for_head()
            began_s = time.monotonic()
            why = "" if kept.is_asked_to_end() else kept.run_once()
            if kept.is_asked_to_end():
                break
            nodes.end(nodes.processes_of(node), _GRACE_S)  # a worker may still hold its card
            is_steady = time.monotonic() - began_s > _STEADY_S
            pause_s = _FIRST_PAUSE_S if is_steady else min(2 * pause_s, _LONGEST_PAUSE_S)
            kept.say(f"{why}; next try after {pause_s:.0f} s")
            kept.sleep(pause_s)
    finally:
        kept.say("ending")
        nodes.end(nodes.processes_of(node), _GRACE_S)
        kept.interrupts.restore()
    return 130


def refuse_a_second(node: str) -> None:
    """Raise a UsageError if the node runs on this PC already."""
    if family := nodes.processes_of(node):
        pids = ", ".join(
            str(process.pid) for process in sorted(family, key=lambda one: one.pid)[:3]
        )
        raise UsageError(
            f"{node} runs here already (process {pids}); to end it: python -m orchestrator stop "
            f"--node {node}"
        )


class _Kept:
    """The node that is kept, and what was said of it last."""

    def __init__(self, command: NodeCommand, node: str) -> None:
        self.interrupts = Interrupts()
        self._command, self._node, self._said = command, node, ""
        self._raylet: psutil.Process | None = None

    def is_asked_to_end(self) -> bool:
        """Whether Ctrl-C or SIGTERM has come."""
        return self.interrupts.asked

    def wait_for_head(self) -> None:
        """Wait until the head can be reached; it itself is not waited for."""
        while not self.is_asked_to_end() and (why := self._unreachable()):
            self.say(f"waiting: {why}")
            self.sleep(_LOOK_EVERY_S)

    def run_once(self) -> str:
        """Start the node, and return why it is to be started again."""
        argv, environment = nodes.ray_start(self._command)
        started = subprocess.Popen(  # noqa: S603 - the command that `up` prints
            [*argv, "--block"],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is for this process, which ends it
        )
        self.say("starting")
        is_member, was_member, begun_s = False, False, time.monotonic()
        while not self.is_asked_to_end():
            # Ray takes a raylet that was asked to end for a good end, and blocks on.
            is_over = was_member and self._raylet is not None and nodes.has_ended(self._raylet)
            if started.poll() is not None or is_over:
                return "Ray has ended on this PC"
            if why := self._unreachable() if was_member else "":
                is_member = False
                self.say(f"up, but {why}")
            elif not is_member:
                answer = self._ask()
                is_member = answer == ray_programs.MEMBER
                if answer == ray_programs.NOT_A_MEMBER and was_member:
                    return "the head has declared this node dead, or has begun a new cluster"
                if not was_member and time.monotonic() - begun_s > _LONGEST_START_S:
                    return f"it has not joined the cluster in {_LONGEST_START_S:.0f} s"
                was_member = was_member or is_member
                self.sleep(0.0 if is_member else _ASK_EVERY_S)
            else:
                self.say(f"up, a member of the cluster of {self._command.head_address}")
            self.sleep(_LOOK_EVERY_S)
        return ""

    def sleep(self, seconds: float) -> None:
        """Wait, but not when it is time to end."""
        until_s = time.monotonic() + seconds
        while not self.is_asked_to_end() and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.2))

    def say(self, text: str) -> None:
        """Print a line where something has changed; a node is kept without a reader, too."""
        if text != self._said:
            self._said = text
            with suppress(OSError):
                line = one_line(f"{time.strftime('%H:%M:%S')} {self._node}: {text}")
                print(line, flush=True)  # noqa: T201 - the terminal, or the log of the unit

    def _unreachable(self) -> str:
        try:
            reach(self._command.head_address)
        except NoClusterError as error:
            return "" if self._command.is_head else str(error)
        return ""

    def _ask(self) -> int | None:
        """Ask the head whether the node is a member; `None`: it has no raylet yet."""
        for process in nodes.processes_of(self._node):
            with suppress(psutil.Error):  # it has ended
                words = process.cmdline() if process.name() == "raylet" else ()
                for word in (word for word in words if word.startswith("--node_id=")):
                    self._raylet = process
                    asked = ["is-member", self._command.head_address, word.partition("=")[2]]
                    return subprocess.run(  # noqa: S603 - our own module
                        [sys.executable, "-m", ray_programs.__name__, *asked],
                        env={**os.environ, **self._command.environment},
                        stdin=subprocess.DEVNULL,
                        capture_output=True,
                        check=False,
                    ).returncode
        return None
