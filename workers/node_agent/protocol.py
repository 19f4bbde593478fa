"""What is to be done to a node for the length of a run, what came of it, and the agent process that
does it.

Covers the words between the head and an agent process, as lines of JSON, and starting and ending
the process. Does not do any of it (`agent.py` does).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from workers.node_agent.card_settings import MEMORY_OFFSET, POWER_LIMIT
from workers.settings import FakeSensors


class AgentError(Exception):
    """The agent process did not answer; says what it said instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """What was done to a node. A problem is a sentence that names the cause and what helps."""

    pipe_directory: str | None = None
    """Where the workers of this node find MPS; `None` where it is not on."""
    mps_problem: str | None = None
    """Why MPS was asked for and is not on."""
    power_problem: str | None = None
    """Why a power limit or memory offset was not set; then every card is as it was before."""
    notes: tuple[str, ...] = ()
    """What was done, and what an earlier run had left behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrders:
    """What one node is to have done to it until the run ends."""

    node: str
    run_id: str
    """Names the folder of an own MPS daemon: an agent that is started again finds the same place.
    """
    card_count: int
    """How many cards the node lends to the cluster: the first ones that CUDA_VISIBLE_DEVICES leaves
    visible.
    """
    cards: tuple[str, ...] = ()
    """The cards themselves, as UUIDs or indices in the order of the PCI bus; empty: as `card_count`
    says.
    """
    mps: bool = False
    """See to it that an MPS control daemon runs."""
    power_limit_w: float | None = None
    """Set this limit on every card, and put back what was there; `None` leaves the limits alone."""
    memory_offset_mhz: int | None = None
    """The same with an offset of the memory's transfer rate."""
    fake: FakeSensors | None = None
    """Instead of the driver's NVML."""

    @property
    def card_settings(self) -> dict[str, float]:
        """What is to be set on every card, by the keys of `card_settings.SETTINGS`."""
        settings = {POWER_LIMIT: self.power_limit_w, MEMORY_OFFSET: self.memory_offset_mhz}
        return {setting: value for setting, value in settings.items() if value is not None}

    def failed(self, why: str) -> AgentOutcome:
        """Return the outcome if nothing of this was done."""
        text = f"{self.node}: {why}"
        return AgentOutcome(
            mps_problem=text if self.mps else None,
            power_problem=text if self.card_settings else None,
        )


Message = TypeVar("Message", AgentOrders, AgentOutcome)


def to_line(message: AgentOrders | AgentOutcome) -> str:
    """Return a message as one line, without its end."""
    return json.dumps(asdict(message))


def from_line(kind: type[Message], line: str) -> Message:
    """Read what `to_line` wrote.

    Raises:
        ValueError: It is something else.
    """
    data = json.loads(line)
    if not isinstance(data, dict) or set(data) != {field.name for field in fields(kind)}:
        raise ValueError(f"this is no {kind.__name__}: {line}")
    return kind(**{name: _revived(value) for name, value in data.items()})


def _revived(value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    if isinstance(value, dict):
        return FakeSensors(**value)
    return tuple(value) if isinstance(value, list) else value


class AgentClient:
    """An agent process that undoes everything as soon as this object's process is gone."""

    def __init__(self, orders: AgentOrders) -> None:
        """Start the process; `outcome` waits until it has carried out its orders.

        Raises:
            OSError: No process can be started here.
        """
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "workers.node_agent.agent",
            ],  # -P: whatever the folder it is started in holds
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # an unread line must not be flushed when the pipe is closed
        )
        self._input: Any = process.stdin
        self._output: Any = process.stdout
        self._write(to_line(orders))
        process.wait()  # the process that we started has left another behind, and is gone

    def outcome(self) -> AgentOutcome:
        """Wait for the first line, and return it.

        Raises:
            AgentError: There is none.
        """
        line = self._output.readline().decode()
        if not line:
            raise AgentError("the agent process has ended without an answer")
        return from_line(AgentOutcome, line)

    def end(self) -> tuple[str, ...]:
        """Have it undo everything, wait for that, and return what was put back and what could not
        be.

        Nothing is told the second time.
        """
        if self._input.closed:
            return ()
        self._write("end")
        self._input.close()
        with self._output as output:
            return tuple(json.loads(output.readline() or "[]"))

    def _write(self, line: str) -> None:
        with suppress(BrokenPipeError):  # it has ended, and the next line to be read is missing
            self._input.write(f"{line}\n".encode())
