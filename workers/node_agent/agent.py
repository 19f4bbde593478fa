"""The agent of one node: sets what a run needs on it, and undoes all of it when the process that
started it has ended.

    python -m workers.node_agent.agent         one line of orders in, later `end`; the outcome out,
                                               then the end
    python -m workers.node_agent.agent --undo  put back what runs that were killed have left on this
                                               machine, and say so

It detaches from the process that starts it, because Ray ends the children of a worker with the
worker. A pipe still connects the two. Closing the pipe, `end`, SIGTERM, SIGHUP and SIGINT all mean:
undo, in reverse order, and exit. If the agent is killed, the next agent on the machine undoes its
changes, by the file that it wrote before anything was changed (`JournalEntry`). Knows neither torch
nor Ray, and decides nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import re
import select
import signal
import socket
import sys
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import pynvml

from workers.files import locked, read_small, replace_whole
from workers.host.processes import is_alive, start_time
from workers.learned_limits import default_path
from workers.node_agent import card_settings, mps
from workers.node_agent.card_settings import CardChange, CardSettingError
from workers.node_agent.mps import Daemon
from workers.node_agent.protocol import AgentOrders, AgentOutcome, from_line, to_line
from workers.nvml import queries
from workers.nvml.fake import load

_SCHEMA: Final = 2
_FOLDER: Final = "kept"
_MOST_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """What one agent has changed, or was about to."""

    node: str
    pid: int
    started: str | None
    """When the agent began, as `processes.start_time` reports it."""
    host: str
    """A home folder may be shared by machines."""
    nvml: str | None
    """Script of a fake NVML; `None` is the driver's."""
    changes: tuple[CardChange, ...] = ()
    daemon: Daemon | None = None

    @property
    def is_guarded(self) -> bool:
        """Say whether the agent is there to put things back itself."""
        return is_alive(self.pid, self.started)


def folder() -> Path:
    """Return where the files are: beside the learned limits."""
    return default_path().parent / _FOLDER


def mine(node: str, nvml: str | None) -> JournalEntry:
    """Return the record of this process, with nothing in it yet."""
    pid = os.getpid()
    return JournalEntry(
        node=node, pid=pid, started=start_time(pid), host=socket.gethostname(), nvml=nvml
    )


def write(entry: JournalEntry) -> None:
    """Write a record, atomically and durably, readable only by this user.

    Raises:
        OSError: It cannot be written; nothing must be changed then.
    """
    path = _path(entry)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_whole(path, json.dumps({"schema": _SCHEMA, **asdict(entry)}))


def remove(entry: JournalEntry) -> None:
    """Forget a record: all of it is put back."""
    _path(entry).unlink(missing_ok=True)


def others(nvml: str | None) -> tuple[JournalEntry, ...]:
    """Return the records of other agents on this machine and NVML, guarded or not.

    What is no record is left alone.
    """
    entries = []
    for path in sorted(folder().glob("*.json")):
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            entry = _read(path)
            is_mine = entry.pid == os.getpid() and entry.started == start_time(os.getpid())
            if entry.host == socket.gethostname() and entry.nvml == nvml and not is_mine:
                entries.append(entry)
    return tuple(entries)


def one_at_a_time(patience_s: float) -> AbstractContextManager[None]:
    """Keep other agents of this user from changing things meanwhile.

    `OSError` if the lock cannot be had.
    """
    return locked(folder() / "lock", patience_s)


def _path(entry: JournalEntry) -> Path:
    return folder() / f"{entry.host}-{entry.pid}-{entry.started}.json"


def _read(path: Path) -> JournalEntry:
    told = json.loads(read_small(path, _MOST_BYTES))
    if told.pop("schema") != _SCHEMA:
        raise ValueError("written by another version")
    changes = tuple(CardChange(**change) for change in told.pop("changes"))
    daemon = told.pop("daemon")
    return JournalEntry(
        **told, changes=changes, daemon=None if daemon is None else Daemon(**daemon)
    )


_ENDINGS: Final = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGINT})
#: Another agent is done in less, even if MPS has to be forced.
_LOCK_S: Final = 45.0
#: So long an agent that is in the way may take to begin to end: that of a run that is over, or of
#: this one.
_OTHER_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.1


class NodeAgent:
    """What one agent has done, and how it undoes it."""

    def __init__(self, orders: AgentOrders) -> None:
        self._orders = orders
        self._kept = mine(orders.node, None if orders.fake is None else orders.fake.script_path)

    def do(self) -> AgentOutcome:
        """Do what the orders say, and undo what an earlier agent could not. NVML has to be open.

        Never raises for what a machine has or lacks. What one card refuses is set on none.
        """
        until_s = time.monotonic() + _OTHER_S
        try:
            while True:
                with one_at_a_time(_LOCK_S):
                    other = self._in_the_way()
                    if other is None or time.monotonic() > until_s:
                        return self._do(other)
                time.sleep(
                    _LOOK_EVERY_S
                )  # of this run, and about to end: its actor was started again
        except OSError as error:
            return self._orders.failed(
                f"nothing is changed that could not be written down: {error}"
            )

    def undo(self) -> tuple[str, ...]:
        """Undo everything, last things first; return what was put back, and what could not be."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(
                OSError
            ):  # better undone at the same time as another agent than not at all
                stack.enter_context(one_at_a_time(_LOCK_S))
            return _undo(self._kept)

    def _in_the_way(self) -> JournalEntry | None:
        """Return the record of a living agent that keeps what this one is to change."""
        uuids = {card.uuid for card in self._identities()} if self._orders.card_settings else set()
        folder = self._daemon().folder if self._orders.mps else None
        with_agent = [other for other in others(self._kept.nvml) if other.is_guarded]
        by_card = (
            other for other in with_agent if uuids & {change.uuid for change in other.changes}
        )
        by_daemon = (
            other
            for other in with_agent
            if other.daemon is not None and other.daemon.folder == folder
        )
        return next(itertools.chain(by_card, by_daemon), None)

    def _do(self, other: JournalEntry | None) -> AgentOutcome:
        pipes: str | None = None
        notes = list(undo_leftovers(self._kept.nvml))
        try:
            for setting, value in self._orders.card_settings.items():
                notes += self._set_cards(setting, value, other)
            if self._orders.mps:
                pipes, note = self._share_cards()
                notes.append(note)
        except CardSettingError as error:
            return AgentOutcome(power_problem=str(error), notes=(*notes, *_undo(self._kept)))
        except mps.MpsError as error:
            return AgentOutcome(mps_problem=str(error), notes=tuple(notes))
        return AgentOutcome(pipe_directory=pipes, notes=tuple(notes))

    def _set_cards(self, setting: str, value: float, other: JournalEntry | None) -> list[str]:
        node, kind = self._orders.node, card_settings.SETTINGS[setting]
        changes = card_settings.plan_changes(node, self._cards(), setting, value)
        if other is not None and other.changes:
            raise CardSettingError(
                f"{node}: another run has set a {kind.title} on its cards (the agent is process "
                f"{other.pid}); try "
                f"again when that run has ended"
            )
        if not changes:
            return [f"{node}: {kind.title} {value:g} {kind.unit}, as it was"]
        self._write(replace(self._kept, changes=(*self._kept.changes, *changes)))
        return [card_settings.apply(node, change) for change in changes]

    def _share_cards(self) -> tuple[str, str]:
        """See to it that an MPS daemon runs.

        Return its pipe directory, and what was done in words.
        """
        node = self._orders.node
        obstacle = mps.obstacle(
            system=sys.platform, kernel=platform.release(), cards=self._identities()
        )
        if obstacle is not None:
            raise mps.MpsError(obstacle)
        pipes = mps.running()
        if pipes is not None:
            return pipes, f"{node}: the MPS daemon in {pipes} is used, and left running"
        daemon = self._daemon()
        self._write(replace(self._kept, daemon=daemon))
        try:
            daemon = mps.start(daemon)
        except mps.MpsError:
            self._write(replace(self._kept, daemon=None))
            raise
        self._write(replace(self._kept, daemon=daemon))
        return (
            daemon.pipe_directory,
            f"{node}: an MPS daemon runs for this run, process {daemon.pid}",
        )

    def _daemon(self) -> mps.Daemon:
        return mps.new_daemon(
            re.sub(r"[^A-Za-z0-9]", "-", f"{self._orders.node[:16]}-{self._orders.run_id[-8:]}")
        )

    def _write(self, record: JournalEntry) -> None:
        write(record)
        self._kept = record

    def _identities(self) -> list[queries.CardIdentity]:
        names = self._cards()
        return [card for card in queries.cards() if str(card.index) in names or card.uuid in names]

    def _cards(self) -> list[str]:
        if self._orders.cards:
            return list(self._orders.cards)
        visible = [
            name.strip()
            for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            if name.strip()
        ]
        return (visible or [str(index) for index in range(self._orders.card_count)])[
            : self._orders.card_count
        ]


def undo_leftovers(nvml: str | None = None) -> tuple[str, ...]:
    """Undo what agents that were killed have left on this machine and NVML, which is open.

    Return what was done.
    """
    return tuple(
        f"left by a run that was killed: {sentence}"
        for other in others(nvml)
        if not other.is_guarded
        for sentence in _undo(other)
    )


def _undo(record: JournalEntry) -> tuple[str, ...]:
    """Undo a record, last things first, and forget it unless something is still to be put back."""
    told: list[str] = []
    pending: list[card_settings.CardChange] = []
    if record.daemon is not None:
        mps.end(record.daemon)
        told.append(f"{record.node}: the MPS daemon of the run has ended")
    for change in reversed(record.changes):
        try:
            sentence = card_settings.restore(record.node, change)
            told += [] if sentence is None else [sentence]
        except CardSettingError as error:
            told.append(str(error))
            pending.append(change)
    try:
        if pending:
            write(replace(record, daemon=None, changes=tuple(reversed(pending))))
        else:
            remove(record)
    except OSError as error:
        told.append(f"{record.node}: {error}")
    return tuple(told)


def _leave_parents() -> None:
    """Detach from the parent, into a session of its own; the pipes stay."""
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")


def _tell(line: str) -> None:
    """Write a line to the process that started this one, which may have ended."""
    with contextlib.suppress(OSError):
        os.write(1, f"{line}\n".encode())


def _read_line() -> str:
    """Read one line of standard input and nothing behind it, so that `select` sees whether there is
    more.
    """
    line = bytearray()
    while (byte := os.read(0, 1)) not in {b"", b"\n"}:
        line += byte
    return line.decode()


def _bell() -> int:
    """Turn the signals that mean the end into bytes in a pipe, so that nothing is interrupted;
    return its other end.

    What is started here later has them as usual: a handler does not outlive exec(2).
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _ENDINGS:
        signal.signal(number, lambda _number, _frame: None)
    return reader


def _undo_by_hand() -> str:
    """Undo what agents that were killed have left on this machine.

    Return what was done, in lines.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"the driver of this machine does not answer: {error}"
    with one_at_a_time(_LOCK_S):
        return "\n".join(undo_leftovers()) or "nothing is left of runs that were killed"


def main() -> None:
    """Be the agent of a node, from its orders to its end."""
    if sys.argv[1:] == ["--undo"]:
        _tell(_undo_by_hand())
        return
    _leave_parents()
    bell = _bell()
    orders = from_line(AgentOrders, _read_line())
    if orders.fake is not None:
        load(orders.fake)
    try:
        pynvml.nvmlInit()  # stays open until the end
    except pynvml.NVMLError as error:
        _tell(to_line(orders.failed(f"its driver does not answer: {error}")))
        return
    node_agent = NodeAgent(orders)
    try:
        _tell(to_line(node_agent.do()))
        select.select([0, bell], [], [])
    finally:
        _tell(json.dumps(node_agent.undo()))


if __name__ == "__main__":
    main()
