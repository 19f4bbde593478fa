"""Asks every node of the connected cluster for facts about its machine, its clock, and the ports
that it reaches.

Needs a connection (`connect.py`) and judges nothing (`orchestrator.doctor` does). Each node is
asked by a task that reserves nothing, so that a cluster full of workers answers too.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.ray_fleet import NODE_LABEL, in_a_line, status_command
from orchestrator.core.fleet import NodeAnswer
from workers.host.facts import MachineFacts
from workers.host.machine import look_around

#: A process starts in a second or two and torch loads in some more; on a PC with a load of 10, 90 s
#: were too few.
_ANSWER_S = 180.0

#: Once a process is there, its clock is a matter of milliseconds.
_CLOCK_S = 15.0
_CLOCK_LOOKS = 5

_DOOR_S = 2.0


def survey(answer_s: float = _ANSWER_S) -> tuple[NodeAnswer, ...]:
    """Return each live node's answer, those without a label too, by name.

    They have `answer_s` together.
    """
    live = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]  # no types here
    doors = {
        node["NodeID"]: f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in live
    }
    deadline_s = time.monotonic() + answer_s
    asked = []
    for node in live:
        others = tuple(door for node_id, door in sorted(doors.items()) if node_id != node["NodeID"])
        # By id, not by label: every node is meant once, also one without a label and two with the
        # same.
        where = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        asked.append((node, where, _on(where, _look).remote(others)))
    answers = [_answer(node, where, ref, deadline_s) for node, where, ref in asked]
    return tuple(sorted(answers, key=lambda answer: (answer.name is None, answer.title)))


def _answer(
    node: dict[str, Any],
    where: NodeAffinitySchedulingStrategy,
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
    clock: tuple[float, float] | None = None
    with contextlib.suppress(RayError):  # a node that is slow once has answered nevertheless
        clock = _clock_offset(where)
    return NodeAnswer(
        name=name,
        address=address,
        facts=facts,
        clock_offset_s=None if clock is None else clock[0],
        clock_error_s=None if clock is None else clock[1],
        unreachable=unreachable,
    )


def _clock_offset(where: NodeAffinitySchedulingStrategy) -> tuple[float, float]:
    """Return how much the node's clock is ahead, and how far off that may be.

    Its time is taken to be that of the middle of the round trip (Cristian's algorithm); the fastest
    trip errs least.
    """
    tell = _on(where, _unix_time_s)
    looks = []
    for _ in range(_CLOCK_LOOKS):
        sent_s, started_s = time.time(), time.monotonic()
        theirs_s = float(ray.get(tell.remote(), timeout=_CLOCK_S))
        half_s = (time.monotonic() - started_s) / 2
        looks.append((theirs_s - (sent_s + half_s), half_s))
    return min(looks, key=lambda look: look[1])


def _on(where: NodeAffinitySchedulingStrategy, function: Any) -> Any:  # noqa: ANN401 - Ray's types have no names
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=where)


def _unix_time_s() -> float:
    return time.time()


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
