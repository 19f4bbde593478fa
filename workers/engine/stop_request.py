"""What a workload raised, told from a request to end this process.

A step may leave by `sys.exit()` or any other BaseException: that is an error of the workload, as a
ValueError is. A request comes by a signal: the handler of SIGTERM or of a second Ctrl-C raises
wherever the program is, which is in the workload most of the time.
"""

from __future__ import annotations

import signal
import traceback
from dataclasses import replace

from workers import oom
from workers.oom import Failure


def failure_of_workload(error: BaseException) -> Failure:
    """Judge what the workload raised; call it where that is handled.

    Raises:
        BaseException: `error` itself, if it is a request to end this process.
    """
    if isinstance(error, Exception):
        return oom.classify(error)
    if _is_request(error):
        raise error
    name, text = type(error).__name__, str(error)  # the text of a SystemExit is a bare number
    return replace(oom.classify(error), text=f"{name}: {text}" if text else name)


def _is_request(error: BaseException) -> bool:
    """Say whether a signal's handler raised it; Python's own for Ctrl-C leaves no frame."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    if handlers[signal.SIGINT] is signal.default_int_handler and isinstance(
        error, KeyboardInterrupt
    ):
        return True
    codes = {getattr(handler, "__code__", None) for handler in handlers.values()}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
