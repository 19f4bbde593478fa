"""What an exception means that came out of one call: `workers.oom`, and what else is to be seen to around a call.

Covers exceptions that were under way already when the call began, and a machine too full to judge anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from workers import oom
from workers.messages import FailureKind
from workers.oom import Failure

_TOO_FULL_TO_JUDGE: Final = Failure(
    kind=FailureKind.DEFINITE, evidence="type MemoryError", text="no memory was left even to see what had failed"
)


def judged(error: Exception, handled: BaseException | None) -> Failure:
    """Judge what an attempt raised, but not what its caller was handling already when he called.

    Python chains the two, and a bug met while an out-of-memory is being handled would look like one.
    """
    try:
        chained = [] if handled is None else [link for link in _chain(error) if link.__context__ is handled]
        try:
            for link in chained:
                link.__context__ = None
            return oom.classify(error)
        finally:
            for link in chained:
                link.__context__ = handled
    except MemoryError:
        return _TOO_FULL_TO_JUDGE


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and what is chained to it, each once."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += (link.__cause__, link.__context__)
