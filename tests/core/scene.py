"""A slot on a stage of its own: its clock, what it is fed, and reports and failures of its slices to feed it with.

Shared by the tests of the lifecycle. Knows nothing of what should come out. Here, too, is the
configuration that is shipped, for all tests that plan or run it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from orchestrator.config.load import load_config
from orchestrator.core.fleet import SliceFailed, SliceFailure, SliceReported
from orchestrator.core.lifecycle import advance
from orchestrator.core.slot import (
    Command,
    Event,
    Moment,
    NodeJoined,
    Note,
    Phase,
    Rules,
    Slot,
    Tick,
)
from tests.counting import with_counts
from tests.scene import ROOT
from workers.messages import DeviceInfo, Directive, MemoryInfo, Report, Verdict, WorkerState

MIB = 2**20

REFERENCE = load_config(str(ROOT / "cluster.yaml"))

RULES = Rules(
    slice_s=1.0,
    hang_timeout_s=60.0,
    stale_after_s=10.0,
    start_timeout_s=120.0,
    restart_backoff_s=1.0,
    restart_backoff_max_s=5.0,
    max_deaths=6,
    death_window_s=300.0,
    max_workload_errors=3,
)

CPU = DeviceInfo(
    kind="cpu",
    name="a processor",
    uuid=None,
    total_bytes=None,
    context_bytes=0,
    context_source="none",
    peak_source="none",
    cap_bytes=200 * MIB,
    dtype="fp32",
    threads=1,
    pid=4711,
    hostname="pc1",
    torch_version="2.9",
)

MEMORY = MemoryInfo(
    device_total_bytes=None,
    device_used_bytes=None,
    free_bytes=100 * MIB,
    allocated_bytes=80 * MIB,
    reserved_bytes=80 * MIB,
    peak_bytes=80 * MIB,
    alloc_retries=0,
)


def report_of(slot: str, incarnation: int, sequence: int, **changes: object) -> Report:
    """Make the report of a steady worker, with some fields changed."""
    usual: dict[str, Any] = {
        "slot": slot,
        "incarnation": incarnation,
        "sequence": sequence,
        "verdict": Verdict.OK,
        "state": WorkerState.RUNNING,
        "reason": "steady",
        "device": None,
        "memory": None,
        "size": 8192,
        "batch": 128,
        "claim_bytes": 1,
    }
    return Report(**with_counts({**usual, **changes}))


class Scene:
    """One slot, from the beginning."""

    def __init__(
        self,
        *,
        ends_at_s: float | None = None,
        slot: str = "pc1/0",
        **rules: Any,
    ) -> None:
        """Begin at second 1000, with some rules changed."""
        self.slot = Slot(slot=slot)
        self.now_s = 1000.0
        self.ends_at_s = ends_at_s
        self.rules = replace(RULES, **rules)

    @classmethod
    def joined(cls, **begin: Any) -> Self:
        """Begin on a node that is there."""
        scene = cls(**begin)
        scene.feed(NodeJoined())
        return scene

    @classmethod
    def working(cls, **begin: Any) -> Self:
        """Begin with a process that has reported."""
        scene = cls(**begin)
        scene.work()
        return scene

    def feed(self, event: Event, *, later_s: float = 0.0) -> list[Command]:
        """Let time pass, then the event happen; return the commands."""
        self.now_s += later_s
        self.slot, commands = advance(
            self.slot, event, Moment(now_s=self.now_s, rules=self.rules, ends_at_s=self.ends_at_s)
        )
        return list(commands)

    def deeds(self, event: Event, *, later_s: float = 0.0) -> list[Command]:
        """As `feed`, without what only the books and the log need."""
        return [
            command
            for command in self.feed(event, later_s=later_s)
            if not isinstance(command, Note)
        ]

    def report(self, **changes: object) -> SliceReported:
        """Make the report of the running slice."""
        sequence = self.slot.in_flight[0].sequence if self.slot.in_flight else 0
        return SliceReported(report=report_of(**{**self._names(sequence), **changes}))

    def failure(self, kind: SliceFailure = SliceFailure.DIED, **changes: Any) -> SliceFailed:
        """Make the failure of the running slice."""
        usual: dict[str, Any] = {
            "slot": self.slot.slot,
            "incarnation": self.slot.incarnation,
            "sequence": self.slot.in_flight[0].sequence,
            "failure": kind,
            "text": "worker died",
        }
        return SliceFailed(**{**usual, **changes})

    def _names(self, sequence: int) -> dict[str, Any]:
        return {"slot": self.slot.slot, "incarnation": self.slot.incarnation, "sequence": sequence}

    def work(self, **changes: object) -> None:
        """Join, and report its first slice."""
        self.feed(NodeJoined())
        self.feed(self.report(**changes), later_s=1)

    def die(self) -> float:
        """Let the process die, let a new one report as soon as the slot wants one, and return how long it waited."""
        self.feed(self.failure())
        assert self.slot.phase is Phase.PAUSING
        assert self.slot.wake_at_s is not None
        wait_s = self.slot.wake_at_s - self.now_s
        # Exactly then: adding up what was waited would round.
        self.now_s = self.slot.wake_at_s
        self.feed(Tick())
        self.feed(self.report())
        return wait_s


def submits(commands: list[Command]) -> list[Directive]:
    """Return what is sent."""
    return [command for command in commands if isinstance(command, Directive)]


def sequences(commands: list[Command]) -> list[int]:
    """Return the numbers of what is sent."""
    return [command.sequence for command in submits(commands)]


def notes(commands: list[Command], name: str) -> list[dict[str, Any]]:
    """Return the fields of each note of a name."""
    return [
        dict(command.fields)
        for command in commands
        if isinstance(command, Note) and command.name == name
    ]
