"""The Ray actor of a slot, which keeps one program: the base class, and the actor of our own
engine.

The program is a separate process: it ends and is started again without Ray, and each incarnation of
the slot has another one. An actor's constructor only keeps its arguments, so that Ray can start the
actor again with them anywhere. This module imports neither torch nor Ray, which reads its settings
when it is imported. An actor decides nothing, and waits no longer than it is asked to.
`command_actor.py` keeps a program of the user.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import shutil
import signal
import socket
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from workers.engine.pieces import ReceivedFile, SavedPieces
from workers.engine.spec_file import write_spec
from workers.host.processes import SilenceMeter, oom_kills, worker_and_raylet
from workers.keeper import processes
from workers.keeper.channel import ClosedError, receive_all, send
from workers.keeper.kept import Ended, Kept
from workers.keeper.task import Task
from workers.learned_limits import default_path
from workers.messages import (
    Begin,
    Cause,
    CheckpointPiece,
    Ending,
    Orders,
    PrintedOutput,
    Quiet,
    Status,
    Verdict,
    WorkerEvent,
)
from workers.settings import Scalar, WorkerSpec
from workers.units import MIB

#: A keeper answers in less than a millisecond; one that is stopped must not delay the poll.
_ANSWER_S: Final = 0.2

_PACKAGE: Final = "workers.engine"

#: The folder of the engines' files, in the folder of a run's state.
_FOLDER: Final = ".engines"

_ENGINE_MODULES: Final = ("workers.engine.engine",)
#: Modules that every training imports as well, which takes 2.3 s of a core.
_TRAINING_MODULES: Final = ("workers.workloads.train", "torch._dynamo")

#: Separates the output of two processes of a slot.
_SEPARATOR: Final = "[the process ended here; another one begins]\n"

#: A poll of a team's member without a leader is answered after this time.
_WITHOUT_LEADER_S: Final = 0.1

#: A process is examined if its status is this much later than it should be.
_LATE_S: Final = 1.0

#: A thread in the output of faulthandler (Lib/test/test_faulthandler.py): its innermost call.
_FRAME: Final = re.compile(r'Stack \(most recent call first\):\s+File "(.+)", line (\d+) in (\S+)')

#: A process prints its stack within some milliseconds, and its keeper passes that on.
_LOCATE_S: Final = 0.5

#: An engine's own log stays this long after it was last written; the run folder has its lines too.
_LOG_KEPT_S: Final = 7 * 86400.0

#: SIGKILL ends a process in milliseconds, unless the kernel is in the middle of a system call.
_END_S: Final = 5.0


class SlotActor(ABC):
    """Keeps the programs of one slot, one after the other; the base for each kind of program."""

    def __init__(self, spec: WorkerSpec, folder: Path) -> None:
        """Start nothing: the first orders of an incarnation do. `folder` has its files."""
        self._spec, self._folder = spec, folder
        self._name = uuid.uuid4().hex
        self._kept: Kept | None = None
        self._has_news = False
        """Whether to answer the head at once."""
        self._oom_kills = 0
        self._news = 0
        """Number of the last event or output. The head acknowledges the last one that it has."""
        self._events: list[tuple[int, WorkerEvent]] = []
        self._output: PrintedOutput | None = None
        self._output_news = 0

    def poll(self, orders: Orders, wait_s: float) -> Status:
        """Obey the orders of the head, and return the status of the program: at once if there is
        news, else after `wait_s`.

        Orders that do not name this process of the actor change nothing: they may be for an earlier
        one that was killed with its program.
        """
        if orders.actor != self._name:
            return Status(slot=self._spec.slot, actor=self._name)
        self._events = [(number, event) for number, event in self._events if number > orders.heard]
        if self._output_news <= orders.heard:
            self._output = None
        self._follow(orders)
        until_s = time.monotonic() + min(wait_s, self._patience_s(orders))
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
        return replace(
            self._status_of_program(orders),
            actor=self._name,
            news=self._news,
            events=tuple(event for _, event in self._events),
            output=self._output,
        )

    @abstractmethod
    def _follow(self, orders: Orders) -> None:
        """Start or end the program as the orders say."""

    @abstractmethod
    def _listen(self, kept: Kept, wait_s: float) -> None:
        """Wait at most `wait_s` for news of the program, and process them."""

    @abstractmethod
    def _status_of_program(self, orders: Orders) -> Status:
        """Return the status of the program, without events and output."""

    def _patience_s(self, orders: Orders) -> float:
        """Return the longest time after which a poll without news must be answered."""
        del orders
        return math.inf

    def _keep(
        self, task: Task, *, modules: Sequence[str] = (), channel: socket.socket | None = None
    ) -> None:
        """Start a program; `OSError` if no keeper can."""
        self._oom_kills = oom_kills()
        self._kept = Kept(task, task.watch[-1], modules=modules, channel=channel)

    def _was_memory_short(self) -> bool:
        """Say whether the kernel has killed a process for want of RAM since the program began."""
        return oom_kills() > self._oom_kills

    def _take_output(self, kept: Kept) -> str:
        """Ask the keeper for new output, and return it. The question also shows the keeper that the
        head can be reached.
        """
        kept.on()
        kept.listen(_ANSWER_S)
        more = kept.take_output()
        self._add_output(more)
        return "" if more is None else more.text

    def _add_output(self, more: PrintedOutput | None) -> None:
        if more is not None:
            self._output = more if self._output is None else self._output.followed_by(more)
            self._news = self._output_news = self._news + 1

    def _add_events(self, *events: WorkerEvent) -> None:
        for event in events:
            self._news += 1
            self._events.append((self._news, event))

    def _note_event(self, name: str, **detail: Scalar) -> None:
        self._add_events(WorkerEvent(name=name, at_unix_s=time.time(), detail=detail))

    def _release(self) -> None:
        """Release the program; its keeper ends the processes that may be left of it."""
        if self._kept is not None:
            self._add_output(self._kept.take_output())
            self._kept.close()
        self._kept = None


class WorkerActor(SlotActor):
    """Keeps the engine of one slot: passes on its orders, its statuses and the pieces of its state,
    and observes it while it is silent.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        """Start nothing."""
        self._state = default_path().parent / "state"
        super().__init__(spec, self._state / (spec.run_id or "no-run") / _FOLDER / spec.slot)
        self._channel: socket.socket | None = None
        self._status = Status(slot=spec.slot)
        """The last status of the present process, or of the last one."""
        self._sent: Orders | None = None
        self._pieces = SavedPieces()
        self._copy = ReceivedFile(self._folder / "spec.checkpoint")
        self._silence = SilenceMeter(on_card=spec.device == "cuda")

    def _follow(self, orders: Orders) -> None:
        is_other = orders.incarnation != self._status.incarnation
        if self._kept is not None and (is_other or not orders.runs):
            self._end(self._kept)
        if is_other and orders.runs and orders.begin is not None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_old(self._state)
            self._begin(orders.incarnation, orders.begin, orders.copy)
        wanted = replace(orders, actor=None, begin=None, heard=0, kept=None, copy=None)
        if self._channel is not None and wanted != self._sent and send(self._channel, wanted):
            self._sent = wanted

    def _patience_s(self, orders: Orders) -> float:
        """Return 0 while the head waits to send more of a copy or to get the rest of a state;
        little while a member of a team waits for the next orders to name a leader.
        """
        if orders.copy is not None:
            return 0.0
        waits = self._status.is_held or self._status.verdict is Verdict.DONE
        if waits and self._pieces.pending(self._status.saved, orders.kept):
            return 0.0
        team = self._status.team
        if team is None or (orders.team is not None and orders.team.generation != team.lost):
            return math.inf
        return _WITHOUT_LEADER_S

    def _begin(self, incarnation: int, begin: Begin, piece: CheckpointPiece | None) -> None:
        """Start the process of an incarnation once its copy is complete.

        If it cannot be started, as on a full disk, its status says that it has ended.
        """
        try:
            if piece is not None:
                self._copy.take(piece)
            if begin.copy is None or begin.copy == self._copy.kept:
                self._start(incarnation, begin)
        except OSError as error:
            text = f"its process cannot be started: {error.strerror or error}"
            end = Ending(cause=Cause.EXCEPTION, text=text)
            self._status = Status(slot=self._spec.slot, incarnation=incarnation, died=end)

    def _start(self, incarnation: int, begin: Begin) -> None:
        self._status = Status(slot=self._spec.slot, incarnation=incarnation)
        self._sent, self._pieces = None, SavedPieces()
        self._silence.reset()
        if incarnation > 0:
            self._add_output(PrintedOutput(text=_SEPARATOR, dropped_bytes=0))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # On a card, a fork has not been shown to see devices and allocator as a fresh process.
        is_forked = self._spec.device == "cpu"
        with theirs:
            copy = None if begin.copy is None else self._copy.path
            path = write_spec(self._folder, self._spec, incarnation, begin, copy)
            self._keep(
                Task(
                    argv=[sys.executable, "-m", _PACKAGE, str(path)],
                    env=dict(os.environ) | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": _python_path()},
                    cwd=os.getcwd(),  # noqa: PTH109 - a task holds text
                    place=str(self._folder),
                    log_bytes=MIB,
                    grace_s=0.0,
                    watch=worker_and_raylet(),
                    module=_PACKAGE if is_forked else None,
                ),
                modules=_loaded_for(self._spec) if is_forked else (),
                channel=theirs,
            )
        self._channel = ours

    def _listen(self, kept: Kept, wait_s: float) -> None:
        # The channel of a process that has ended stays readable.
        channel = self._channel
        ready = [kept.fileno(), *([] if channel is None else [channel.fileno()])]
        if not select.select(ready, [], [], wait_s)[0]:
            return
        self._receive()
        kept.listen(0.0)
        if kept.is_over:
            self._receive()  # what it reported before its end
            self._note_end(kept)

    def _receive(self) -> None:
        """Process the statuses that the engine has sent."""
        if self._channel is None:
            return
        try:
            for status in receive_all(self._channel):
                self._has_news = True
                self._add_events(*status.events)
                self._status = replace(status, events=())
                self._silence.reset()
        except ClosedError:
            self._channel.close()
            self._channel = None

    def _note_end(self, kept: Kept) -> None:
        if kept.refused is not None:
            end = Ending(cause=Cause.NOT_STARTED, text=kept.refused)
        else:
            assert kept.ended is not None  # noqa: S101 - it is over
            cause = self._cause_of(kept.ended)
            text = f"its process ended {end_words(kept.ended.status)}"
            last = "" if kept.ended.status < 0 else last_line(kept.ended.tail)
            end = Ending(cause=cause, text=f"{text}: {last}" if last else text)
        self._status, self._has_news = replace(self._status, died=end), True
        self._release()

    def _cause_of(self, ended: Ended) -> Cause:
        if ended.status > 0 and not self._status.is_up:
            return Cause.NOT_STARTED
        if ended.status == -signal.SIGKILL and self._was_memory_short():
            return Cause.HOST_MEMORY
        return Cause.KILLED if ended.status < 0 else Cause.EXCEPTION

    def _end(self, kept: Kept) -> None:
        """End the process; if it is silent, log first where it stands."""
        quiet = self._quiet(kept)
        if quiet is not None and kept.pid is not None:
            quiet = replace(quiet, stands_at=self._stands_at(kept, kept.pid))
            self._note_event(
                "silent_process_ended",
                stands_at=quiet.stands_at,
                told_nothing_s=quiet.seconds,
                computed_s=quiet.computed_s,
            )
        kept.end(0.0)
        until_s = time.monotonic() + _END_S
        while not kept.is_over and time.monotonic() < until_s:
            self._receive()  # what it reports meanwhile counts
            kept.listen(_LOCATE_S)
        self._receive()
        self._status = replace(self._status, quiet=quiet)
        self._release()

    def _release(self) -> None:
        super()._release()
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _status_of_program(self, orders: Orders) -> Status:
        status = self._status
        return replace(
            status,
            save_due=status.save_due or self._pieces.pending(status.saved, orders.kept),
            quiet=status.quiet if self._kept is None else self._quiet(self._kept),
            checkpoint=self._pieces.piece(status.saved, orders.kept),
            copied=self._copy.kept,
        )

    def _quiet(self, kept: Kept) -> Quiet | None:
        """Return the activity of a process that has been silent too long; `None` for any other."""
        return self._silence.measure(kept.pid, self._spec.poll_s + _LATE_S)

    def _stands_at(self, kept: Kept, pid: int) -> str | None:
        """Make a process print where it stands, and return that; `None` if it prints nothing."""
        with contextlib.suppress(OSError):
            processes.send_to_main_thread(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGCONT)  # one that is stopped would not print
        text, until_s = "", time.monotonic() + _LOCATE_S
        while time.monotonic() < until_s:
            time.sleep(0.02)
            text += self._take_output(kept)
            if (found := _FRAME.search(text)) is not None:
                where, line, name = found.groups()
                return f"{Path(where).name}:{line} in {name}"
        return None


def end_words(status: int) -> str:
    """Say how a process ended, by an exit code or below 0 by a signal."""
    words = f"by signal {-status}" if status < 0 else f"with exit code {status}"
    with contextlib.suppress(ValueError):
        words = f"by {signal.Signals(-status).name}"
    return words


def last_line(text: str) -> str:
    """Return the last line with a word in it, at most 300 characters."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "").strip()[:300]


def _remove_old(state: Path) -> None:
    """Remove the files of the engines of earlier runs from this PC once they are old."""
    oldest_unix_s = time.time() - _LOG_KEPT_S
    for folder in state.glob(f"*/{_FOLDER}"):
        with contextlib.suppress(OSError):
            # The folder counts too: another actor may have made it just now.
            if all(it.stat().st_mtime < oldest_unix_s for it in (folder, *folder.rglob("*"))):
                shutil.rmtree(folder)


def _loaded_for(spec: WorkerSpec) -> tuple[str, ...]:
    is_training = spec.workload.name.endswith("train")
    return (*_ENGINE_MODULES, *_TRAINING_MODULES) if is_training else _ENGINE_MODULES


def _python_path() -> str:
    """Return the program's search path for modules: that of this process."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join([root, *filter(None, sys.path)])
