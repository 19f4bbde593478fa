"""The program of a slot, kept: what an engine of ours and a program of the user have in common.

The program is a process of its own, which ends and is started again without this one. Imports no
torch, decides nothing, and waits for nothing longer than it is asked to.
"""

from __future__ import annotations

import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from workers.host.processes import oom_kills
from workers.keeper.kept import Kept
from workers.keeper.task import Task
from workers.messages import Orders, PrintedOutput, Status, WorkerEvent
from workers.settings import Scalar, WorkerSpec

#: A keeper answers in less than a millisecond; one that is stopped must not hold up the poll.
_ANSWER_S: Final = 0.2


class KeptProgram(ABC):
    """The program of one slot, and those after it."""

    def __init__(self, spec: WorkerSpec, folder: Path) -> None:
        """Start nothing: the first orders of an incarnation do. It is kept in `folder`."""
        self._spec, self._folder = spec, folder
        self._kept: Kept | None = None
        self._has_news = False
        self._events: list[WorkerEvent] = []
        self._output: PrintedOutput | None = None
        self._oom_kills = 0

    def poll(self, orders: Orders, wait_s: float) -> Status:
        """See to what is ordered, and return how the program is: at once when there is news of it,
        else after `wait_s`.
        """
        self._follow(orders)
        until_s = time.monotonic() + (0.0 if self._is_hurried(orders) else wait_s)
        while not self._has_news:
            left_s = max(0.0, until_s - time.monotonic())
            if self._kept is None:
                time.sleep(left_s)
            else:
                self._listen(self._kept, left_s)
            if time.monotonic() >= until_s:
                break
        self._has_news = False
        if self._kept is not None and self._kept.pid is not None:
            self._take_output(self._kept)
        status = self._told(orders)
        events, self._events = tuple(self._events), []
        output, self._output = self._output, None
        return replace(status, events=events, output=output)

    @abstractmethod
    def _follow(self, orders: Orders) -> None:
        """Start the program or have it end, as far as that is wanted."""

    @abstractmethod
    def _listen(self, kept: Kept, wait_s: float) -> None:
        """Wait at most so long for news of the program, and take them in."""

    @abstractmethod
    def _told(self, orders: Orders) -> Status:
        """Return how the program is, but for what has happened and was printed."""

    def _is_hurried(self, orders: Orders) -> bool:
        """Say whether the head waits for an answer, though there may be no news."""
        del orders
        return False

    def _keep(
        self, task: Task, *, modules: Sequence[str] = (), channel: socket.socket | None = None
    ) -> None:
        """Start a program; `OSError` where no keeper can."""
        self._oom_kills = oom_kills()
        self._kept = Kept(task, task.watch[-1], modules=modules, channel=channel)

    def _was_memory_short(self) -> bool:
        """Say whether the kernel has killed a process for want of RAM since the program began."""
        return oom_kills() > self._oom_kills

    def _take_output(self, kept: Kept) -> None:
        """Ask the keeper for what was printed, which also tells it that the head is heard."""
        kept.on()
        kept.listen(_ANSWER_S)
        self._add_output(kept.take_output())

    def _add_output(self, more: PrintedOutput | None) -> None:
        if more is not None:
            self._output = more if self._output is None else self._output.followed_by(more)

    def _let_go(self) -> None:
        """Forget a program; its keeper ends what may be left of it."""
        if self._kept is not None:
            self._add_output(self._kept.take_output())
            self._kept.close()
        self._kept = None

    def _tell(self, name: str, **detail: Scalar) -> None:
        self._events.append(WorkerEvent(name=name, at_unix_s=time.time(), detail=detail))


def end_words(status: int) -> str:
    """Say how a process ended, by an exit code or below 0 by a signal."""
    words = f"by signal {-status}" if status < 0 else f"with exit code {status}"
    with suppress(ValueError):
        words = f"by {signal.Signals(-status).name}"
    return words


def last_line(text: str) -> str:
    """Return the last line with a word in it, at most 300 characters."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "").strip()[:300]
