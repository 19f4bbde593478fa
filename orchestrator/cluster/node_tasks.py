"""Small tasks and actors on nodes, which reserve nothing, so that a cluster full of workers answers
too.

- `survey` asks every node for facts about its machine, its clock, and the ports that it reaches.
- `with_cards_set` has an actor set the cards of each node that needs it, and put them back.

Needs a connection (`connect.py`) and judges nothing: `orchestrator.doctor` and `run/node_setup.py`
do.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.core.fleet import NodeAnswer
from workers.card_settings import CardSettingError, WantedSettings, put_back_own, set_cards
from workers.host.facts import MachineFacts
from workers.host.machine import look_around

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
    # On a full machine Ray gives up processes that take long to start; looking again is harmless.
    return ray.remote(function).options(num_cpus=0, max_retries=3, scheduling_strategy=where)


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


#: A process starts, and another run puts its cards back.
_OUTCOME_S = 60.0
_END_S = 15.0
_LOOK_EVERY_S = 0.25

#: Called with a node whose cards were put back, and with what was done.
Ended = Callable[[str, tuple[str, ...]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOutcome:
    """What was done to the cards of a node."""

    lines: tuple[str, ...] = ()
    problem: str | None = None
    """Why they were not set; then each is as it was before."""


class CardSettingsActor:
    """Sets the cards of its node, and keeps NVML open. If Ray starts it again with its node, it
    sets them again.
    """

    def __init__(self, wanted: WantedSettings) -> None:
        try:
            self._outcome = SetOutcome(lines=set_cards(wanted))
        except (CardSettingError, OSError, pynvml.NVMLError) as error:
            self._outcome = SetOutcome(problem=f"{wanted.node}: its cards cannot be set: {error}")

    def outcome(self) -> SetOutcome:
        """Return what was done."""
        return self._outcome

    def end(self) -> tuple[str, ...]:
        """Put the cards back, and return what was done."""
        return put_back_own()


@contextlib.contextmanager
def with_cards_set(
    wanted: Mapping[str, WantedSettings], ended: Ended, interrupted: Callable[[], bool]
) -> Iterator[dict[str, SetOutcome]]:
    """Have the cards of some nodes, which must be there, set until the end of the block; yield what
    was done on each.

    `ended` is called for each node, however the block ends, and `interrupted` is asked while the
    cards are set.

    Raises:
        KeyboardInterrupt: The user stopped before every node had answered.
    """
    actor_class = ray.remote(CardSettingsActor)
    actors: dict[str, Any] = {
        node: actor_class.options(
            num_cpus=0, label_selector={NODE_LABEL: node}, max_restarts=-1, max_task_retries=0
        ).remote(settings)
        for node, settings in wanted.items()
    }
    requests = {node: actor.outcome.remote() for node, actor in actors.items()}
    try:
        _await(list(requests.values()), interrupted)
        yield {node: _outcome(node, ref) for node, ref in requests.items()}
    finally:
        endings = {node: actor.end.remote() for node, actor in actors.items()}
        if endings:
            ray.wait(list(endings.values()), num_returns=len(endings), timeout=_END_S)
        for node, ref in endings.items():
            ended(node, _sentences(node, ref))
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
def _outcome(node: str, ref: Any) -> SetOutcome:  # noqa: ANN401
    try:
        # What `CardSettingsActor.outcome` returns.
        return ray.get(ref, timeout=0)  # type: ignore[no-any-return]
    except GetTimeoutError:
        why = f"nothing came back in {_OUTCOME_S:.0f} s; see what holds it: {status_command()}"
    except RayError as error:
        why = in_a_line(error)
    return SetOutcome(problem=f"{node}: {why}")


# Ray's reference type has no name.
def _sentences(node: str, ref: Any) -> tuple[str, ...]:  # noqa: ANN401
    with contextlib.suppress(RayError):
        # What `CardSettingsActor.end` returns.
        return ray.get(ref, timeout=0)  # type: ignore[no-any-return]
    return (f"{node}: its cards could not be put back; type on it: python -m orchestrator stop",)


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
    return lines[-1 if "ray::" in lines[0] else 0][:300]
