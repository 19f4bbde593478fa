"""The engine of a slot as a program of its own: `python -m workers.engine SPEC.json`.

A keeper starts it with a channel, on which it tells how it is and takes orders. It works on by
itself, whatever the other end does, and ends when that is closed. Started by hand, without a
channel, it prints what it would tell, until its work is done. Decides nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import itertools
import os
import pickle
import select
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from workers.engine.account import no_orders
from workers.engine.spec_file import read_spec
from workers.host.cuda_environment import set_for_cuda, workspace_of
from workers.host.processes import ENGINE_NAME
from workers.keeper import channel, processes
from workers.keeper.task import CHANNEL
from workers.messages import NO_ORDERS, Orders, Status, Verdict, WorkerEvent

_LINE_BUFFERED: Final = 1  # _IOLBF of glibc and musl (stdio.h)

#: Events that wait for a keeper that does not read; the newest are kept.
_MOST_EVENTS: Final = 1_000
_EVENTS_BYTES: Final = channel.MOST_BYTES // 2
#: A text in a status, or in one of its events.
_MOST_CHARS: Final = 8_192


class Channel:
    """The orders that come, and the statuses that go, where a keeper has started the engine."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._events: list[WorkerEvent] = []
        self.orders: Orders | None = None
        """The newest; `None` before the first."""
        self.is_closed = False

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for orders that change something; say whether there are some, or the
        channel is closed.
        """
        until_s = time.monotonic() + seconds
        while not self.is_closed:
            left_s = max(0.0, until_s - time.monotonic())
            if not select.select([self._end], [], [], left_s)[0]:
                return False
            if self._receive():
                return True
        return True

    def tell(self, status: Status) -> None:
        """Send it, unless the other end is busy: the next makes up for it, and events wait."""
        with contextlib.suppress(MemoryError):
            self._events += map(_cut, status.events)
            del self._events[:-_MOST_EVENTS]
            self._send(status)

    def _send(self, status: Status) -> None:
        short = replace(status, reason=status.reason[:_MOST_CHARS])
        while True:
            count = _fitting(self._events)
            told = replace(short, events=tuple(self._events[:count]))
            if not channel.send(self._end, told):
                return
            del self._events[:count]
            if not self._events:
                return

    def _receive(self) -> bool:
        """Take in what has come; say whether it changes anything."""
        before = self.orders
        try:
            for orders in channel.receive_all(self._end):
                self.orders = replace(orders, actor=None, begin=None, heard=0, kept=None)
        except channel.ClosedError:
            self.is_closed = True
        return self.is_closed or self.orders != before


class Terminal:
    """In place of a channel, where a person has started the engine."""

    orders: Orders | None = NO_ORDERS
    is_closed = False
    wait = staticmethod(no_orders)

    def tell(self, status: Status) -> None:
        """Print how it is as a line, after what has happened. With a verdict all is over."""
        self.is_closed = status.verdict is not Verdict.OK
        lines = [
            f"{event.name}: " + ", ".join(f"{name} {text}" for name, text in event.detail.items())
            for event in status.events
        ]
        if status.errors_in_a_row:
            lines.append(status.error or "")
        counts = status.counts
        lines.append(
            f"{status.state}: {counts.steps_ok} steps, {counts.steps_oom} out of memory, size "
            f"{status.size}, batch {status.batch}: {status.reason or 'it works'}"
        )
        sys.stdout.write("".join(f"{line}\n" for line in lines))


def main() -> None:
    """Work until the other end of the channel is closed, or the work is done."""
    # Before torch is loaded: a SIGUSR1 has the engine print where it stands.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False, chain=False)
    processes.prctl(processes.PR_SET_NAME, ENGINE_NAME.encode(), 0, 0, 0)
    _print_by_lines()
    number = os.environ.pop(CHANNEL, None)
    other: Channel | Terminal = Terminal()
    if number is not None:
        # Ctrl-C is the head's: a KeyboardInterrupt in this process is the workload's own error.
        signal.signal(signal.SIGINT, lambda _number, _frame: None)
        os.set_inheritable(int(number), False)  # what this process starts does not hold it open
        other = Channel(socket.socket(fileno=int(number)))
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if len(sys.argv) == 1:
        sys.exit("type: python -m workers.engine SPEC.json")
    start = read_spec(Path(sys.argv[-1]))  # a fork has the name of its package before it
    set_for_cuda(os.environ, workspace_of(start.spec.workload.settings))
    # What CUDA reads from the environment must be there before torch is loaded.
    from workers.engine.engine import Engine  # noqa: PLC0415

    engine = Engine(start.spec, start.begin, start.incarnation)
    obeyed: Orders | None = None
    other.tell(engine.status())
    while not other.is_closed:
        orders = other.orders
        if orders is None:  # what it may hold is not known
            other.wait(start.spec.poll_s)
            continue
        if engine.is_open:
            # The first step under other orders is told at once. There is none while the head lends
            # nothing.
            is_told = orders != obeyed and orders.lease_bytes != 0
            duration_s = 0.0 if is_told else start.spec.poll_s
            status, obeyed = engine.turn(orders, duration_s, other.wait), orders
        else:
            status = engine.open(orders)
        other.tell(status)
        if status.is_held or status.verdict is not Verdict.OK:
            other.wait(start.spec.poll_s)


def _fitting(events: list[WorkerEvent]) -> int:
    """Return how many of the first of them one message can carry; each alone can be."""
    sizes_bytes = itertools.accumulate(len(pickle.dumps(event)) for event in events)
    return sum(size_bytes <= _EVENTS_BYTES for size_bytes in sizes_bytes)


def _cut(event: WorkerEvent) -> WorkerEvent:
    detail = {
        name: value[:_MOST_CHARS] if isinstance(value, str) else value
        for name, value in event.detail.items()
    }
    cut = replace(event, detail=detail)
    return cut if len(pickle.dumps(cut)) <= _EVENTS_BYTES else replace(event, detail={})


def _print_by_lines() -> None:
    """Have Python and the C library hand on each line: what they still held when this process dies
    would be lost.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        library = ctypes.CDLL(None)
        library.setvbuf(
            ctypes.c_void_p.in_dll(library, "stdout"), None, _LINE_BUFFERED, ctypes.c_size_t(0)
        )


if __name__ == "__main__":
    main()
