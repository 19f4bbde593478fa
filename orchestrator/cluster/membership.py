"""Asks a Ray head whether it counts a node in. Runs as a process of its own: Ray's client ends its
process at times.

    python -m orchestrator.cluster.membership HOST:PORT NODE_ID       exit code: 0 it does, 3 it
    does not, else unknown

The environment must say how to authenticate. Does not join anything.
"""

from __future__ import annotations

import signal
import sys

MEMBER, NOT_A_MEMBER = 0, 3

#: Ray's client waits without an end for a head that is silent. A loaded machine takes a quarter of
#: this to import it.
_PATIENCE_S = 60


def main(address: str, node_id: str) -> int:
    """Ask, and return the exit code."""
    signal.alarm(_PATIENCE_S)  # its default action ends the process
    from ray import NodeID  # noqa: PLC0415 - the patience includes the import
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # noqa: PLC0415 - the module has no types

    client = GcsClient(address=address)
    (is_member,) = client.check_alive([NodeID.from_hex(node_id)], timeout=10)
    return MEMBER if is_member else NOT_A_MEMBER


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
