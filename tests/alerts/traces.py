"""A made-up run at one look: two PCs with a card and two slots each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from orchestrator.record.archive import StoredRun
from orchestrator.record.jobs import QueueSnapshot
from orchestrator.record.model import Row
from orchestrator.view.alerts import Frame, Freshness
from tests.factories import FACTS, STARTED_UNIX_S, make_row, make_standing, record
from workers.messages import MemoryInfo, StepCounts
from workers.readings import SensorReading

SLOT: Final = "pc1/0"
"""To which something happens."""

_FACTS: Final = replace(
    FACTS,
    run_id="20231114-221320-0b76",
    duration_s=7200.0,
    mode="cluster",
    one_machine=False,
    config_yaml="workload: {name: matmul}\n",
    head_pid=1,
)


def frame_at(second: float, *, slots_per_node: int = 2, **changed: Any) -> Frame:
    """Return a healthy run so many seconds after its beginning, but for what is said: `on` slots of
    such names.
    """
    parts = (Row, StepCounts, SensorReading, MemoryInfo)
    of_slot = {key: changed.pop(key) for part in parts for key in part.__slots__ if key in changed}
    nodes, where = changed.pop("nodes_seen", ("pc1", "pc2")), changed.pop("on", SLOT)
    held = changed.pop("held", None)
    jobs = tuple(make_standing("lr-0", state) for state in changed.pop("jobs", ()))
    queue = QueueSnapshot(standings=jobs, held=held, now_s=STARTED_UNIX_S + second)
    disk_free_bytes = changed.pop("disk_free_bytes", None)
    freshness, late_s = changed.pop("freshness", Freshness.LIVE), changed.pop("late_s", 0.25)
    names = [
        (node, f"{node}/{index}") for node in ("pc1", "pc2") for index in range(slots_per_node)
    ]
    well = {"steps_ok": int(8 * second), "verify_checks": int(second)}
    well |= {"work_flop": 1e13 * second, "busy_s": 0.6 * second}
    well |= {"sm_clock_mhz": 1695, "utilisation_pct": 98.0, "fan_pct": 60.0}
    rows = tuple(
        make_row(
            slot=name,
            node=node,
            gpu_uuid=f"GPU-{node}",
            **{**well, **(of_slot if name.startswith(where) else {})},
        )
        for node, name in names
    )
    run = StoredRun(
        folder=Path(),
        facts=_FACTS,
        elapsed_s=second,
        outcome=changed.pop("outcome", "running"),
        exit_code=changed.pop("exit_code", None),
        error=None,
        updated_at_unix_s=STARTED_UNIX_S + second - late_s,
        nodes_seen=nodes,
        notices=(),
        incomplete=changed.pop("incomplete", False),
        faults=(),
        slots=tuple(
            record(row=row) for row in rows
        ),
    )  # fmt: skip
    if changed:
        raise TypeError(f"nothing has {', '.join(changed)}")
    return Frame(
        run=run,
        snapshot=run.snapshot(),
        events=(),
        freshness=freshness,
        late_s=late_s,
        queue=queue if jobs or held else None,
        disk_free_bytes=disk_free_bytes,
    )
