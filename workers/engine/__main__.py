"""The engine of a slot as a program of its own: `python -m workers.engine`, started by a keeper.

It reads a `WorkerSpec` and then one `Directive` after the other from its channel, and answers each
with a `Report`. It ends when nobody holds the other end any more. Decides nothing.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from multiprocessing.connection import Connection

from workers.host.cuda_environment import set_for_cuda, workspace_of
from workers.keeper.task import CHANNEL
from workers.settings import WorkerSpec


def main() -> None:
    """Run slices until the other end of the channel is closed."""
    # Ctrl-C is the head's: a KeyboardInterrupt in this process is the workload's own error.
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    faulthandler.enable()
    number = int(os.environ.pop(CHANNEL))
    os.set_inheritable(number, False)  # what this process starts does not hold it open
    channel = Connection(number)
    spec: WorkerSpec = channel.recv()
    set_for_cuda(os.environ, workspace_of(spec.workload.settings))
    # What CUDA reads from the environment must be there before torch is loaded.
    from workers.engine.engine import Engine  # noqa: PLC0415

    engine = Engine(spec)
    try:
        while True:
            channel.send(engine.run_slice(channel.recv()))
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    main()
