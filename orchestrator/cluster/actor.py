"""The Ray actor of a slot, which keeps one program; and the one that keeps an engine of ours.

The program is a process of its own: it ends and is started again without Ray, and each incarnation
of the slot is another. An actor's constructor only keeps what it is given, so that Ray can start it
again anywhere at any time, with the same arguments. It imports neither torch nor Ray, which reads
its settings when it is imported; it decides nothing, and waits for nothing longer than it is asked
to. A program of the user is kept by `command_actor.py`.
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

#: A keeper answers in less than a millisecond; one that is stopped must not hold up the poll.
_ANSWER_S: Final = 0.2

_PACKAGE: Final = "workers.engine"

#: Of the files of the engines of a run, below that of the run's state.
_FOLDER: Final = ".engines"

_OF_ALL: Final = ("workers.engine.engine",)
#: What every training imports as well: 2.3 s of a core.
_OF_TRAININGS: Final = ("workers.workloads.train", "torch._dynamo")

#: In what a slot has printed, between two of its processes.
_ANOTHER: Final = "[the process ended here; another one begins]\n"

#: A member of a team without a leader is asked again after so long.
_WITHOUT_LEADER_S: Final = 0.1

#: A process that has told nothing for so much longer than it should have is looked at.
_LATE_S: Final = 1.0

#: What faulthandler prints of a thread (Lib/test/test_faulthandler.py), its innermost call first.
_LINE: Final = re.compile(r'Stack \(most recent call first\):\s+File "(.+)", line (\d+) in (\S+)')

#: A process prints where it stands within some milliseconds, and its keeper passes it on.
_LOCATE_S: Final = 0.5

#: What an engine prints is in the run folder as well. Its own file stays for so long after it was
#: written last.
_LOG_KEPT_S: Final = 7 * 86400.0

#: SIGKILL ends a process in milliseconds, unless the kernel is in the middle of a system call.
_END_S: Final = 5.0


class SlotActor(ABC):
    """The program of one slot, and those after it: what every kind of program needs."""

    def __init__(self, spec: WorkerSpec, folder: Path) -> None:
        """Start nothing: the first orders of an incarnation do. It is kept in `folder`."""
        self._spec, self._folder = spec, folder
        self._name = uuid.uuid4().hex
        self._kept: Kept | None = None
        self._has_news = False
        """Whether the head is to be answered at once."""
        self._oom_kills = 0
        self._news = 0
        """Counts what has happened and was printed. The head acknowledges what it has."""
        self._events: list[tuple[int, WorkerEvent]] = []
        self._output: PrintedOutput | None = None
        self._output_news = 0

    def poll(self, orders: Orders, wait_s: float) -> Status:
        """See to what the head wants, and return how the slot's program is: at once when there is
        news of it, else after `wait_s`.

        Orders for another process of this actor change nothing: they may be those of a process that
        was killed, and its program with it.
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
            self._told(orders),
            actor=self._name,
            news=self._news,
            events=tuple(event for _, event in self._events),
            output=self._output,
        )

    @abstractmethod
    def _follow(self, orders: Orders) -> None:
        """Start the program or have it end, as far as that is wanted."""

    @abstractmethod
    def _listen(self, kept: Kept, wait_s: float) -> None:
        """Wait at most so long for news of the program, and take them in."""

    @abstractmethod
    def _told(self, orders: Orders) -> Status:
        """Return how the program is, but for what has happened and was printed."""

    def _patience_s(self, orders: Orders) -> float:
        """Return for how long the head can do without an answer while there is no news."""
        del orders
        return math.inf

    def _keep(
        self, task: Task, *, modules: Sequence[str] = (), channel: socket.socket | None = None
    ) -> None:
        """Start a program; `OSError` where no keeper can."""
        self._oom_kills = oom_kills()
        self._kept = Kept(task, task.watch[-1], modules=modules, channel=channel)

    def _was_memory_short(self) -> bool:
        """Say whether the kernel has killed a process for want of RAM since the program began."""
        return oom_kills() > self._oom_kills

    def _take_output(self, kept: Kept) -> str:
        """Ask the keeper for what was printed, and return it. That also tells the keeper that the
        head is heard.
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

    def _tell(self, name: str, **detail: Scalar) -> None:
        self._add_events(WorkerEvent(name=name, at_unix_s=time.time(), detail=detail))

    def _let_go(self) -> None:
        """Forget a program; its keeper ends what may be left of it."""
        if self._kept is not None:
            self._add_output(self._kept.take_output())
            self._kept.close()
        self._kept = None


class WorkerActor(SlotActor):
    """Keeps the engine of one slot: its orders, what it tells, its state in pieces, and what is
    seen of one that tells nothing.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        """Start nothing."""
        self._state = default_path().parent / "state"
        super().__init__(spec, self._state / (spec.run_id or "no-run") / _FOLDER / spec.slot)
        self._channel: socket.socket | None = None
        self._status = Status(slot=spec.slot)
        """The last that the present or the last process has told."""
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
        """None while the head waits to send more of a copy, or for the last of a state; little
        while a member of a team waits for a leader, whom the next orders name.
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
        """Start the process of an incarnation once all of its copy is here.

        Where it cannot be started, as on a full disk, it has ended.
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
        self._silence.is_over()
        if incarnation > 0:
            self._add_output(PrintedOutput(text=_ANOTHER, dropped_bytes=0))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # On a card no fork was ever seen to see its devices and its allocator as a fresh process.
        is_forked = self._spec.device == "cpu"
        with theirs:
            copy = None if begin.copy is None else self._copy.path
            path = write_spec(self._folder, self._spec, incarnation, begin, copy)
            self._keep(
                Task(
                    argv=[sys.executable, "-m", _PACKAGE, str(path)],
                    env=dict(os.environ) | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": _path()},
                    cwd=os.getcwd(),  # noqa: PTH109 - a word of a task
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
            self._receive()  # what it told before its end
            self._note_end(kept)

    def _receive(self) -> None:
        """Take in what the process has told."""
        if self._channel is None:
            return
        try:
            for told in receive_all(self._channel):
                self._has_news = True
                self._add_events(*told.events)
                self._status = replace(told, events=())
                self._silence.is_over()
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
        self._let_go()

    def _cause_of(self, ended: Ended) -> Cause:
        if ended.status > 0 and not self._status.is_up:
            return Cause.NOT_STARTED
        if ended.status == -signal.SIGKILL and self._was_memory_short():
            return Cause.HOST_MEMORY
        return Cause.KILLED if ended.status < 0 else Cause.EXCEPTION

    def _end(self, kept: Kept) -> None:
        """End the process, after it has been seen where one that is silent stands."""
        quiet = self._quiet(kept)
        if quiet is not None and kept.pid is not None:
            quiet = replace(quiet, stands_at=self._stands_at(kept, kept.pid))
            self._tell(
                "silent_process_ended",
                stands_at=quiet.stands_at,
                told_nothing_s=quiet.seconds,
                computed_s=quiet.computed_s,
            )
        kept.end(0.0)
        until_s = time.monotonic() + _END_S
        while not kept.is_over and time.monotonic() < until_s:
            self._receive()  # what it tells meanwhile counts
            kept.listen(_LOCATE_S)
        self._receive()
        self._status = replace(self._status, quiet=quiet)
        self._let_go()

    def _let_go(self) -> None:
        super()._let_go()
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _told(self, orders: Orders) -> Status:
        status = self._status
        return replace(
            status,
            save_due=status.save_due or self._pieces.pending(status.saved, orders.kept),
            quiet=status.quiet if self._kept is None else self._quiet(self._kept),
            checkpoint=self._pieces.piece(status.saved, orders.kept),
            copied=self._copy.kept,
        )

    def _quiet(self, kept: Kept) -> Quiet | None:
        """Return what a process does that has told nothing for long; `None` of any other."""
        return self._silence.look(kept.pid, self._spec.poll_s + _LATE_S)

    def _stands_at(self, kept: Kept, pid: int) -> str | None:
        """Have a process print where it stands, and return that; `None` if it does not."""
        with contextlib.suppress(OSError):
            processes.send_to_main_thread(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGCONT)  # one that is stopped would not print
        text, until_s = "", time.monotonic() + _LOCATE_S
        while time.monotonic() < until_s:
            time.sleep(0.02)
            text += self._take_output(kept)
            if (found := _LINE.search(text)) is not None:
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
    """Remove what the engines of earlier runs have printed on this PC."""
    oldest_unix_s = time.time() - _LOG_KEPT_S
    for folder in state.glob(f"*/{_FOLDER}"):
        with contextlib.suppress(OSError):
            # The folder too: another actor may have made it just now.
            if all(it.stat().st_mtime < oldest_unix_s for it in (folder, *folder.rglob("*"))):
                shutil.rmtree(folder)


def _loaded_for(spec: WorkerSpec) -> tuple[str, ...]:
    is_training = spec.workload.name.endswith("train")
    return (*_OF_ALL, *_OF_TRAININGS) if is_training else _OF_ALL


def _path() -> str:
    """Return where the program finds modules: where this process does."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join([root, *filter(None, sys.path)])
