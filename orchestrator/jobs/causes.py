"""Why an attempt of a job ended, and what follows: again, again with more memory, or never. Pure.

A program's end is judged on its own PC, by the actor that has kept it: by what was seen there, by
its signal or exit code, then by its last words. For a training that the lifecycle of slots has
given up, a value says why, and no sentence of the lifecycle is read. Does not say when an attempt
starts again (`queue.py`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from typing import Final

from orchestrator.jobs.model import Standing
from workers import oom
from workers.messages import Cause

#: Sent by a person, by another program, or by the kernel. Any other signal is the program's crash.
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

#: What an exit code, or below 0 a signal, means whatever was printed.
_OF_STATUS: Final[Mapping[int, Cause]] = {
    0: Cause.DONE,
    75: Cause.PARKED,  # EX_TEMPFAIL of sysexits.h: "start me again"
    # What a shell says of a program that it cannot run, and that it does not find (POSIX, 2.8.2).
    **dict.fromkeys((126, 127), Cause.NOT_STARTED),
    **dict.fromkeys((-number for number in _FROM_OUTSIDE), Cause.KILLED),
    # A shell adds the number of a signal that ended its program to 128.
    **dict.fromkeys((128 + number for number in _FROM_OUTSIDE), Cause.KILLED),
}

#: The next attempt gets a card with so many times the observed peak.
_MORE: Final = 1.25

#: Of several causes that a program's end has, the first one counts.
_ORDER: Final = (
    *(Cause.TIME_LIMIT, Cause.PARKED, Cause.DONE, Cause.HOST_MEMORY, Cause.OUT_OF_MEMORY),
    *(Cause.DISK_FULL, Cause.NAN_LOSS, Cause.NOT_STARTED, Cause.KILLED),
)

#: What the words mean, the first that is found decides. An illegal address or an assertion on the
#: card is not here: mostly it is an index of the program's own, and would come again.
_WORDS: Final = {
    Cause.DRIVER: re.compile(
        r"uncorrectable (?:ECC|NVLink)|GPU is lost|fallen off the bus|GPU requires reset"
        r"|no CUDA-capable device is detected|CUDA-capable device\(s\) is/are busy"
        r"|CUDA (?:error: )?unknown error|forward compatibility was attempted"
        r"|system not yet initialized|MPS (?:server|client|control daemon)"
        r"|unsupported display driver / cuda driver|Driver/library version mismatch"
    ),
    Cause.DISK_FULL: re.compile(
        r"No space left on device|\bENOSPC\b|Disk quota exceeded|\[Errno (?:28|122)\]"
        r"|PytorchStreamWriter failed writing|database or disk is full"
    ),
    Cause.NAN_LOSS: re.compile(
        r"(?i)\bloss\W{0,3}(?:is |was |became )?(?:nan|not finite|not a number)\b"
        r"|\bloss (?:is|was|became) (?:inf|infinite)\b|\b(?:nan|non-finite) (?:training )?loss\b"
    ),
}

#: Of the last line with an exception: the same file with the same modules fails again. Not an
#: exception of a library that a retry may get past, such as a lost connection.
_CANNOT_BE_RUN: Final = re.compile(
    r"^(?:ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError)\b"
    r"|error: (?:unrecognized arguments|the following arguments are required|argument )"
    r"|^\S*python[0-9.]*: (?:can't open file|No module named|can't find '__main__')"
    r"|^Error: (?:No such option|Missing (?:option|argument|parameter)|Invalid value)",
    re.MULTILINE,
)


#: After these an attempt is made again after a pause, and does not count against `retries`. After a
#: full disk the queue waits until there is room.
NOT_COUNTED: Final = frozenset(
    {
        *(Cause.PARKED, Cause.KILLED, Cause.HOST_MEMORY),
        *(Cause.DRIVER, Cause.DISK_FULL, Cause.CARD_TAKEN),
    }
)
#: After these and `NOT_COUNTED` it may be made again; running out of memory, which is not counted
#: either, needs a larger card. What has died has been started again several times already.
_AGAIN: Final = {*NOT_COUNTED, Cause.OUT_OF_MEMORY, Cause.DIED, Cause.EXCEPTION}


def cause_of(status: int, text: str, seen: Iterable[Cause] = ()) -> Cause:
    """Return why a program ended, with this exit code or below 0 by a signal, and these last words.

    `seen` is what its PC has seen of that besides.
    """
    found = {*seen, _OF_STATUS.get(status)}
    return next((cause for cause in _ORDER if cause in found), None) or _by_words(text)


def cause_of_failure(failure: Cause | None, error_text: str | None) -> Cause:
    """Return why a training was given up; `error_text` is the last traceback of its workload.

    Only where the workload itself has failed are its words looked at, and no others ever.
    """
    if failure not in {None, Cause.EXCEPTION}:
        return failure or Cause.EXCEPTION
    text = error_text or ""
    return Cause.OUT_OF_MEMORY if oom.judge_log(text) is not None else _by_words(text)


def is_final(cause: Cause, standing: Standing, text: str, step: int | None = None) -> bool:
    """Return whether a job that stood so when its attempt ended would only fail again.

    An exception that comes again in the same words at the same step would come a third time. Where
    no step is told, its words alone do not say so: a lost connection has the same words every time.
    """
    is_same = standing.last_error is not None and likened(standing.last_error) == likened(text)
    is_there = step is not None and step == standing.step
    return cause not in _AGAIN or (cause is Cause.EXCEPTION and is_same and is_there)


def least_room_bytes(peak_bytes: int | None, budget_bytes: int) -> int:
    """Return the room that a program needs that ran out of memory with this budget.

    Always more than it had, so that it is never tried twice on the same terms.
    """
    return max(budget_bytes + 1, int(_MORE * (peak_bytes or 0)))


def _by_words(text: str) -> Cause:
    for cause, pattern in _WORDS.items():
        if pattern.search(text):
            return cause
    tail = text[text.rfind("Traceback (most recent call last):") + 1 :]
    return Cause.BAD_CONFIG if _CANNOT_BE_RUN.search(tail) else Cause.EXCEPTION


def likened(text: str) -> str:
    """Return an error's words without what differs each time: addresses, times, process ids."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)
