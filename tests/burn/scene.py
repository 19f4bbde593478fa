"""Workers as a burn-in sees them, for the tests of its verdicts and its drawing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.lab.burn.verdict import Measured
from orchestrator.record.model import Row
from workers.messages import Progress, StepCounts, WorkerState

LENGTH_S = 600.0

#: A worker of a card that did all it should.
ROW = Row(
    slot="pc1/0",
    node="pc1",
    gpu_name="NVIDIA GeForce RTX 3090",
    device="cuda",
    state=WorkerState.RUNNING,
    reason="",
    dtype="fp16",
    cap_bytes=1000,
    reserved_bytes=950,
    counts=StepCounts(steps_ok=100, verify_checks=10),
)

#: It while it works.
GOOD = replace(ROW, tflops=20.0, temperature_c=70.0, temperature_of="card", throttle_pct=0.0)

#: What is seen of a worker, beside its row as the run ended.
SEEN = frozenset({"state", "tflops", "reserved_bytes", "temperature_c", "throttle_pct", "power_w"})


def measured(
    row: Row = ROW,
    *,
    length_s: float = LENGTH_S,
    alarms: tuple[str, ...] = (),
    unchecked: str | None = None,
    samples_per_s: float | None = None,
    **changes: Any,
) -> Measured:
    """A worker seen once a second; `changes` are fields of a row, or functions of the time."""
    looks = []
    seen = replace(GOOD, progress=Progress(samples_per_s=samples_per_s))
    for at_s in range(1, int(length_s)):
        values = {
            name: value(at_s) if callable(value) else value for name, value in changes.items()
        }
        looks.append((float(at_s), replace(seen, **values)))
    return Measured(row=row, length_s=length_s, looks=looks, alarms=alarms, unchecked=unchecked)
