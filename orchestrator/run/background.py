"""Threads for work that the head does not wait for, neither in its turns nor when it ends.

Does not end a call that hangs: the call itself has a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Semaphore, Thread
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class Background:
    """Makes calls, at most so many at once. The process may end while they go on: those of the
    standard library's executors are waited for.
    """

    def __init__(self, most: int, name: str) -> None:
        """Start nothing yet; `name` is that of the threads."""
        self._places, self._name = Semaphore(most), name

    def submit(
        self, work: Callable[_Given, _Result], *given: _Given.args, **named: _Given.kwargs
    ) -> Future[_Result]:
        """Have a call made, and return where its result will be."""
        future: Future[_Result] = Future()

        def call() -> None:
            with self._places:
                try:
                    future.set_result(work(*given, **named))
                except BaseException as error:  # noqa: BLE001 - it is the result
                    future.set_exception(error)

        Thread(target=call, name=self._name, daemon=True).start()
        return future
