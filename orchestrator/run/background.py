"""Runs calls in threads; the head waits for them neither in its turns nor when it ends.

Does not end a call that hangs: the call must have a time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Semaphore, Thread
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class Background:
    """Makes calls in daemon threads, at most `most` at once. The process may end while they run; an
    executor of the standard library would wait for them.
    """

    def __init__(self, most: int, name: str) -> None:
        """Start no thread; `name` is the name of each thread."""
        self._places, self._name = Semaphore(most), name

    def submit(
        self, work: Callable[_Given, _Result], *given: _Given.args, **named: _Given.kwargs
    ) -> Future[_Result]:
        """Call `work` in a thread, and return the future of its result."""
        future: Future[_Result] = Future()

        def call() -> None:
            with self._places:
                try:
                    future.set_result(work(*given, **named))
                except BaseException as error:  # noqa: BLE001 - the error is the result
                    future.set_exception(error)

        Thread(target=call, name=self._name, daemon=True).start()
        return future
