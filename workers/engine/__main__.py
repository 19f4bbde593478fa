"""The engine of a slot as a program of its own: `python -m workers.engine`, started by a keeper.

It reads a `WorkerSpec` from its channel, says that its engine is made, then answers one `Directive`
after the other with a `Report`. It ends when the other end of the channel is closed. Decides nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Final

from workers.host.cuda_environment import set_for_cuda, workspace_of
from workers.host.processes import ENGINE_NAME
from workers.keeper import processes
from workers.keeper.task import CHANNEL
from workers.settings import WorkerSpec

_LINE_BUFFERED: Final = 1  # _IOLBF of glibc and musl (stdio.h)


def main() -> None:
    """Run slices until the other end of the channel is closed."""
    # Ctrl-C is the head's: a KeyboardInterrupt in this process is the workload's own error.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    processes.prctl(processes.PR_SET_NAME, ENGINE_NAME.encode(), 0, 0, 0)
    faulthandler.enable()
    _print_by_lines()
    number = int(os.environ.pop(CHANNEL))
    os.set_inheritable(number, False)  # what this process starts does not hold it open
    channel = Connection(number)
    spec: WorkerSpec = channel.recv()
    set_for_cuda(os.environ, workspace_of(spec.workload.settings))
    # What CUDA reads from the environment must be there before torch is loaded.
    from workers.engine.engine import Engine  # noqa: PLC0415

    engine = Engine(spec)
    try:
        channel.send(True)
        while True:
            channel.send(engine.run_slice(channel.recv()))
    except (EOFError, ConnectionError):
        return


def _print_by_lines() -> None:
    """Have Python and the C library hand on each line: what they still held when this process dies
    would be lost.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        library = ctypes.CDLL(None)
        library.setvbuf(
            ctypes.c_void_p.in_dll(library, "stdout"), None, _LINE_BUFFERED, ctypes.c_size_t(0)
        )


if __name__ == "__main__":
    main()
