"""The engine of a slot as a program of its own: `python -m workers.engine SPEC.json`.

A keeper starts it with a channel. On this channel the engine sends statuses and receives orders. It
keeps working if the other end is busy, and ends when the channel is closed. Started by hand,
without a channel, it prints its statuses until its work is done. Decides nothing.
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

#: Most events that wait while the keeper does not read; the oldest are dropped.
_MOST_EVENTS: Final = 1_000
_EVENTS_BYTES: Final = channel.MOST_BYTES // 2
#: Longest text in a status, or in one of its events.
_MOST_CHARS: Final = 8_192


class Channel:
    """Receives orders and sends statuses, if a keeper has started the engine."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._events: list[WorkerEvent] = []
        self.orders: Orders | None = None
        """The newest orders; `None` before the first."""
        self.is_closed = False

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for orders that differ from the present ones; return whether some
        came or the channel was closed.
        """
        until_s = time.monotonic() + seconds
        while not self.is_closed:
            left_s = max(0.0, until_s - time.monotonic())
            if not select.select([self._end], [], [], left_s)[0]:
                return False
            if self._receive():
                return True
        return True

    def report(self, status: Status) -> None:
        """Send a status; if the other end is busy, keep its events for the next one."""
        with contextlib.suppress(MemoryError):
            self._events += map(_shortened, status.events)
            del self._events[:-_MOST_EVENTS]
            self._send(status)

    def _send(self, status: Status) -> None:
        short = replace(status, reason=status.reason[:_MOST_CHARS])
        while True:
            count = _fitting(self._events)
            message = replace(short, events=tuple(self._events[:count]))
            if not channel.send(self._end, message):
                return
            del self._events[:count]
            if not self._events:
                return

    def _receive(self) -> bool:
        """Read all waiting orders; return whether they differ, or the channel was closed."""
        before = self.orders
        try:
            for orders in channel.receive_all(self._end):
                self.orders = replace(orders, actor=None, begin=None, heard=0, kept=None)
        except channel.ClosedError:
            self.is_closed = True
        return self.is_closed or self.orders != before


class Terminal:
    """Prints statuses, if a person has started the engine by hand, without a channel."""

    orders: Orders | None = NO_ORDERS
    is_closed = False
    wait = staticmethod(no_orders)

    def report(self, status: Status) -> None:
        """Print the events and one line of status; a verdict other than OK ends the program."""
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
    """Run the engine until the channel is closed or, without one, the work is done."""
    # Before torch is loaded: on SIGUSR1 the engine prints its Python stack.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False, chain=False)
    processes.prctl(processes.PR_SET_NAME, ENGINE_NAME.encode(), 0, 0, 0)
    _print_by_lines()
    number = os.environ.pop(CHANNEL, None)
    link: Channel | Terminal = Terminal()
    if number is not None:
        # The head handles Ctrl-C; a KeyboardInterrupt in this process is an error of the workload.
        signal.signal(signal.SIGINT, lambda _number, _frame: None)
        os.set_inheritable(int(number), False)  # child processes must not hold it open
        link = Channel(socket.socket(fileno=int(number)))
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if len(sys.argv) == 1:
        sys.exit("type: python -m workers.engine SPEC.json")
    start = read_spec(Path(sys.argv[-1]))  # in a fork the package's name precedes it
    set_for_cuda(os.environ, workspace_of(start.spec.workload.settings))
    # CUDA's environment variables must be set before torch is loaded.
    from workers.engine.engine import Engine  # noqa: PLC0415

    engine = Engine(start.spec, start.begin, start.incarnation)
    obeyed: Orders | None = None
    link.report(engine.status())
    while not link.is_closed:
        orders = link.orders
        if orders is None:  # it does not know how much memory it may hold
            link.wait(start.spec.poll_s)
            continue
        if engine.is_open:
            # The first step under changed orders is reported at once. With a lease of 0 bytes there
            # is no step.
            is_reported = orders != obeyed and orders.lease_bytes != 0
            duration_s = 0.0 if is_reported else start.spec.poll_s
            status, obeyed = engine.turn(orders, duration_s, link.wait), orders
        else:
            status = engine.open(orders)
        link.report(status)
        if status.is_held or status.verdict is not Verdict.OK:
            link.wait(start.spec.poll_s)


def _fitting(events: list[WorkerEvent]) -> int:
    """Return how many of the oldest events fit into one message; every single event fits."""
    sizes_bytes = itertools.accumulate(len(pickle.dumps(event)) for event in events)
    return sum(size_bytes <= _EVENTS_BYTES for size_bytes in sizes_bytes)


def _shortened(event: WorkerEvent) -> WorkerEvent:
    detail = {
        name: value[:_MOST_CHARS] if isinstance(value, str) else value
        for name, value in event.detail.items()
    }
    short = replace(event, detail=detail)
    return short if len(pickle.dumps(short)) <= _EVENTS_BYTES else replace(event, detail={})


def _print_by_lines() -> None:
    """Make Python and C flush each line: buffered output is lost when a process dies."""
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
