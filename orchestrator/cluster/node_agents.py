"""An agent on every node that needs one, for the length of a run: an actor that reserves nothing,
around a process.

The process is detached and connected to the actor by a pipe, so that it undoes everything when any
of these ends: the run, the head, the actor, Ray. Does not know what is done
(`workers/node_agent/agent.py` does) nor who needs it (`orchestrator/run/node_setup.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from orchestrator.cluster.ray_fleet import NODE_LABEL, in_a_line, status_command
from workers.node_agent.protocol import AgentClient, AgentError, AgentOrders, AgentOutcome

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
        ).remote(each)
        for node, each in orders.items()
    }
    asked = {node: actor.outcome.remote() for node, actor in actors.items()}
    try:
        _await(list(asked.values()), interrupted)
        yield {node: _outcome(orders[node], ref) for node, ref in asked.items()}
    finally:
        # One that has not answered yet would answer this only after that.
        answered = ray.wait(list(asked.values()), num_returns=len(asked), timeout=0)[0]
        told = {node: actors[node].end.remote() for node, ref in asked.items() if ref in answered}
        if told:
            ray.wait(list(told.values()), num_returns=len(told), timeout=_END_S)
        for node in actors:
            ended(node, _sentences(node, told.get(node)))
        for actor in actors.values():
            ray.kill(actor, no_restart=True)


def _await(asked: list[Any], interrupted: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _OUTCOME_S
    while (
        ray.wait(asked, num_returns=len(asked), timeout=_LOOK_EVERY_S)[1]
        and time.monotonic() < until_s
    ):
        if interrupted():
            raise KeyboardInterrupt


def _outcome(orders: AgentOrders, ref: Any) -> AgentOutcome:  # noqa: ANN401 - Ray's reference type has no name
    try:
        return ray.get(ref, timeout=0)  # type: ignore[no-any-return]  # what `NodeAgentActor.outcome` returns
    except GetTimeoutError:
        return orders.failed(
            f"nothing came back in {_OUTCOME_S:.0f} s; see what holds it: {status_command()}"
        )
    except RayError as error:
        return orders.failed(in_a_line(error))


def _sentences(node: str, ref: Any | None) -> tuple[str, ...]:  # noqa: ANN401 - Ray's reference type has no name
    with contextlib.suppress(RayError):
        if ref is not None:
            return ray.get(ref, timeout=0)  # type: ignore[no-any-return]  # what `NodeAgentActor.end` returns
    # Its agent learns it by the pipe.
    return (f"{node}: cannot be asked what was put back; its agent process does that by itself",)
