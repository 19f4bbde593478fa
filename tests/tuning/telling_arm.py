"""An arm that only tells its environment."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection


def serve(connection: Connection, _: object) -> None:
    """Send it."""
    connection.send(dict(os.environ))
