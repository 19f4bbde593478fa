"""Small tasks and actors on nodes, which reserve nothing, so that a cluster full of workers answers
too.

- `survey` asks every node for facts about its machine, its clock, and the ports that it reaches.
- `with_agents` holds an agent process on each node that needs one, for the length of a run. The
  process is detached and connected to its actor by a pipe, so that it undoes everything when any of
  these ends: the run, the head, the actor, Ray.
- `ProcessWatch` asks what the processes of silent slots do, and waits for nothing. Under MPS it
  also tells the daemon of its node which client is going to be killed.

Needs a connection (`connect.py`) and judges nothing: `orchestrator.doctor`, `run/node_setup.py` and
`core/silence.py` do.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.core.fleet import NodeAnswer
from workers.host.facts import MachineFacts
from workers.host.machine import look_around
from workers.host.processes import ActivityMeter
from workers.messages import Activity
from workers.node_agent import mps
from workers.node_agent.protocol import AgentClient, AgentError, AgentOrders, AgentOutcome

#: The label that names a node. Set by `ray start --labels=node=pc1`.
NODE_LABEL = "node"

#: Without them Ray's commands do not use the token of this process.
_AUTH_SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")

#: A process starts in a second or two and torch loads in some more; on a PC with a load of 10, 90 s
#: were too few.
_ANSWER_S = 180.0

_DOOR_S = 2.0


def survey(answer_s: float = _ANSWER_S) -> tuple[NodeAnswer, ...]:
    """Return each live node's answer, those without a label too, by name.

    They have `answer_s` together.
    """
    # No types here.
    live = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    doors = {
        node["NodeID"]: f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in live
    }
    deadline_s = time.monotonic() + answer_s
    requests = []
    for node in live:
        others = tuple(door for node_id, door in sorted(doors.items()) if node_id != node["NodeID"])
        # By id, not by label: every node is meant once, also one without a label and two with the
        # same.
        where = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        requests.append((node, _on(where, _look).remote(others)))
    answers = [_answer(node, ref, deadline_s) for node, ref in requests]
    return tuple(sorted(answers, key=lambda answer: (answer.name is None, answer.title)))


def _answer(
    node: dict[str, Any],
    ref: Any,  # noqa: ANN401 - Ray's reference type has no name
    deadline_s: float,
) -> NodeAnswer:
    name, address = node.get("Labels", {}).get(NODE_LABEL), str(node["NodeManagerAddress"])
    try:
        facts, unreachable = ray.get(ref, timeout=max(0.1, deadline_s - time.monotonic()))
    except GetTimeoutError:
        return NodeAnswer(
            name=name, address=address, error=f"nothing came back in time; see: {status_command()}"
        )
    except RayError as error:
        return NodeAnswer(name=name, address=address, error=in_a_line(error))
    return NodeAnswer(
        name=name,
        address=address,
        facts=facts,
        unreachable=unreachable,
    )


# Ray's types have no names.
def _on(where: NodeAffinitySchedulingStrategy, function: Any) -> Any:  # noqa: ANN401
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=where)


def _look(doors: Sequence[str]) -> tuple[MachineFacts, tuple[str, ...]]:
    """Run on the node: look at its machine, and try the ports of the others."""
    return look_around(), tuple(door for door in doors if not _opens(door))


def _opens(door: str) -> bool:
    host, _, port = door.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_DOOR_S).close()
    except OSError:
        return False
    return True


#: A process that starts, one before it that ends, a daemon that starts: each has its own, shorter
#: patience.
_OUTCOME_S = 60.0
_END_S = 15.0
_LOOK_EVERY_S = 0.25

#: Called with a node whose agent has ended, and with what the agent reported.
Ended = Callable[[str, tuple[str, ...]], None]


class NodeAgentActor:
    """Holds one agent process. If Ray restarts this actor with its node, it starts a new agent."""

    def __init__(self, orders: AgentOrders) -> None:
        self._agent: AgentClient | None = None
        try:
            self._agent = AgentClient(orders)
            self._outcome = self._agent.outcome()
        except (OSError, ValueError, AgentError) as error:
            self._outcome = orders.failed(str(error))

    def outcome(self) -> AgentOutcome:
        """Return what was done to the node."""
        return self._outcome

    def end(self) -> tuple[str, ...]:
        """Undo it, and return what was put back and what could not be."""
        return () if self._agent is None else self._agent.end()


@contextlib.contextmanager
def with_agents(
    orders: Mapping[str, AgentOrders], ended: Ended, interrupted: Callable[[], bool]
) -> Iterator[dict[str, AgentOutcome]]:
    """Hold the nodes' agents until the end of the block, and yield what was done to each node; each
    must be there.

    `ended` is called for each node, however the block ends, and `interrupted` is asked while agents
    start.

    Raises:
        KeyboardInterrupt: The user stopped before every agent had answered.
    """
    agent_class = ray.remote(NodeAgentActor)
    actors: dict[str, Any] = {
        node: agent_class.options(
            num_cpus=0, label_selector={NODE_LABEL: node}, max_restarts=-1, max_task_retries=0
        ).remote(order)
        for node, order in orders.items()
    }
    requests = {node: actor.outcome.remote() for node, actor in actors.items()}
    try:
        _await(list(requests.values()), interrupted)
        yield {node: _outcome(orders[node], ref) for node, ref in requests.items()}
    finally:
        # One that has not answered yet would answer this only after that.
        answered = ray.wait(list(requests.values()), num_returns=len(requests), timeout=0)[0]
        endings = {
            node: actors[node].end.remote() for node, ref in requests.items() if ref in answered
        }
        if endings:
            ray.wait(list(endings.values()), num_returns=len(endings), timeout=_END_S)
        for node in actors:
            ended(node, _sentences(node, endings.get(node)))
        for actor in actors.values():
            ray.kill(actor, no_restart=True)


def _await(requests: list[Any], interrupted: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _OUTCOME_S
    while (
        ray.wait(requests, num_returns=len(requests), timeout=_LOOK_EVERY_S)[1]
        and time.monotonic() < until_s
    ):
        if interrupted():
            raise KeyboardInterrupt


# Ray's reference type has no name.
def _outcome(orders: AgentOrders, ref: Any) -> AgentOutcome:  # noqa: ANN401
    try:
        # What `NodeAgentActor.outcome` returns.
        return ray.get(ref, timeout=0)  # type: ignore[no-any-return]
    except GetTimeoutError:
        return orders.failed(
            f"nothing came back in {_OUTCOME_S:.0f} s; see what holds it: {status_command()}"
        )
    except RayError as error:
        return orders.failed(in_a_line(error))


# Ray's reference type has no name.
def _sentences(node: str, ref: Any | None) -> tuple[str, ...]:  # noqa: ANN401
    with contextlib.suppress(RayError):
        if ref is not None:
            # What `NodeAgentActor.end` returns.
            return ray.get(ref, timeout=0)  # type: ignore[no-any-return]
    # Its agent learns it by the pipe.
    return (f"{node}: cannot be asked what was put back; its agent process does that by itself",)


#: A daemon that does not answer must not keep a process that is to be ended.
_CLIENT_ENDS_S = 5.0


class Observer:
    """Looks at the processes of its node. An actor, so that it remembers the look before."""

    def __init__(self) -> None:
        self._meter = ActivityMeter()

    def look(self, pids: Mapping[int, bool]) -> dict[int, Activity]:
        """See `ActivityMeter.look`."""
        return self._meter.look(pids)

    def end_mps_client(self, pipe_directory: str, pid: int) -> bool:
        """See `mps.end_client`."""
        return mps.end_client(pipe_directory, pid)


class ProcessWatch:
    """The observers of a run, at most one on each node, and the one question that each has been
    asked.
    """

    def __init__(self) -> None:
        self._observers: dict[str, Any] = {}
        self._asked: dict[str, tuple[Any, frozenset[int]]] = {}

    def begin(self, node: str) -> None:
        """Start the node's observer, unless it has one: it must be up before something hangs."""
        if node not in self._observers:
            options = {
                "num_cpus": 0,
                "label_selector": {NODE_LABEL: node},
                "max_restarts": -1,
                "max_task_retries": 0,
            }
            self._observers[node] = ray.remote(Observer).options(**options).remote()

    def end_mps_client(self, node: str, pipe_directory: str, pid: int) -> None:
        """Have the node's MPS daemon end a client; returns when it has, or after some seconds."""
        self.begin(node)
        ray.wait(
            [self._observers[node].end_mps_client.remote(pipe_directory, pid)],
            timeout=_CLIENT_ENDS_S,
        )

    def look(self, node: str, pids: Mapping[int, bool]) -> dict[int, Activity | None]:
        """Return what the node's processes did, as far as it is known by now, and ask again; never
        waits.

        `None`: the node was asked and has not answered yet. A process that is gone is left out. The
        value in `pids` says whether to look for the process on the node's cards too.
        """
        self.begin(node)
        ref, requests = self._asked.get(node, (None, frozenset()))
        if ref is not None and not ray.wait([ref], timeout=0)[0]:
            return dict.fromkeys(requests & pids.keys())
        answer: dict[int, Activity] = {}
        if ref is not None:
            try:
                answer = ray.get(ref)
            except RayError:  # it comes back with its node
                requests = frozenset()
        self._asked[node] = (
            (self._observers[node].look.remote(dict(pids)), frozenset(pids))
            if pids
            else (None, frozenset())
        )
        return {pid: answer.get(pid) for pid in pids if pid in answer or pid not in requests}


def status_command() -> str:
    """Return the command that shows what is reserved on the connected cluster: `ray status` needs
    the mode as well.
    """
    address = ray.get_runtime_context().gcs_address
    settings = (
        f"{name}={shlex.quote(os.environ[name])} " for name in _AUTH_SETTINGS if name in os.environ
    )
    return f"{''.join(settings)}ray status --address={address}"


def in_a_line(error: RayError) -> str:
    """Return what an error of Ray says: of a traceback from a worker the last line, of other texts
    the first.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        "no reason given"
    ]
    return lines[-1 if lines[0].startswith(("ray::", "\x1b")) else 0][:300]
