"""What an exception means that came out of one call: `workers.oom`, without what was under way when the call began."""

from __future__ import annotations

from collections.abc import Iterator

from workers import oom
from workers.oom import Failure


def judged(error: Exception, handled: BaseException | None) -> Failure:
    """Judge what a call raised, but not `handled`, the exception that its caller was handling already when he called.

    Python chains the two, and a bug met while an out-of-memory is being handled would look like one.
    """
    chained = [] if handled is None else [link for link in _chain(error) if link.__context__ is handled]
    try:
        for link in chained:
            link.__context__ = None
        return oom.classify(error)
    finally:
        for link in chained:
            link.__context__ = handled


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
