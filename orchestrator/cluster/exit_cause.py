"""Asks Ray why a worker's process ended.

An actor that Ray restarts fails its calls with "the actor was restarted" and no cause (Ray 2.60). The cause is in the
table of worker processes that Ray's head keeps. The public way to it needs a running dashboard, so this reads the table
itself. Nothing here raises: what cannot be read is unknown.
"""

from __future__ import annotations

from typing import Any

from orchestrator.core.fleet import DeathCause

#: Name of Ray's exit type for a process that its memory monitor has killed (ray/protobuf/common.proto).
_OUT_OF_HOST_MEMORY = "NODE_OUT_OF_MEMORY"

_TEXT_LIMIT = 500


def cause_of_death(pid: int, address: str) -> DeathCause | None:
    """Return why the process with this id on the node at `address` ended; `None` if Ray does not say."""
    try:
        # Ray's own tools read it so; there is no public call without a dashboard.
        from ray._private.state import state  # noqa: PLC0415 - private: its absence must not break the fleet
        from ray.core.generated import gcs_pb2  # noqa: PLC0415 - as above

        table = state._connect_and_get_accessor().get_worker_table()
        kind: Any = vars(gcs_pb2)["WorkerTableData"]  # made at run time, and nowhere declared
        entries = [kind.FromString(entry) for entry in table]
        names = kind.DESCRIPTOR.fields_by_name["exit_type"].enum_type.values_by_number
        dead = [
            entry
            for entry in entries
            if not entry.is_alive and entry.pid == pid and entry.worker_address.ip_address == address
        ]
        if not dead:
            return None
        last = max(dead, key=lambda entry: int(entry.end_time_ms))
        text = " ".join(str(last.exit_detail).split())[:_TEXT_LIMIT]
        return DeathCause(host_memory=names[last.exit_type].name == _OUT_OF_HOST_MEMORY, text=text)
    except Exception:  # noqa: BLE001 - an internal of Ray that may change with any release
        return None
