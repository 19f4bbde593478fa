"""Processes without a slot that have loaded torch: a training that begins on a free card takes one.

A spare is an actor like that of a slot, and reserves what the slot will. So Ray has set what it
sets for a slot, its visible card above all, before anything is imported. It opens no device, and
holds no memory of a card. A task that loads torch would not do: the next actor never gets a process
that has run a task (seen with Ray 2.60).

Does not know which cards are free (`run/dispatcher.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray

from orchestrator.cluster.actor import WorkerActor
from orchestrator.cluster.node_tasks import NODE_LABEL
from orchestrator.core.fleet import Reservation
from workers.settings import WorkerSpec


def new_actor(place: Reservation, *arguments: object) -> Any:  # noqa: ANN401 - of Ray
    """Create the actor of a slot, or with no arguments a spare."""
    # Ray hands the arguments to each new process of the actor, restarts it without a limit and
    # never repeats a call: counting and waiting are the head's.
    actor_class: Any = ray.remote(WorkerActor)
    return actor_class.options(
        num_cpus=place.num_cpus,
        num_gpus=place.num_gpus,
        label_selector={NODE_LABEL: place.node},
        max_restarts=-1,
        max_task_retries=0,
    ).remote(*arguments)


class Spares:
    """The spares of a run. No method waits for a process."""

    def __init__(self) -> None:
        self._actors: list[tuple[Reservation, Any]] = []

    def keep(self, wanted: Sequence[Reservation]) -> None:
        """Have one for each of `wanted`, and end the others."""
        missing, kept = Counter(wanted), []
        for place, actor in self._actors:
            if missing[place]:
                missing[place] -= 1
                kept.append((place, actor))
            else:
                ray.kill(actor, no_restart=True)
        self._actors = [*kept, *((place, new_actor(place)) for place in missing.elements())]

    def take(self, place: Reservation, spec: WorkerSpec) -> Any | None:  # noqa: ANN401 - as above
        """Return one for a slot, and know it no more; or end those of its node, which are in the
        way. A program loads torch by itself.
        """
        for index, (reserved, actor) in enumerate(self._actors if spec.command is None else ()):
            if reserved == place:
                del self._actors[index]
                return actor
        self.keep([reserved for reserved, _ in self._actors if reserved.node != place.node])
        return None


def other_drivers() -> bool:
    """Say whether another program is connected to the cluster, also where Ray does not tell."""
    try:
        # Private; the public way needs a running dashboard.
        from ray._private.state import jobs  # noqa: PLC0415

        own, found = ray.get_runtime_context().get_job_id(), jobs()  # type: ignore[no-untyped-call]
        return any(job["JobID"] != own and not job["IsDead"] for job in found)
    except Exception:  # noqa: BLE001 - an internal of Ray that may change with any release
        return True
