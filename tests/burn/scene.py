"""Workers as a burn-in sees them, for the tests of its verdicts and its drawing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.lab.burn.verdict import Measured, WorkerSample
from orchestrator.record.model import Row
from workers.messages import StepCounts, WorkerState

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

GOOD = WorkerSample(
    at_s=0.0,
    state=WorkerState.RUNNING,
    tflops=20.0,
    reserved_bytes=950,
    temperature_c=70.0,
    throttle_pct=0.0,
)


def measured(
    row: Row = ROW,
    *,
    length_s: float = LENGTH_S,
    alarms: tuple[str, ...] = (),
    unchecked: str | None = None,
    **changes: Any,
) -> Measured:
    """A worker seen once a second; `changes` are fields of a sample, or functions of its time."""
    samples = []
    for at_s in range(1, int(length_s)):
        values = {
            name: value(at_s) if callable(value) else value for name, value in changes.items()
        }
        samples.append(replace(GOOD, at_s=float(at_s), **values))
    return Measured(row=row, length_s=length_s, samples=samples, alarms=alarms, unchecked=unchecked)
