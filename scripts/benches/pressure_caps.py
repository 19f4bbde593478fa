"""How much memory a job is left over a minute, and the hand that moves its cap: the kernel's, or a second tenant's.

Two courses of free memory, as shares of what there is when nobody else wants any. On a CPU the cap is `RLIMIT_DATA`
of the job's process, moved from outside by prlimit(2), so that a move falls wherever the job's step happens to be. On
a card it is memory that a neighbour, a process of its own, really takes and frees.

Only soft limits are set: what a job starts is not capped for ever. The neighbour frees at once; it takes as soon as
there is something to take, which it cannot while the job holds it.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from random import Random

import psutil

from workers.units import MIB

#: (second, share of all memory), the first at second 0; a share holds until the next.
Course = list[tuple[float, float]]

_DESKTOP_SHARE = 0.04
"""A desktop's own use comes and goes by up to this much, drawn anew each second."""
_GAMES = ((0.25, 0.42, 0.22), (0.62, 0.80, 0.30))
"""Begin and end of each game as shares of the course, and the share of memory it leaves."""
_LOADING = 0.04
"""A game takes its memory over this share of the course, in parts: it loads, and ends at a stroke."""
_LOADING_PARTS = 10

#: The neighbour holds blocks of this share of all that the job may have, and not under torch's smallest segment.
_BLOCK_SHARE = 1 / 64
_LEAST_BLOCK_BYTES = 20 * MIB
_RETRY_S = 0.005

PATIENCE_S = 300.0
"""For a process to come up, and to end when its course has."""


def game(draw: Random, seconds: float) -> Course:
    """Return the course of a desktop PC: it jitters each second, and twice a game takes most of the memory."""
    marks = {float(second) for second in range(int(seconds) + 1)}
    for begin, end, _ in _GAMES:
        marks |= {seconds * (begin + _LOADING * part / _LOADING_PARTS) for part in range(_LOADING_PARTS)}
        marks.add(seconds * end)
    jitter = [_DESKTOP_SHARE * draw.random() for _ in range(int(seconds) + 1)]
    return [
        (at_s, _left_by_games(at_s / seconds) * (1 - jitter[int(at_s)])) for at_s in sorted(marks) if at_s < seconds
    ]


def _left_by_games(moment: float) -> float:
    for begin, end, left in _GAMES:
        if begin <= moment < end:
            loaded = min(1.0, (1 + round((moment - begin) / _LOADING * _LOADING_PARTS, 6) // 1) / _LOADING_PARTS)
            return 1 - (1 - left) * loaded
    return 1.0


COURSES: Mapping[str, Callable[[Random, float], Course]] = {
    "game": game,
    # Low at first; after a third of it all the rest is released.
    "release": lambda _draw, seconds: [(0.0, 0.28), (seconds * 0.35, 1.0)],
}


def least_between(course: Course, from_s: float, to_s: float) -> float:
    """Return the lowest share between two moments of a course."""
    now = max((at_s, share) for at_s, share in course if at_s <= max(0.0, from_s))[1]
    return min([now, *(share for at_s, share in course if from_s < at_s <= to_s)])


@contextlib.contextmanager
def child(body: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run `body` in a process that ends with this block, and yield the pipe to it."""
    context = get_context("spawn")  # nothing of this process is to be in it
    ours, theirs = context.Pipe()
    process = context.Process(target=body, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.kill()
        process.join()
        process.close()


def leave_to_the_bench() -> None:
    """Take no notice of Ctrl-C in a child: it is the bench's, which ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class KernelCap:
    """`RLIMIT_DATA` of a process of the same user."""

    def __init__(self, pid: int, base_bytes: int) -> None:
        """Change nothing yet.

        Args:
            pid: The job's process.
            base_bytes: What the kernel counts for it when it is ready.

        """
        import resource  # absent on Windows, where a card has its neighbour

        self._resource = resource
        self._pid = pid
        self._last_s = 0.0
        self._base_bytes = base_bytes
        self._hard = resource.prlimit(pid, resource.RLIMIT_DATA)[1]

    def clock_s(self) -> float:
        """Return the seconds of the job's course: its processor time, to 10 ms; none passes once it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            times = psutil.Process(self._pid).cpu_times()
            self._last_s = times.user + times.system
        return self._last_s

    def leave(self, size_bytes: int) -> None:
        """Leave the job so much, beside what it held when it was ready."""
        self._set(self._base_bytes + size_bytes)

    def close(self) -> None:
        """Leave it everything."""
        self._set(self._hard)

    def _set(self, soft: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended; whoever waits for its words will tell
            self._resource.prlimit(self._pid, self._resource.RLIMIT_DATA, (soft, self._hard))


class NeighbourCap:
    """A second tenant of the card, which holds all that the job is not to have."""

    def __init__(self, most_bytes: int, first_bytes: int) -> None:
        """Start the neighbour and wait until it holds what it wants; the job must hold nothing it could give back.

        Args:
            most_bytes: The most the job will be left in its course.
            first_bytes: What it is left at first.

        Raises:
            EOFError: The neighbour ended before it held anything.
            RuntimeError: The card has less than that free, or the neighbour did not come up.

        """
        self._ends = contextlib.ExitStack()
        self._connection = self._ends.enter_context(child(_be_neighbour, most_bytes, first_bytes))
        with contextlib.ExitStack() as unless_it_stands:
            unless_it_stands.callback(self.close)
            if not self._connection.poll(PATIENCE_S):
                raise RuntimeError(f"the neighbour did not come up within {PATIENCE_S:.0f} s")
            free_bytes = int(self._connection.recv())
            if free_bytes < most_bytes:
                raise RuntimeError(
                    f"beside the job's own state and two contexts the card has {free_bytes / MIB:.0f} MiB free, and "
                    f"the course needs {most_bytes / MIB:.0f}; end what else runs on it, or lower --memory-mib"
                )
            unless_it_stands.pop_all()

    def clock_s(self) -> float:
        """Return the seconds of the job's course."""
        return time.monotonic()

    def leave(self, size_bytes: int) -> None:
        """Leave the job so much."""
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(size_bytes)

    def close(self) -> None:
        """End the neighbour."""
        self._ends.close()


def _be_neighbour(connection: Connection, most_bytes: int, left_bytes: int) -> None:
    """Hold so much of the card that the job is left what was last said. Ends when the pipe closes."""
    leave_to_the_bench()
    import torch

    block_bytes = max(_LEAST_BLOCK_BYTES, int(most_bytes * _BLOCK_SHARE) // (2 * MIB) * 2 * MIB)
    torch.zeros(1, device="cuda")  # its own context first: that is not part of what is shared out
    free_bytes, _ = torch.cuda.mem_get_info()
    blocks: list[torch.Tensor] = []
    said = False
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            wanted = max(0, -((left_bytes - free_bytes) // block_bytes))
            if len(blocks) > wanted:
                del blocks[wanted:]
                torch.cuda.empty_cache()
            with contextlib.suppress(torch.OutOfMemoryError):
                while len(blocks) < wanted:
                    blocks.append(torch.empty(block_bytes, dtype=torch.uint8, device="cuda"))
            if not said:
                connection.send(free_bytes)
                said = True
            # While the job holds what is wanted here, ask again soon; else only a message changes anything.
            if connection.poll(_RETRY_S if len(blocks) < wanted else None):
                left_bytes = connection.recv()
