"""A run of jobs under the real supervisor, stores and dispatcher, in virtual time.

Its head may die at any moment; another head then begins in the same folder.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from orchestrator.config.load import config_from_data
from orchestrator.control.queue import put
from orchestrator.control.slots import Command, Do, events_of
from orchestrator.core.placement import Target
from orchestrator.jobs.causes import cause_of
from orchestrator.jobs.model import ON_CARD, Job, JobOrder, JobState, Standing, Submitted, UserOrder
from orchestrator.jobs.queue import with_messages
from orchestrator.record.archive import read_run
from orchestrator.record.jobs import QUEUE_NAME, queue_of, queue_snapshot
from orchestrator.record.store import STORE_NAME, RunStore
from orchestrator.run.dispatcher import Dispatcher
from orchestrator.run.resume import Past, past_of
from tests.jobs.scene import training
from tests.run.scene import AtOnce, HeadScene
from tests.run.scripted_fleet import STEPS_PER_S, Process, ScriptedFleet, VirtualClock
from workers.messages import (
    Begin,
    Cause,
    CheckpointPiece,
    Ending,
    Orders,
    Progress,
    TeamState,
    TeamStatus,
    Verdict,
    WorkerState,
)
from workers.settings import WorkerSpec

#: One PC with a 3090 for seven workers, and one with a 3070 for two.
NODES: Mapping[str, Mapping[str, object]] = {
    "pc1": {"gpu": "rtx-3090", "workers": 7, "vram_per_worker_gib": 3.0},
    "pc2": {"gpu": "rtx-3070", "workers": 2, "vram_per_worker_gib": 3.0},
}

#: Steps between two saved states of a training.
_SAVED_EVERY = 25


#: States of jobs that have done their work.
_WORK_DONE = frozenset({JobState.SAVING, JobState.DONE})


def ended_with(code: int, text: str = "", *seen: Cause) -> Ending:
    """Return the end of a program with this last output; `seen` are causes observed on its PC."""
    return Ending(cause=cause_of(code, text, seen), exit_code=code, text=text)


class HeadDiesError(BaseException):
    """The head is killed at this point, and does nothing more."""


def hash_after(name: str, steps: int, start: str = "", first: int = 0) -> str:
    """Return the hash of a training that does its steps from `first` on in order."""
    state = start or name
    for step in range(first, steps):
        state = hashlib.sha256(f"{state}:{step}".encode()).hexdigest()
    return state


class JobsFleet(ScriptedFleet):
    """Trainings that continue only from the head's copy of their state, and programs.

    Checks that the budgets on a card never exceed its memory.
    """

    def __init__(self, clock: VirtualClock, job: Callable[[str], Job]) -> None:
        super().__init__(clock)
        self._job = job
        self.specs: dict[str, WorkerSpec] = {}
        """The last placed spec of each slot."""
        self.homes: list[tuple[str, str]] = []
        """Slot and node, in the order of placements."""
        self.endings: dict[str, list[Ending]] = {}
        """The ends of each program, one for each start; the last also for all later starts."""
        self.program_steps: dict[str, int] = {}
        self.starts: Counter[str] = Counter()
        """The number of starts of each program."""
        self.kinds_of_report: dict[str, Callable[[str], Mapping[str, Any]]] = {}
        """Functions from a node to extra fields of statuses, keyed by slot."""
        self.began_at: dict[str, list[int]] = {}
        """The steps at which the processes of each training began."""
        self.curve: Callable[[str, int], float] = lambda _, step: 10.0 / (1 + step)
        """The loss of a slot at a step."""
        self._files: dict[int, tuple[int, bytes]] = {}
        """Number and content of the file that the head must keep, keyed by id of the process."""
        self._file_count = 0
        self._asked_to_end: set[int] = set()
        """Identities of processes whose program was ended in order to rest."""

    def live_on(self, node: str) -> list[str]:
        """Return the slots that have an actor on a node."""
        return [slot for slot, actor in self._actors.items() if actor.node == node]

    def place(self, spec: WorkerSpec, num_cpus: float, num_gpus: float) -> None:
        super().place(spec, num_cpus, num_gpus)
        self.specs[spec.slot] = spec
        self.homes.append((spec.slot, spec.node))
        there = self.live_on(spec.node)
        held_bytes = sum(self.specs[slot].budget_bytes for slot in there)
        assert held_bytes <= max(spec.card_budget_bytes, spec.budget_bytes), there

    def _steps_of(self, slot: str) -> int | None:
        job = self._job(slot)
        return self.program_steps.get(slot, 20) if job.command is not None else job.steps

    def _begins(self, slot: str, process: Process, begin: Begin) -> None:
        process.state, process.train_step = slot.partition("/")[0], 0
        if self._job(slot).command is not None:
            self.starts[slot] += 1
        elif begin.checkpoint is not None:
            step, process.state = begin.checkpoint.decode().split()
            process.train_step = self.saved[slot] = int(step)
        else:
            self.saved[slot] = 0
        self.began_at.setdefault(slot, []).append(process.train_step)

    def _left(self, slot: str, process: Process, steps: int) -> int:
        whole = self._steps_of(slot)
        left = steps if whole is None else int(whole - process.train_step)
        return min(steps, 0 if id(process) in self._asked_to_end else left)

    def _did(self, slot: str, process: Process, steps: int) -> None:
        first, process.train_step = process.train_step, process.train_step + steps
        if self._job(slot).command is None:
            last = process.train_step
            process.state = hash_after(slot, last, process.state or "", first)
            is_done = last >= (self._steps_of(slot) or 0)
            if steps and (is_done or last // _SAVED_EVERY > first // _SAVED_EVERY):
                self._save(slot, process)

    def _save(self, slot: str, process: Process) -> None:
        self.saved[slot] = process.train_step
        self._file_count += 1
        self._files[id(process)] = (
            self._file_count,
            f"{process.train_step} {process.state}".encode(),
        )

    def _heed(self, slot: str, process: Process, orders: Orders) -> bool:
        is_asked = orders.saves > process.saves
        is_news = super()._heed(slot, process, orders)
        if self._job(slot).command is not None:
            if is_asked or orders.holds:
                self._asked_to_end.add(id(process))
            elif id(process) in self._asked_to_end:
                self._asked_to_end.remove(id(process))
                process.train_step = 0
                self.starts[slot] += 1
        elif is_asked:
            self._save(slot, process)
        kept, (number, data) = orders.kept, self._files.get(id(process), (0, b""))
        if kept is not None and kept.number == number and kept.size_bytes == len(data):
            self._files[id(process)] = number, b""
            return True
        return is_news

    def _more(self, slot: str, process: Process) -> dict[str, Any]:
        said = self.kinds_of_report.get(slot)
        if said is not None and (status := said(self._actors[slot].node)):
            return dict(status)
        if self._job(slot).command is not None:
            return self._of_program(slot, process)
        return self._of_training(slot, process)

    def _of_program(self, slot: str, process: Process) -> dict[str, Any]:
        status: dict[str, Any] = {"progress": Progress()}
        if id(process) in self._asked_to_end:
            ended = Ending(cause=Cause.PARKED, signal=15, was_asked=True)
            at_rest = {"verdict": Verdict.OK, "state": WorkerState.RUNNING, "reason": "at rest"}
            return {**status, **at_rest, "ended": ended, "is_held": True}
        if process.train_step >= (self._steps_of(slot) or 0):
            endings = self.endings.get(slot) or [ended_with(0)]
            ended = endings[min(self.starts[slot], len(endings)) - 1]
            status |= {"ended": ended, "verdict": Verdict.DONE, "state": WorkerState.DONE}
            status["reason"] = f"exit code {ended.exit_code}"
        return status

    def _of_training(self, slot: str, process: Process) -> dict[str, Any]:
        steps, last = self._job(slot).steps, process.train_step
        assert steps is not None
        is_done = last >= steps
        status: dict[str, Any] = {}
        number, data = self._files.get(id(process), (0, b""))
        if data:
            status["checkpoint"] = CheckpointPiece(
                number=number, offset_bytes=0, total_bytes=len(data), data=data
            )
        orders = self._actors[slot].orders
        if self.specs[slot].team is not None:
            generation = None if orders is None or orders.team is None else orders.team.generation
            state = TeamState.REJOINING if generation is None else TeamState.TOGETHER
            status["team"] = TeamStatus(
                state=state, listens=f"{slot}:1", generation=generation, step=last, share_pct=50.0
            )
        status["save_due"] = bool(data)
        status["progress"] = Progress(
            train_step=last,
            train_steps=steps,
            saved_step=self.saved[slot],
            eta_s=(steps - last) / STEPS_PER_S,
            loss=self.curve(slot, last),
            weights_sha256=process.state if is_done else None,
        )
        if is_done:
            status |= {"verdict": Verdict.DONE, "state": WorkerState.DONE, "reason": "all is done"}
        return status


class NotedStore(RunStore):
    """Records the standings of jobs at each commit, including commits of earlier heads."""

    history: list[Mapping[str, Standing]]

    def commit(self, patience_s: float = 0.1) -> bool:
        is_stored = super().commit(patience_s)
        if is_stored and self._queue is not None:
            self.history.append(self._queue.standings)
        return is_stored


class JobsRun(HeadScene):
    """One head of a run of jobs."""

    store: NotedStore
    store_type = NotedStore

    def __init__(
        self,
        folder: Path,
        *jobs: Job,
        history: list[Mapping[str, Standing]] | None = None,
        clock: VirtualClock | None = None,
        stays: bool = False,
        device: str = "cpu",
        one_machine: bool = True,
        interrupted: Callable[[], bool] = lambda: False,
        **sections: object,
    ) -> None:
        """Begin a queue, or continue a stored one."""
        self.queue_folder = folder / QUEUE_NAME
        config = config_from_data(
            {"nodes": NODES, "run": {"duration": "365d"}, **sections}, "scene"
        )
        past = past_of(read_run(folder)) if (folder / STORE_NAME).exists() else Past()
        super().__init__(folder, config, clock or VirtualClock(), past)
        self.queue_folder.mkdir(mode=0o700, exist_ok=True)
        queue = queue_of(folder)
        self.store.history = [] if history is None else history
        submitted = [Submitted(job=job) for job in jobs]
        queue = with_messages(queue, submitted, self.began_unix_s)
        self.store.queue(queue)
        self.store.commit()
        self.fleet = JobsFleet(
            self.clock,
            lambda slot: self.dispatcher.queue.standings[slot.partition("/")[0]].job,
        )
        for name in NODES:
            self.fleet.join(name)
        self.dispatcher = Dispatcher(
            folder=self.queue_folder,
            config=config,
            target=Target(device=device, one_machine=one_machine),
            events=self.log,
            store=self.store,
            queue=queue,
            stays=stays,
            before_unix_s=past.updated_at_unix_s,
        )
        self.dispatcher._files._threads = AtOnce()  # type: ignore[assignment]
        self.dispatcher._threads = AtOnce()  # type: ignore[assignment]
        self._begin(
            self.fleet,
            self.dispatcher.resumed(),
            interrupted=interrupted,
            dispatcher=self.dispatcher,
        )
        self.store.commit()

    # What happens

    def finish(self) -> dict[str, Standing]:
        """Run to the end of the queue."""
        self.supervisor.run()
        self.close("good", 0)
        return self.standings()

    def until(self, after_s: float) -> None:
        """Let the head work until `after_s` seconds after its beginning."""
        while self.clock.now_s < self.fleet.began_s + after_s:
            assert not self.supervisor._over(), "it ended early"
            self.supervisor._turn()

    def until_state(self, name: str, *states: JobState, within_s: float = 600.0) -> None:
        """Let the head work until a job is in one of these states."""
        until_s = self.clock.now_s + within_s
        while self.standing(name).state not in states:
            assert self.clock.now_s < until_s, self.standing(name)
            self.supervisor._turn()

    def die(self) -> None:
        """End the head as SIGKILL does: the system closes its files, and it does nothing more."""
        self.log.close()
        self.store._disconnect()

    def may_die(self, chance: float, seed: int) -> None:
        """Let the head die at random before or after any action whose effect outlives it."""
        draws = random.Random(seed)  # noqa: S311 - moments, not secrets

        def mortal(do: Callable[..., Any]) -> Callable[..., Any]:
            def done(*given: Any) -> Any:
                if draws.random() < chance:
                    raise HeadDiesError
                result = do(*given)
                if draws.random() < chance:
                    raise HeadDiesError
                return result

            return done

        for owner, names in (
            (self.store, ("commit",)),
            (self.fleet, ("place", "order", "abandon")),
        ):
            for name in names:
                setattr(owner, name, mortal(getattr(owner, name)))

    # What users do

    def command(self, do: Do, job: str) -> None:
        """Give a command about a job's slot, as `top` and its verbs do."""
        events = events_of(
            Command(id="x", do=do, slots=(job,), by="ann"),
            self.supervisor._slots,
            self.supervisor._plans,
            queued=self.dispatcher.rests(),
        )
        for name, event in events:
            self.supervisor._feed(name, event)

    def say(self, order: JobOrder, job: str) -> None:
        """Leave an order about a job for the head."""
        at_s = self.clock.unix_s()
        said = UserOrder(id=f"{order}-{job}-{at_s}", order=order, job=job, by="ann")
        put(self.queue_folder, [said])

    # What tests observe

    def standing(self, name: str) -> Standing:
        return self.dispatcher.queue.standings[name]

    def shown(self, name: str) -> Standing:
        """Return the standing of a job as viewers see it, with the reason why it waits."""
        snapshot = queue_snapshot(self.folder, (), self.clock.unix_s())
        assert snapshot is not None
        return next(each for each in snapshot.standings if each.job.name == name)

    def standings(self) -> dict[str, Standing]:
        """Return the stored standings of the jobs."""
        return dict(queue_of(self.folder).standings)

    def begun(self) -> list[str]:
        """Return the jobs whose attempts have begun, in order."""
        return [event["job"] for event in self.events("job_attempt_begun")]


class JobsMaker:
    """Makes heads of one run of jobs; see `JobsRun`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: list[JobsRun] = []
        self.history: list[Mapping[str, Standing]] = []

    def __call__(self, *jobs: Job, **settings: Any) -> JobsRun:
        self.runs.append(JobsRun(self.folder, *jobs, history=self.history, **settings))
        return self.runs[-1]

    def next_head(self, before: JobsRun, *jobs: Job, **settings: Any) -> JobsRun:
        """Begin another head in the same folder, 5 s later."""
        before.clock.sleep(5.0)
        return self(*jobs, clock=before.clock, **settings)


def short(name: str, steps: int = 100, **more: Any) -> Job:
    return training(name, steps=steps, **more)


def team(name: str, steps: int = 100, **more: Any) -> Job:
    pcs = ("pc1", "pc2")
    return short(name, steps, overrides={"train.team": list(pcs)}, nodes=pcs, **more)


def divided(name: str, steps: int = 100, **more: Any) -> Job:
    job = team(name, steps, **more)
    return replace(job, overrides={**job.overrides, "train.split": "layers"})


def check_ends(run: JobsRun) -> None:
    """Check that jobs were done once, trainings with their steps in order, never two on a card."""
    standings = run.standings()
    for name, standing in standings.items():
        assert standing.state is JobState.DONE, standing
        if standing.job.steps is not None and standing.job.command is None:
            assert standing.sha256 == hash_after(name, standing.job.steps)
    done = Counter[str]()
    for before, after in pairwise(run.store.history):
        there = [standing for standing in after.values() if standing.state in ON_CARD]
        on_card = [card for standing in there for card in standing.places.values()]
        assert len(set(on_card)) == len(on_card), on_card
        for name, was in before.items():
            done[name] += was.state in ON_CARD and after[name].state in _WORK_DONE
    assert done == dict.fromkeys(standings, 1)
