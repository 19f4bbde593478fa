"""An arm that has a loader process, as a training with `loader_workers`."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import psutil


def _load() -> None:
    pass


def serve(connection: Connection, _: object) -> None:
    """Send the process ids of what forked the loader process and of what tidies up after it."""
    multiprocessing.set_forkserver_preload(["workers.training.loader_server"])
    loader = multiprocessing.get_context("forkserver").Process(target=_load)
    loader.start()
    loader.join()
    connection.send([each.pid for each in psutil.Process().children()])
