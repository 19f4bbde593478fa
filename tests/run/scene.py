"""A whole run with real supervisor, store and event log, on a scripted fleet in virtual time."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

from orchestrator.config.load import config_from_data
from orchestrator.config.schema import Config
from orchestrator.config.team import with_team_alone
from orchestrator.core.fleet import Fleet
from orchestrator.core.placement import SlotPlan, Target, plan_slots
from orchestrator.lab.chaos import Chaos
from orchestrator.record.archive import StoredRun, read_answer, read_run
from orchestrator.record.command_file import put
from orchestrator.record.events import EventLog
from orchestrator.record.model import Row, Snapshot
from orchestrator.record.store import STORE_NAME, RunStore
from orchestrator.run.resume import Past
from orchestrator.run.supervisor import Outlets, Supervisor
from orchestrator.run.terminal import Interrupts
from tests.factories import facts_of
from tests.run.scripted_fleet import ScriptedFleet, VirtualClock
from tests.scene import events_in
from workers.messages import Verdict


class AtOnce:
    """An executor that does work at once, because threads do not use the virtual time."""

    def submit(self, work: Callable[..., Any], *given: object, **named: object) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*given, **named))
        except Exception as error:  # noqa: BLE001 - as in an executor
            done.set_exception(error)
        return done


class Recorder:
    """A watcher that records the snapshots it is shown."""

    def __init__(self) -> None:
        self.shown: list[Snapshot] = []

    def update(self, snapshot: Snapshot) -> None:
        self.shown.append(snapshot)

    def close(self, snapshot: Snapshot) -> None:
        self.shown.append(snapshot)


class HeadScene:
    """The files, the watcher and the supervisor of one head in one folder."""

    store_type: ClassVar[type[RunStore]] = RunStore
    fleet: ScriptedFleet
    """The fleet for the test's script."""
    may_be_illegal = False
    """Whether an event that the lifecycle does not allow may occur."""

    def __init__(self, folder: Path, config: Config, clock: VirtualClock, past: Past) -> None:
        self.folder, self.config, self.clock, self.past = folder, config, clock, past
        self.began_unix_s = clock.unix_s()
        self.store = self.store_type(folder / STORE_NAME, monotonic_s=clock.monotonic_s)
        self.log = EventLog(folder / "events.jsonl", unix_s=clock.unix_s, also=self._on_event)
        self.recorder = Recorder()
        self._outlets = Outlets(watchers=(self.recorder,), events=self.log, store=self.store)

    def _begin(
        self, fleet: Fleet, plans: Sequence[SlotPlan], *, chaos: str | None = None, **more: Any
    ) -> None:
        facts = facts_of(
            self.config,
            started_at_unix_s=self.began_unix_s,
            elapsed_s=self.past.elapsed_s,
            chaos=chaos,
            host=socket.gethostname(),
            # Another head has another process.
            head_pid=2**22 + (1 if self.past.elapsed_s == 0 else 2),
        )
        self.store.begin(facts)
        self.supervisor = Supervisor(
            past=self.past,
            config=self.config,
            plans=tuple(plans),
            fleet=fleet,
            outlets=self._outlets,
            folder=self.folder,
            clock=self.clock,
            **more,
        )

    def _on_event(self, entry: Mapping[str, Any]) -> None:
        """Check an event."""
        assert self.may_be_illegal or entry["event"] != "illegal_event", entry

    def finish(self) -> dict[str, Row]:
        """Run to the end; return the last row of each slot."""
        snapshot = self.supervisor.run()
        self.store.end("good", 0, None, self.faults())
        return {row.slot: row for row in snapshot.rows}

    def faults(self) -> list[dict[str, Any]]:
        """Return the injected faults."""
        return []

    def close(self, outcome: str = "interrupted", code: int = 130) -> None:
        """Close the files of a head that ends by itself."""
        self.log.close()
        self.store.end(outcome, code, None, ())

    def events(self, name: str, **fields: object) -> list[dict[str, Any]]:
        """Return the events with this name and fields, with `at_s`, seconds after the beginning."""
        found = events_in(self.folder, name, **fields)
        for event in found:
            event["at_s"] = datetime.fromisoformat(event["at"]).timestamp() - self.began_unix_s
        return found


class Asked:
    """A command that is sent during a run, and whose answer is read after the run."""

    def __init__(self, run: HeadScene, after_s: float, do: str, *slots: str, **more: Any) -> None:
        self._folder, self._id = run.folder, more.pop("id", f"{do} at {after_s}")
        told = {"id": self._id, "do": do, "slots": list(slots), "by": "test", **more}
        content = json.dumps(told).encode()
        run.fleet.at(after_s, lambda: put(run.folder, content, identity=self._id))

    def answer(self) -> dict[str, Any]:
        return dict(read_answer(self._folder, self._id) or {})


class Run(HeadScene):
    """One run; its script is written on `fleet` before `finish`."""

    fleet_type: ClassVar[type[ScriptedFleet]] = ScriptedFleet

    def __init__(  # noqa: PLR0913 - tests vary each of these
        self,
        folder: Path,
        *,
        pc1: int = 1,
        pc2: int = 1,
        pc3: int = 0,
        absent: tuple[str, ...] = (),
        chaos: str | None = None,
        chaos_seed: int = 0,
        past: Past | None = None,
        interrupts: Interrupts | None = None,
        sections: Mapping[str, object] = MappingProxyType({}),
        **settings: object,
    ) -> None:
        """Prepare a run of two or three nodes; `settings` are keys of `run:`, and `sections` are
        other sections.
        """
        nodes = {
            name: {"gpu": "rtx-3090", "workers": workers, "vram_per_worker_gib": 2.0}
            for name, workers in (("pc1", pc1), ("pc2", pc2), ("pc3", pc3))
            if workers
        }
        of_run = {"duration": "20s", **settings}
        config = config_from_data({"nodes": nodes, "run": of_run, **sections}, "scene")
        config = with_team_alone(config)
        self.chaos = None if chaos is None else Chaos(chaos, chaos_seed)
        super().__init__(folder, config, VirtualClock(), past or Past())
        self.fleet = self.fleet_type(self.clock)
        for name in nodes:
            if name not in absent:
                self.fleet.join(name)
        fleet = cast("Fleet", self.fleet)
        if self.chaos is not None:
            fleet = self.chaos.around(fleet, self.log, self.clock)
        self._begin(
            fleet,
            plan_slots(config, Target(device="cpu")),
            chaos=chaos,
            interrupted=lambda: interrupts is not None and interrupts.asked,
        )

    def _on_event(self, entry: Mapping[str, Any]) -> None:
        super()._on_event(entry)
        if self.chaos is not None:
            self.chaos.on_event(entry)

    def can_never_work(self, slot: str, how: str) -> None:
        """Make a slot's workers report that they can never work, or fail to be built."""
        if how != "unbuildable":
            self.fleet.says[slot] = {
                "verdict": Verdict(how),
                "reason": f"{slot}: no such card",
            }
        else:
            self.fleet.unbuildable.add(slot)

    def faults(self) -> list[dict[str, Any]]:
        return [] if self.chaos is None else self.chaos.injected()

    def finish(self) -> dict[str, Row]:
        """Run to the end, compare the counts, and return the last row of each slot."""
        rows = super().finish()
        self.check_books()
        return rows

    def check_books(self) -> None:
        """Check that each step done is counted once, except for steps in lost answers."""
        for slot in self.stored().slots:
            before = self.past.slots.get(slot.slot)
            counted = slot.row.counts.steps_ok
            if before is not None:
                counted -= before.counts.steps_ok
            done, unseen = self.fleet.really_done[slot.slot], self.fleet.unseen(slot.slot)
            assert counted == done - unseen, slot
            begun = [orders.incarnation for orders in self.fleet.begun.get(slot.slot, [])]
            assert begun == sorted(set(begun)), slot

    def stored(self) -> StoredRun:
        """Return the content of the store."""
        return read_run(self.folder)

    def states(self, slot: str) -> list[str]:
        """Return the states of a slot after STARTING, in order."""
        return [event["to_state"] for event in self.events("state", slot=slot)]

    def shown(self, slot: str) -> list[Row]:
        """Return all rows of a slot that a watcher was shown."""
        return [
            row for snapshot in self.recorder.shown for row in snapshot.rows if row.slot == slot
        ]
