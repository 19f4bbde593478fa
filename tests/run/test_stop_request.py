"""A step that leaves by a BaseException is an error of the workload.

A signal's handler ends the process.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest

from orchestrator.cluster.actor import WorkerActor
from tests.engine.scene import own, slice_of
from tests.in_child import InChild
from tests.scene import spec_of
from workers.engine.engine import Engine
from workers.messages import Directive, Report, Verdict
from workers.settings import WorkerSpec
from workers.workloads.base import StepResult, Workload


class Leaves(Workload):
    """Leaves its first steps in three ways, and works then."""

    ways = (SystemExit(3), KeyboardInterrupt(), GeneratorExit())
    steps = 0

    def step(self, size: int, batch: int) -> StepResult:
        Leaves.steps += 1
        if Leaves.steps <= len(self.ways):
            raise self.ways[Leaves.steps - 1]
        return StepResult()

    def release(self) -> None:
        pass


class IsTold(Leaves):
    """Is met by a signal in its step."""

    def step(self, size: int, batch: int) -> StepResult:
        os.kill(os.getpid(), int(os.environ["TOLD"]))
        return StepResult()


def in_a_slot(spec: WorkerSpec) -> list[Report]:
    actor = WorkerActor(spec)
    directive = {"incarnation": 0, "duration_s": 0.0, "resume": None}
    return [actor.run_slice(Directive(sequence=number, **directive)) for number in range(4)]  # type: ignore[arg-type]


def test_a_step_may_leave_in_any_way_and_the_next_works(in_child: InChild) -> None:
    *left, worked = in_child(in_a_slot, spec_of(name=own(Leaves)))
    for report, words in zip(
        left, ("SystemExit: 3", "KeyboardInterrupt", "GeneratorExit"), strict=True
    ):
        assert (report.verdict, report.counts.steps_error) == (Verdict.OK, 1)
        assert report.reason == f"the workload failed: {words}"
        assert report.error.rstrip().endswith(words)
        assert "in step" in report.error
    assert worked.counts.steps_ok == 1


def how_it_ended(spec: WorkerSpec, number: int) -> str:
    os.environ["TOLD"] = str(number)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(15))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return slice_of(Engine(spec)).reason
    except BaseException as error:  # noqa: BLE001 - it is what is asked
        return repr(error)


@pytest.mark.parametrize(
    ("number", "ended"),
    [(signal.SIGTERM, "SystemExit(15)"), (signal.SIGINT, "KeyboardInterrupt()")],
)
def test_a_signal_in_a_step_still_ends_its_process(
    in_child: InChild, number: int, ended: str
) -> None:
    assert in_child(how_it_ended, spec_of(name=own(IsTold)), number) == ended
