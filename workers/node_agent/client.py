"""Starts an agent process, reads its outcome, and ends it. Does not know what it does."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from workers.node_agent.protocol import AgentOrders, AgentOutcome


class AgentError(Exception):
    """The agent process did not answer; says what it said instead."""


class AgentClient:
    """An agent process that undoes everything as soon as this object's process is gone."""

    def __init__(self, orders: AgentOrders) -> None:
        """Start the process; `outcome` waits until it has carried out its orders.

        Raises:
            OSError: No process can be started here.
        """
        root = str(Path(__file__).parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "workers.node_agent.agent"],  # -P: whatever the folder it is started in holds
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # an unread line must not be flushed when the pipe is closed
        )
        self._is_over = False
        with contextlib.suppress(BrokenPipeError):  # `outcome` says so
            self._write(orders.to_json())
        self._process.wait()  # the process that we started has left another behind, and is gone

    def outcome(self) -> AgentOutcome:
        """Wait for the first line, and return it.

        Raises:
            AgentError: There is none.
        """
        line = self._read()
        if not line:
            raise AgentError("the agent process has ended without an answer")
        return AgentOutcome.from_json(line)

    def end(self) -> tuple[str, ...]:
        """Have it undo everything, wait for that, and return what was put back and what could not be.

        Nothing is told the second time.
        """
        if self._is_over:
            return ()
        self._is_over = True
        with contextlib.suppress(BrokenPipeError):
            self._write("end")
        self._process.stdin.close()  # type: ignore[union-attr]  # a pipe, as asked for
        line = self._read()
        self._process.stdout.close()  # type: ignore[union-attr]
        return tuple(json.loads(line)) if line else ()

    def _write(self, line: str) -> None:
        self._process.stdin.write(f"{line}\n".encode())  # type: ignore[union-attr]  # a pipe, as asked for

    def _read(self) -> str:
        return self._process.stdout.readline().decode()  # type: ignore[union-attr]
