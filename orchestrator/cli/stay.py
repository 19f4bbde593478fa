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
    make_ready(command)
    kept = _Kept(command)
    kept.interrupts.install()
    pause_s = _FIRST_PAUSE_S / 2
    try:
        while kept.sees_head():
            began_s = time.monotonic()
            why = kept.run_once()
            nodes.end(nodes.processes_of(node), _GRACE_S)  # a worker may still hold its card
            is_steady = time.monotonic() - began_s > _STEADY_S
            pause_s = _FIRST_PAUSE_S if is_steady else min(2 * pause_s, _LONGEST_PAUSE_S)
            if not kept.interrupts.asked:
                kept.say(f"{why}; next try after {pause_s:.0f} s")
                kept.sleep(pause_s)
    finally:
        kept.say("ending")
        nodes.end(nodes.processes_of(node), _GRACE_S)
        kept.interrupts.restore()
    return 130


def make_ready(command: NodeCommand) -> None:
    """Get the token of a node that is to be kept.

    Raises:
        UsageError: The node runs on this PC already, there is no token, or Ray is not installed.
    """
    node = command.environment[NODE_MARK]
    if family := nodes.processes_of(node):
        pids = ", ".join(map(str, sorted(process.pid for process in family)[:3]))
        raise UsageError(
            f"{node} runs here already (process {pids}); to end it: python -m orchestrator stop "
            f"--node {node}"
        )
    nodes.ray_start(command)  # fails where Ray is not installed
    nodes.get_token(command)


class _Kept:
    """The node that is kept, and what was said of it last."""

    def __init__(self, command: NodeCommand) -> None:
        self.interrupts = Interrupts()
        self._command, self._node = command, command.environment[NODE_MARK]
        self._said = ""

    def sees_head(self) -> bool:
        """Wait until the head can be reached; false: this was asked to end before."""
        while not self.interrupts.asked and (why := self._unreachable()):
            self.say(f"waiting: {why}")
            self.sleep(_LOOK_EVERY_S)
        return not self.interrupts.asked

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
        begun_s, raylet, was_member, is_member = time.monotonic(), None, False, False
        while not self.interrupts.asked:
            # Ray takes a raylet that was asked to end for a good end, and blocks on.
            if started.poll() is not None or (raylet is not None and nodes.has_ended(raylet)):
                return "Ray has ended on this PC"
            if was_member and (why := self._unreachable()):
                is_member = False
                self.say(f"up, but {why}")
            elif not is_member:
                raylet = self._raylet()
                answer = None if raylet is None else self._ask(raylet)
                was_member |= (is_member := answer == ray_programs.MEMBER)
                if answer == ray_programs.NOT_A_MEMBER and was_member:
                    return "the head has declared this node dead, or has begun a new cluster"
                if not was_member and time.monotonic() - begun_s > _LONGEST_START_S:
                    return f"it has not joined the cluster in {_LONGEST_START_S:.0f} s"
                self.sleep(0.0 if is_member else _ASK_EVERY_S)
            else:
                self.say(f"up, a member of the cluster of {self._command.head_address}")
            self.sleep(_LOOK_EVERY_S)
        return ""

    def sleep(self, seconds: float) -> None:
        """Wait, but not when it is time to end."""
        until_s = time.monotonic() + seconds
        while not self.interrupts.asked and (left_s := until_s - time.monotonic()) > 0:
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

    def _raylet(self) -> psutil.Process | None:
        named = (one for one in nodes.processes_of(self._node) if nodes.name_of(one) == "raylet")
        return next(named, None)

    def _ask(self, raylet: psutil.Process) -> int | None:
        """Ask the head whether it counts the node in, as `ray_programs` answers; `None`: its raylet
        has ended.
        """
        try:
            words = (word.partition("=") for word in raylet.cmdline())
            node_id = next(value for key, _, value in words if key == "--node_id")
        except (psutil.Error, StopIteration):
            return None
        asked = ["is-member", self._command.head_address, node_id]
        return subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", ray_programs.__name__, *asked],
            env={**os.environ, **self._command.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        ).returncode
