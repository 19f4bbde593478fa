"""A step that leaves by a BaseException is an error of the workload.

A signal's handler ends the process.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.engine.scene import begun, own, turn, turns
from tests.in_child import InChild
from tests.scene import spec_of
from workers.messages import Status, Verdict
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


def in_a_slot(spec: WorkerSpec) -> list[Status]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the process of an engine: it is the head's
    return turns(spec, [{}] * 4)


def test_a_step_may_leave_in_any_way_and_the_next_works(in_child: InChild) -> None:
    *left, worked = in_child(in_a_slot, spec_of(name=own(Leaves)))
    for status, words in zip(
        left, ("SystemExit: 3", "KeyboardInterrupt", "GeneratorExit"), strict=True
    ):
        assert (status.verdict, status.counts.steps_error) == (Verdict.OK, 1)
        assert status.reason == f"the workload failed: {words}"
        assert status.error.rstrip().endswith(words)
        assert "in step" in status.error
    assert worked.counts.steps_ok == 1


def how_it_ended(spec: WorkerSpec, number: int) -> str:
    os.environ["TOLD"] = str(number)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(15))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return turn(begun(spec)).reason
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
