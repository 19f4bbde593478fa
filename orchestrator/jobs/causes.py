"""Classifies why an attempt of a job ended, and whether another attempt makes sense. Pure.

The actor that ran a program judges its end on the program's PC: first by observations there, then
by its signal or exit code, then by the end of its output. For a training that the lifecycle of
slots has given up, the lifecycle reports a `Cause`; its sentences are not parsed. Does not decide
when an attempt starts again (`queue.py`).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from typing import Final

from orchestrator.jobs.model import Standing
from workers import oom
from workers.messages import Cause

#: Signals of a person, another program or the kernel. Any other signal is a crash of the program.
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

#: Causes keyed by exit code, or by negated signal; they hold whatever the program printed.
_OF_STATUS: Final[Mapping[int, Cause]] = {
    0: Cause.DONE,
    75: Cause.PARKED,  # EX_TEMPFAIL of sysexits.h: "start me again"
    # Exit codes of a shell that cannot run, or does not find, a program (POSIX, 2.8.2).
    **dict.fromkeys((126, 127), Cause.NOT_STARTED),
    **dict.fromkeys((-number for number in _FROM_OUTSIDE), Cause.KILLED),
    # A shell exits with 128 plus the number of the signal that ended its program.
    **dict.fromkeys((128 + number for number in _FROM_OUTSIDE), Cause.KILLED),
}

#: The next attempt needs a card with this multiple of the observed peak memory.
_MORE: Final = 1.25

#: Precedence of causes: if several apply to one end, the first of these counts.
_ORDER: Final = (
    *(Cause.TIME_LIMIT, Cause.PARKED, Cause.DONE, Cause.HOST_MEMORY, Cause.OUT_OF_MEMORY),
    *(Cause.DISK_FULL, Cause.NAN_LOSS, Cause.NOT_STARTED, Cause.KILLED),
)

#: Patterns for the output of a program; the first match decides. Illegal addresses and assertions
#: on the card are not here: mostly they come from a wrong index in the program and would recur.
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

#: Errors, searched from the last traceback on, that recur in each attempt: the file and its modules
#: are the same. Exceptions that a retry may get past, such as a lost connection, are not here.
_CANNOT_BE_RUN: Final = re.compile(
    r"^(?:ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError)\b"
    r"|error: (?:unrecognized arguments|the following arguments are required|argument )"
    r"|^\S*python[0-9.]*: (?:can't open file|No module named|can't find '__main__')"
    r"|^Error: (?:No such option|Missing (?:option|argument|parameter)|Invalid value)",
    re.MULTILINE,
)


#: After these causes the job is retried after a pause, and the attempt does not count against
#: `retries`. A full disk also holds the queue.
NOT_COUNTED: Final = frozenset(
    {
        *(Cause.PARKED, Cause.KILLED, Cause.HOST_MEMORY),
        *(Cause.DRIVER, Cause.DISK_FULL, Cause.CARD_TAKEN),
    }
)
#: After these causes the job may be retried. An attempt that ran out of memory does not count
#: either, but needs more room. A process that DIED has been restarted several times already.
_AGAIN: Final = {*NOT_COUNTED, Cause.OUT_OF_MEMORY, Cause.DIED, Cause.EXCEPTION}


def cause_of(status: int, text: str, seen: Iterable[Cause] = ()) -> Cause:
    """Return why a program ended.

    `status` is its exit code, or its negated signal; `text` the end of its output; `seen` are the
    causes that its PC observed.
    """
    found = {*seen, _OF_STATUS.get(status)}
    return next((cause for cause in _ORDER if cause in found), None) or _by_words(text)


def cause_of_failure(failure: Cause | None, error_text: str | None) -> Cause:
    """Return why a training was given up; `error_text` is the last traceback of its workload.

    The text is read only if the workload itself has failed.
    """
    if failure not in {None, Cause.EXCEPTION}:
        return failure or Cause.EXCEPTION
    text = error_text or ""
    return Cause.OUT_OF_MEMORY if oom.judge_log(text) is not None else _by_words(text)


def is_final(cause: Cause, standing: Standing, text: str, step: int | None = None) -> bool:
    """Return whether a job would fail again; `standing` is from before the attempt ended.

    The same exception text at the same step twice in a row counts as final. The same text without a
    step does not: a lost connection has the same text every time.
    """
    is_same = standing.last_error is not None and likened(standing.last_error) == likened(text)
    is_there = step is not None and step == standing.step
    return cause not in _AGAIN or (cause is Cause.EXCEPTION and is_same and is_there)


def least_room_bytes(peak_bytes: int | None, budget_bytes: int) -> int:
    """Return the room that a program needs after it ran out of memory with `budget_bytes`.

    The result is above `budget_bytes`, so no attempt repeats with the same memory.
    """
    return max(budget_bytes + 1, int(_MORE * (peak_bytes or 0)))


def _by_words(text: str) -> Cause:
    for cause, pattern in _WORDS.items():
        if pattern.search(text):
            return cause
    tail = text[text.rfind("Traceback (most recent call last):") + 1 :]
    return Cause.BAD_CONFIG if _CANNOT_BE_RUN.search(tail) else Cause.EXCEPTION


def likened(text: str) -> str:
    """Return an error text without the numbers that vary: addresses, times, process ids."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)
