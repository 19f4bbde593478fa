"""The fleet on Ray: actors, slices in flight, and Ray's errors as values of `core.fleet`.

Needs a connection (`connect.py`, `local_cluster.py`) and decides nothing: every method does one
thing to Ray.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)

from orchestrator.cluster.actor import WorkerActor
from orchestrator.cluster.command_folder import sent_folder
from orchestrator.cluster.kept_engine import ProgramEnded
from orchestrator.cluster.liveness import Pulse
from orchestrator.cluster.node_tasks import NODE_LABEL, ProcessWatch, in_a_line, status_command
from orchestrator.cluster.raylets import Raylets
from orchestrator.core.fleet import (
    DeathCause,
    NodeFact,
    Reservation,
    SliceEnded,
    SliceFailed,
    SliceFailure,
    SliceReported,
)
from orchestrator.errors import NoClusterError, PreflightError, UsageError
from workers.host.machine import visible_cards
from workers.messages import Activity, Directive, Report
from workers.settings import WorkerSpec

#: What Ray's one type for "the actor is temporarily unavailable" means, by its words (Ray 2.60):
#: the connection broke under the call, or there was none to send it over. "The actor was restarted"
#: is neither: the call may have come just after a death that is known already.
_UNAVAILABLE = {
    "Socket closed": SliceFailure.DIED,
    "Connection reset by peer": SliceFailure.DIED,
    "actor is restarting": SliceFailure.UNSENT,
    "Failed to connect to remote host": SliceFailure.UNSENT,
}

#: A process that only asks the driver starts in a second or two, on a busy PC in ten.
_PROBE_TIMEOUT_S = 60.0

#: Name of Ray's exit type for a process that its memory monitor has killed
#: (ray/protobuf/common.proto).
_OUT_OF_HOST_MEMORY = "NODE_OUT_OF_MEMORY"

_CAUSE_CHARS = 500

#: What the head is called in its own `Pulse`.
_HEAD = "head"

#: A head with a store of its own (Redis) that is started again is back within this time; any other
#: does not come back.
_HEAD_MAY_BE_AWAY_S = 3.0
_HEAD_GONE = (
    "the Ray head at {address} has ended, and the cluster with it; what was reported until then "
    "is in the run folder; "
    "start the cluster again (`python -m orchestrator up` shows how), then `python -m "
    "orchestrator run --resume`"
)


@dataclass(frozen=True, slots=True)
class _Flight:
    slot: str
    directive: Directive
    given_up: bool = False
    """Its failure is no longer returned. A report that still arrives is, to be refused and logged.
    """


class RayFleet:
    """See `orchestrator.core.fleet.Fleet`."""

    def __init__(self, address: str, raylets: Raylets | None) -> None:
        """Take over the connection of this process to the head at `address`.

        `raylets` are this run's own nodes.
        """
        self._raylets = raylets
        self._address = address
        self._pulse = Pulse()
        self._head_pulse = Pulse()
        self._head_away_since_s: float | None = None
        self._last_nodes: tuple[NodeFact, ...] = ()
        self._actors: dict[str, Any] = {}
        self._flights: dict[Any, _Flight] = {}
        self._pids: dict[str, int] = {}
        """Ray's process of each slot, once it has come up."""
        self._specs: dict[str, WorkerSpec] = {}
        self._up: dict[str, int] = {}
        """The process of each slot that computes, once it has come up for the incarnation."""
        self._coming_up: dict[str, Any] = {}
        """Of each slot the question for the ids of its present processes."""
        self._watch = ProcessWatch()
        self._memory_kills: dict[str, str] = {}
        """Of each slot whose program the kernel killed for want of RAM, how it ended."""

    def nodes(self) -> tuple[NodeFact, ...]:
        """While Ray's own store does not answer, what it last said still stands, for some seconds.

        Raises:
            NoClusterError: The cluster's head has ended. Ray would say so after 60 s, and end this
                process.
        """
        if self._raylets is not None:
            self._raylets.reap()
        now_s = time.monotonic()
        host, _, port = self._address.rpartition(":")
        self._head_pulse.silent({_HEAD: (host.strip("[]"), int(port))}, now_s)
        if not self._head_pulse.answered(_HEAD, now_s):
            self._head_away_since_s = (
                now_s if self._head_away_since_s is None else self._head_away_since_s
            )
            if now_s - self._head_away_since_s > _HEAD_MAY_BE_AWAY_S:
                raise NoClusterError(_HEAD_GONE.format(address=self._address))
            return self._last_nodes  # Ray would not return before the head answers
        self._head_away_since_s = None
        try:
            # No types here.
            live = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        except Exception:  # noqa: BLE001 - Ray raises many types when its store restarts
            return self._last_nodes
        doors = {
            node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in live
        }
        silent = self._pulse.silent(doors, now_s)
        self._last_nodes = tuple(
            NodeFact(
                name=node.get("Labels", {}).get(NODE_LABEL),
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                gpus=node["Resources"].get("GPU", 0.0),
                # Ray adds this resource where it sees a card, whatever --num-gpus says.
                shows_card=any(name.startswith("accelerator_type:") for name in node["Resources"]),
                answers=node["NodeID"] not in silent,
                refuses=self._pulse.refuses(node["NodeID"]),
            )
            for node in live
        )
        return self._last_nodes

    def address(self) -> str:
        return self._address

    def count_cards(self, node: str) -> int:
        cards = (
            ray.remote(visible_cards)
            .options(num_cpus=0, label_selector={NODE_LABEL: node})
            .remote()
        )
        try:
            return len(ray.get(cards, timeout=_PROBE_TIMEOUT_S))
        except GetTimeoutError as error:
            raise PreflightError(
                [
                    (
                        f"{node} started no process in {_PROBE_TIMEOUT_S:.0f} s; see what holds "
                        f"it: {status_command()}"
                    )
                ]
            ) from error

    def place(self, spec: WorkerSpec, num_cpus: float, num_gpus: float) -> None:
        self._specs[spec.slot] = spec
        place = Reservation(node=spec.node, num_cpus=num_cpus, num_gpus=num_gpus)
        self._actors[spec.slot] = _new_actor(place, spec, self._folder(spec))

    def _folder(self, spec: WorkerSpec) -> Any:  # noqa: ANN401 - Ray's reference type has no name
        """Return where a command finds its folder on its node, once that is there; `None` on this
        PC, and where there is none to send.
        """
        if spec.command is None or spec.command.cwd is None:
            return None
        addresses = {fact.name: fact.address for fact in self._last_nodes}
        if addresses.get(spec.node) == self._own_address():
            return None
        return sent_folder(spec)

    def _own_address(self) -> str | None:
        own_id = ray.get_runtime_context().get_node_id()
        return next((fact.address for fact in self._last_nodes if fact.node_id == own_id), None)

    def submit(self, slot: str, directive: Directive) -> None:
        if (
            directive.duration_s == 0
        ):  # the first slice of a process, or of one that could not be reached before
            self._up.pop(slot, None)
            asked = self._actors[slot].process_ids.remote(directive.incarnation)
            self._coming_up[slot] = asked
        ref = self._actors[slot].run_slice.remote(directive)
        self._flights[ref] = _Flight(slot, directive)

    def wait(self, timeout_s: float) -> tuple[SliceEnded, ...]:
        if not self._flights:
            return ()
        # In order of submission, so that two reports of one slot are never swapped.
        refs = list(self._flights)
        first, _ = ray.wait(refs, num_returns=1, timeout=timeout_s, fetch_local=True)
        if not first:
            return ()
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=True)
        done = set(ready)
        ended = [
            (flight := self._flights.pop(ref), self._ended(ref, flight))
            for ref in refs
            if ref in done
        ]
        return tuple(
            outcome
            for flight, outcome in ended
            if isinstance(outcome, SliceReported) or not flight.given_up
        )

    def forget(self, slot: str) -> None:
        """Without `ray.cancel`: a queued slice would run nevertheless (seen with Ray 2.60)."""
        for ref, flight in self._flights.items():
            if flight.slot == slot:
                self._flights[ref] = replace(flight, given_up=True)

    def restart(self, slot: str) -> None:
        ray.kill(self._actors[slot], no_restart=False)

    def abandon(self, slot: str) -> None:
        actor = self._actors.pop(slot, None)
        self.forget(slot)
        if actor is not None:
            ray.kill(actor, no_restart=True)

    def why_ended(self, slot: str) -> DeathCause | None:
        if (text := self._memory_kills.pop(slot, None)) is not None:
            return DeathCause(host_memory=True, text=text)
        node = self._specs[slot].node
        address = next((fact.address for fact in self._last_nodes if fact.name == node), None)
        if address is None or slot not in self._pids:
            return None
        cause = _cause_of_death(self._pids[slot], address)
        if cause is not None:
            del self._pids[slot]  # told once: the next process to end is another one
        return cause

    def watch(self, silent: Collection[str]) -> Mapping[str, Activity | None]:
        slots_by_node: defaultdict[str, dict[int, str]] = defaultdict(dict)
        for slot in silent:
            pid = self._process_of(slot)
            if pid is not None:
                slots_by_node[self._specs[slot].node][pid] = slot
        return {
            slots[pid]: activity
            for node, slots in slots_by_node.items()
            for pid, activity in self._watch.look(
                node, {pid: self._specs[slot].device == "cuda" for pid, slot in slots.items()}
            ).items()
        }

    def _process_of(self, slot: str) -> int | None:
        """Return the id of the slot's process; `None` while it has not come up."""
        if slot not in self._up and slot in self._coming_up:
            ref = self._coming_up[slot]
            if ray.wait([ref], timeout=0)[0]:
                with contextlib.suppress(RayError):  # it has ended; its slices fail too
                    self._pids[slot], computing = ray.get(ref)
                    if computing is not None:
                        self._up[slot] = computing
        return self._up.get(slot)

    def close(self) -> None:
        """Release what does not belong to Ray."""
        self._pulse.close()
        self._head_pulse.close()

    def end_node(self, node: str) -> None:
        self._own_raylets(node).end(node)

    def start_node(self, node: str) -> None:
        self._own_raylets(node).start_again(node)

    def _own_raylets(self, node: str) -> Raylets:
        if self._raylets is None:
            raise UsageError(
                f"{node} belongs to the cluster; only a rehearsal can end and start its nodes"
            )
        return self._raylets

    # Ray's reference type has no name.
    def _ended(self, ref: Any, flight: _Flight) -> SliceEnded:  # noqa: ANN401
        try:
            told: Report | ProgramEnded = ray.get(ref)
        except RayError as error:
            return SliceFailed.of(flight.slot, flight.directive, _failure(error), in_a_line(error))
        if isinstance(told, ProgramEnded):
            if told.host_memory:
                self._memory_kills[flight.slot] = told.text
            return SliceFailed.of(flight.slot, flight.directive, SliceFailure.DIED, told.text)
        if told.device is not None and not flight.given_up:
            self._process_of(flight.slot)
            self._watch.begin(self._specs[flight.slot].node)
        return SliceReported(report=told)


def _new_actor(place: Reservation, spec: WorkerSpec, folder: Any) -> Any:  # noqa: ANN401 - of Ray
    """Create the actor of a slot; `folder` is a reference to its `CommandFolder`, or `None`."""
    # Ray hands the arguments to each new process of the actor, restarts it without a limit and
    # never repeats a call: counting and waiting are the head's.
    actor_class: Any = ray.remote(WorkerActor)
    return actor_class.options(
        num_cpus=place.num_cpus,
        num_gpus=place.num_gpus,
        label_selector={NODE_LABEL: place.node},
        max_restarts=-1,
        max_task_retries=0,
    ).remote(spec, folder)


def _cause_of_death(pid: int, address: str) -> DeathCause | None:
    """Return why the process with this id on the node at `address` ended; `None` if Ray does not
    say.

    An actor that Ray restarts fails its calls with "the actor was restarted" and no cause (Ray
    2.60). The cause is in the table of worker processes that Ray's head keeps. The public way to it
    needs a running dashboard.
    """
    try:
        # Private: its absence must not break the fleet.
        from ray._private.state import state  # noqa: PLC0415
        from ray.core.generated import gcs_pb2  # noqa: PLC0415 - as above

        table = state._connect_and_get_accessor().get_worker_table()
        kind: Any = vars(gcs_pb2)["WorkerTableData"]  # made at run time, and nowhere declared
        entries = [kind.FromString(entry) for entry in table]
        names = kind.DESCRIPTOR.fields_by_name["exit_type"].enum_type.values_by_number
        dead = [
            entry
            for entry in entries
            if not entry.is_alive
            and entry.pid == pid
            and entry.worker_address.ip_address == address
        ]
        if not dead:
            return None
        last = max(dead, key=lambda entry: int(entry.end_time_ms))
        text = " ".join(str(last.exit_detail).split())[:_CAUSE_CHARS]
        return DeathCause(host_memory=names[last.exit_type].name == _OUT_OF_HOST_MEMORY, text=text)
    except Exception:  # noqa: BLE001 - an internal of Ray that may change with any release
        return None


def _failure(error: RayError) -> SliceFailure:
    if isinstance(error, ActorUnavailableError):
        text = str(error)
        return next(
            (failure for words, failure in _UNAVAILABLE.items() if words in text),
            SliceFailure.UNAVAILABLE,
        )
    if isinstance(error, ActorDiedError) and getattr(error, "actor_init_failed", False):
        return SliceFailure.UNBUILDABLE
    # RayTaskError is an exception out of `run_slice` itself: the engine lets none out, so it could
    # not be loaded.
    unbuildable = (RayTaskError, RuntimeEnvSetupError, ActorUnschedulableError)
    return SliceFailure.UNBUILDABLE if isinstance(error, unbuildable) else SliceFailure.DIED
