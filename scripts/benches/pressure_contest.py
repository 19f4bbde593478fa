"""Who chooses the sizes of the job under pressure: ours, accelerate, toma, and one who knows the course.

Each runs in a process of its own, under a cap that others move meanwhile. accelerate and toma run as their users run
them: what they decorate is the whole training loop. They are spared what their users are not: model and optimiser
outlive a restart, and what was done before a failure counts.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import signal
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benches.pressure_caps import Course, least_between
from benches.pressure_grounds import Ground, open_ground
from benches.pressure_jobs import Job
from benches.pressure_scout import Scouted
from workers import oom
from workers.settings import FailureKind

_IDLE_S = 0.02
"""How long a contestant waits that was told to run nothing."""

_IDEAL_MARGIN = 0.02
"""Keeps the ideal from failing over what the scout's line does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Who runs, and against what."""

    contestant: str
    largest: int
    """Where accelerate and toma begin, and what ours never exceeds."""
    course: Course
    seconds: float
    scouted: Scouted
    """The spec is everybody's; the rest is what only the ideal is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What a contestant did."""

    items: int
    """Of steps that ended well before the course did."""
    steps: int
    failed_at_s: tuple[float, ...]
    """Seconds into the course, one for each failure."""
    idle_s: float
    largest_step: int
    sweep_s: float
    """Median time of the optimiser, which is the same work in every step: how fast the machine was meanwhile."""
    last_loss: float
    ended: str | None
    """Why it gave up before the end."""


class Run:
    """One turn of one contestant, and its books."""

    def __init__(self, turn: Turn, ground: Ground, job: Job, connection: Connection) -> None:
        """The course begins now."""
        self.turn = turn
        self.ground = ground
        self.items = 0
        self.steps = 0
        self.idle_s = 0.0
        self.failed_at_s: list[float] = []
        self.largest_step = 0
        self._job = job
        self._connection = connection
        self._began_s = ground.clock_s()

    @property
    def at_s(self) -> float:
        """Seconds into the course."""
        return self.ground.clock_s() - self._began_s

    def over(self) -> bool:
        """Tell whether the course has ended, or whoever started this."""
        return self.at_s >= self.turn.seconds or self._connection.poll()

    def step(self, items: int) -> int:
        """Train once, write it down, and return the most memory it took.

        Raises:
            RuntimeError: Out of memory; written down, too.

        """
        try:
            peak_bytes = self._job.step(items)
        except Exception:
            self.failed_at_s.append(self.at_s)
            raise
        if self.at_s <= self.turn.seconds:  # what ends after the end is nobody's work
            self.items += items
            self.steps += 1
            self.largest_step = max(self.largest_step, items)
        return peak_bytes

    def attempt(self, items: int) -> tuple[bool, int | None]:
        """Train once as the engine does: judge inside the handler, recover outside; whether it went well, and the peak.

        Raises:
            Exception: It was not the memory.

        """
        try:
            return True, self.step(items)
        except Exception as error:
            if oom.classify(error).kind not in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
                raise
        self._job.recover()
        return False, None

    def idle(self) -> None:
        """Run nothing for a moment."""
        self.idle_s += _IDLE_S
        self.ground.wait(_IDLE_S)


def _ours(run: Run, *, sees: bool) -> None:
    from workers.resilience.adaptive_size import AdaptiveSize

    sizes = AdaptiveSize(run.turn.largest, clock=run.ground.clock_s)
    while not run.over():
        size = sizes.next(run.ground.free_bytes() if sees else None)
        if size is None:
            run.idle()
            continue
        good, peak_bytes = run.attempt(size)
        if good:
            sizes.succeeded(size, peak_bytes if sees else None)
        else:
            sizes.failed(size)


def _accelerate(run: Run) -> None:
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=run.turn.largest)
    def train(batch_size: int) -> None:
        while not run.over():
            run.step(batch_size)

    train()


def _toma(run: Run) -> None:
    from toma import toma

    @toma.batch(initial_batchsize=run.turn.largest)
    def train(batchsize: int) -> None:
        while not run.over():
            run.step(batchsize)

    train()


def _ideal(run: Run) -> None:
    """Run the largest size that fits until the step is done: it knows what is to come."""
    known = run.turn.scouted
    longest_s = known.fixed_s + known.unit_s * known.fits
    while not run.over():
        now, ahead = (
            known.spec.memory_bytes * least_between(run.turn.course, run.at_s, run.at_s + span_s)
            for span_s in (0.0, longest_s)
        )
        # What the process has come to hold beside the job is gone, whatever the course says.
        left_bytes = run.ground.free_bytes() - (now - ahead)
        run.attempt(known.largest_within(left_bytes / (1 + _IDEAL_MARGIN)))


CONTESTANTS: Mapping[str, Callable[[Run], None]] = {
    "ours": lambda run: _ours(run, sees=True),
    "blind": lambda run: _ours(run, sees=False),
    "accelerate": _accelerate,
    "toma": _toma,
    "ideal": _ideal,
}
"""By name. "ours" is told the free memory before each step and the peak after it, "blind" is ours and told neither."""

_MODULES = {"ours": "workers.resilience.adaptive_size", "accelerate": "accelerate.utils", "toma": "toma"}
"""Loaded before the cap is set: what a module takes is not the job's."""


def contest(connection: Connection, turn: Turn) -> None:
    """Be one contestant: say what is held, wait for the moment of the start, run, and send the books."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the bench's, which ends this
    spec = turn.scouted.spec
    ground = open_ground(spec.device, spec.memory_bytes, spec.state_bytes)
    job = Job(spec, ground)
    job.step(turn.scouted.fits)  # what libraries keep for a large step, they have now
    if turn.contestant in _MODULES:
        importlib.import_module(_MODULES[turn.contestant])
    # As the engine does: modules live for ever, and no collection must walk them.
    gc.collect()
    gc.freeze()
    ground.settle(lambda: job.step(turn.scouted.fits))
    job.sweeps_s.clear()
    connection.send((os.getpid(), ground.base_bytes()))
    connection.recv()  # the cap stands
    run = Run(turn, ground, job, connection)
    ended: str | None = None
    try:
        CONTESTANTS[turn.contestant](run)
    except Exception as error:  # noqa: BLE001 - a contestant that gives up is a finding
        ended = f"{type(error).__name__} at {run.at_s:.1f} s: {' '.join(str(error).split())[:300]}"
    ground.lift()
    books = Books(
        items=run.items,
        steps=run.steps,
        failed_at_s=tuple(run.failed_at_s),
        idle_s=run.idle_s,
        largest_step=run.largest_step,
        sweep_s=statistics.median(job.sweeps_s or [math.nan]),
        last_loss=job.last_loss,
        ended=ended,
    )
    with contextlib.suppress(BrokenPipeError):  # the bench was killed
        connection.send(books)
