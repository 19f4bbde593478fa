"""Classifies the exception of one call by `workers.oom`, without what its caller was handling already."""

from __future__ import annotations

from collections.abc import Iterator

from workers import oom
from workers.oom import Failure


def judged(error: Exception, handled: BaseException | None) -> Failure:
    """Classify what a call raised, without `handled`, the exception that its caller was already handling.

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
