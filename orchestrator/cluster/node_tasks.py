"""Small tasks and actors on nodes. They reserve nothing, so a cluster full of workers answers too.

- `survey` asks every node for facts about its machine, its clock, and the ports that it reaches.
- `measure_links` makes nodes send to one of them, with the protocol of a team.
- `send_folder` sends the folder of a command to a PC that has no copy of it.
- `copy_files` copies files of a slot from the PC that has them: checkpoints, or all of a job.
- `with_cards_set` makes an actor set the cards of each node that needs it, and put them back.

Needs a connection (`connect.py`) and judges nothing: `orchestrator.doctor` and `run/node_setup.py`
do.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import pynvml
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.core.fleet import Link, NodeAnswer
from orchestrator.errors import NoClusterError, PreflightError
from workers.card_settings import CardSettingError, WantedSettings, put_back_own, set_cards
from workers.command.folder import code_at, pack, unpack
from workers.host.facts import MachineFacts
from workers.host.machine import look_around
from workers.learned_limits import default_path
from workers.settings import WorkerSpec
from workers.team import link

#: The label that names a node, set by `ray start --labels=node=pc1`.
NODE_LABEL = "node"

#: Ray's commands need them to use the token of this process.
_AUTH_SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")

#: A process starts in 1 to 2 s, and torch loads in some more; at a load of 10, 90 s were too few.
ANSWER_S = 180.0

_PORT_TIMEOUT_S = 2.0

#: Time for a process on each end to start; the measurement takes one second.
_LINK_S = 60.0


def live_nodes() -> list[dict[str, Any]]:
    """Return the nodes that Ray's store lists as alive, as Ray describes them."""
    # This function of Ray has no types.
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


# Ray's types have no names.
def on_node(node: str, what: Any, **options: Any) -> Any:  # noqa: ANN401
    """Return a function or class that Ray runs on the node with this label. It reserves nothing
    unless the options, which are Ray's, say so.
    """
    options = {"num_cpus": 0, "label_selector": {NODE_LABEL: node}, **options}
    return ray.remote(what).options(**options)


def survey() -> tuple[NodeAnswer, ...]:
    """Return the answer of each live node, with or without a label, sorted by name."""
    live = live_nodes()
    ports = {
        node["NodeID"]: f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in live
    }
    deadline_s = time.monotonic() + ANSWER_S  # for all of them together
    requests = []
    for node in live:
        others = tuple(port for node_id, port in sorted(ports.items()) if node_id != node["NodeID"])
        # By id, not by label: each node is asked once, even without a label or with that of
        # another.
        where = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        # On a full machine Ray gives up processes that start slowly; the task can safely run again.
        task = ray.remote(_examine).options(num_cpus=0, max_retries=3, scheduling_strategy=where)
        requests.append((node, task.remote(others)))
    answers = [_answer(node, ref, deadline_s) for node, ref in requests]
    return tuple(sorted(answers, key=lambda answer: (answer.name is None, answer.title)))


def _answer(
    node: dict[str, Any],
    ref: Any,  # noqa: ANN401 - Ray's reference type has no name
    deadline_s: float,
) -> NodeAnswer:
    name, address = node.get("Labels", {}).get(NODE_LABEL), str(node["NodeManagerAddress"])
    answer, why_not = answer_of(ref, deadline_s)
    if why_not is not None:
        is_late = not ray.wait([ref], timeout=0)[0]
        return NodeAnswer(name=name, address=address, error=why_not, is_late=is_late)
    facts, unreachable = answer
    return NodeAnswer(name=name, address=address, facts=facts, unreachable=unreachable)


# Ray's reference type has no name, and a call may return anything.
def answer_of(ref: Any, until_s: float) -> tuple[Any, str | None]:  # noqa: ANN401
    """Return the result of a call, or why there is none until `until_s` (monotonic seconds)."""
    try:
        return ray.get(ref, timeout=max(0.0, until_s - time.monotonic())), None
    except GetTimeoutError:
        return None, f"nothing came back in time; see what holds it: {status_command()}"
    except RayError as error:
        return None, in_a_line(error)


def _examine(ports: Sequence[str]) -> tuple[MachineFacts, tuple[str, ...]]:
    """Run on the node: return facts about its machine, and the ports that it cannot reach."""
    return look_around(), tuple(port for port in ports if not _is_open(port))


def _is_open(port: str) -> bool:
    host, _, number = port.rpartition(":")
    try:
        socket.create_connection((host, int(number)), timeout=_PORT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def measure_links(to: str, listen: str, nodes: Sequence[str]) -> tuple[Link, ...]:
    """Measure, one after the other, the links of `nodes` to `to`, which listens at `listen`."""
    links = []
    for node in nodes:
        given, until_s = (listen, secrets.token_bytes(32), _LINK_S), time.monotonic() + ANSWER_S
        first, second = (
            on_node(where, end, max_retries=0).remote(*given)
            for where, end in ((to, link.answer_measurement), (node, link.measure_rate))
        )
        ended, _ = ray.wait([first, second], num_returns=1, timeout=ANSWER_S)
        rate, error = None, answer_of(first, until_s)[1] if first in ended else None
        if error is None:
            rate, error = answer_of(second, until_s)
        else:  # the first end cannot listen there
            ray.cancel(second, force=True)
        links.append(Link(node=node, to=to, bytes_per_s=rate, error=error))
    return tuple(links)


def send_folder(spec: WorkerSpec) -> Any:  # noqa: ANN401 - Ray's reference type has no name
    """Return a reference to the `CommandFolder` of a command with a folder, on the command's node.

    Nothing here waits: each task waits for the one before it. Ray's `runtime_env` does not fit. It
    takes a local `working_dir` only for a whole connection (Ray 2.60). It puts that first in the
    worker's path, where a user's folder `workers` would hide ours. Private clusters have no agent
    for it.
    """
    assert spec.command is not None  # noqa: S101 - the caller checks it
    cwd = str(spec.command.cwd)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    theirs = on_node(spec.node, code_at).remote(cwd)
    at_head = ray.remote(pack).options(num_cpus=0, scheduling_strategy=here)
    packed = at_head.remote(theirs, cwd, spec.node)
    return on_node(spec.node, unpack).remote(packed, spec.run_id, spec.slot)


#: Bytes of one message through Ray's object store.
_PIECE_BYTES: Final = 8 * 2**20


class Reader:
    """Reads files of its node. It is an actor so that its open files stay the same while a training
    replaces them.
    """

    def __init__(self, run_id: str, slot: str, names: str) -> None:
        folder = default_path().parent / "state" / run_id / slot
        self._files: dict[str, IO[bytes]] = {
            str(path.relative_to(folder)): path.open("rb")
            for path in folder.glob(names)
            if path.is_file() and not path.is_symlink()
        }

    def sizes(self) -> dict[str, int]:
        """Return the number of bytes of each file."""
        return {name: os.fstat(file.fileno()).st_size for name, file in self._files.items()}

    def piece(self, name: str, offset: int) -> bytes:
        """Return the bytes from `offset` on, at most one piece."""
        self._files[name].seek(offset)
        return self._files[name].read(_PIECE_BYTES)


def copy_files(node: str, run_id: str, slot: str, names: str, into: Path) -> list[Path]:
    """Copy the files of a slot that match `names` from a node of the cluster into a folder.

    Raises:
        NoClusterError: The node is not in the cluster, or does not answer.
    """
    if node not in {each["Labels"].get(NODE_LABEL) for each in live_nodes()}:
        raise NoClusterError(f"no node {node} is in the cluster")
    reader = on_node(node, Reader).remote(run_id, slot, names)
    try:
        sizes = ray.get(reader.sizes.remote(), timeout=ANSWER_S)
        for name, size in sizes.items():
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for offset in range(0, size, _PIECE_BYTES):
                    file.write(ray.get(reader.piece.remote(name, offset), timeout=ANSWER_S))
    except GetTimeoutError as failure:
        raise NoClusterError(f"{node} does not answer in {ANSWER_S:.0f} s") from failure
    except RayError as failure:
        raise NoClusterError(f"{node}: {in_a_line(failure)}") from failure
    finally:
        ray.kill(reader, no_restart=True)
    return [into / name for name in sizes]


#: Time for a process to start, and for another run to put its cards back.
_OUTCOME_S = 60.0
_END_S = 15.0

#: Ctrl-C may be noticed late by this time.
_CHECK_EVERY_S = 0.2

#: Called with the name of an event, a node, and what was done to its cards.
Done = Callable[[str, str, tuple[str, ...]], None]


class CardSettingsActor:
    """Sets the cards of its node, and keeps NVML open. If Ray starts it again, with its node, it
    sets them again.
    """

    def __init__(self, wanted: WantedSettings) -> None:
        self._lines: tuple[str, ...] = ()
        self._problem: str | None = None
        try:
            self._lines = set_cards(wanted)
        except (CardSettingError, OSError, pynvml.NVMLError) as error:
            self._problem = f"its cards cannot be set: {error}"

    def outcome(self) -> tuple[tuple[str, ...], str | None]:
        """Return what was done, and the problem if the cards could not be set."""
        return self._lines, self._problem

    def end(self) -> tuple[str, ...]:
        """Put the cards back, and return what was done."""
        return put_back_own()


@contextlib.contextmanager
def with_cards_set(
    wanted: Mapping[str, WantedSettings],
    done: Done,
    interrupted: Callable[[], bool],
) -> Iterator[None]:
    """Set the cards of nodes, which must be in the cluster, until the end of the block. Call `done`
    with what was done, also when the cards are put back. Once `interrupted`, do not wait for
    further nodes.

    Raises:
        PreflightError: A card cannot be set; then no card of its node is set.
    """
    actors: dict[str, Any] = {
        node: on_node(node, CardSettingsActor, max_restarts=-1, max_task_retries=0).remote(settings)
        for node, settings in wanted.items()
    }
    requests = {node: actor.outcome.remote() for node, actor in actors.items()}
    try:
        problems, until_s = list[str](), time.monotonic() + _OUTCOME_S
        for node, ref in requests.items():
            is_there = False
            while not (is_there or interrupted() or time.monotonic() > until_s):
                is_there = bool(ray.wait([ref], timeout=_CHECK_EVERY_S)[0])
            if interrupted():
                break
            outcome, why_not = answer_of(ref, until_s)
            lines, problem = outcome or ((), why_not)
            done("node_kept", node, lines)
            problems += [] if problem is None else [f"{node}: {problem}"]
        if problems:
            raise PreflightError(problems)
        yield
    finally:
        endings = {node: actor.end.remote() for node, actor in actors.items()}
        until_s = time.monotonic() + _END_S
        for node, ref in endings.items():
            fix = (
                f"{node}: its cards could not be put back; type on it: python -m orchestrator stop"
            )
            lines, why_not = answer_of(ref, until_s)
            done("node_restored", node, lines if why_not is None else (fix,))
        for actor in actors.values():
            ray.kill(actor, no_restart=True)


def status_command() -> str:
    """Return the command that shows what is reserved on the connected cluster, with the settings of
    its authentication.
    """
    address = ray.get_runtime_context().gcs_address
    settings = (
        f"{name}={shlex.quote(os.environ[name])} " for name in _AUTH_SETTINGS if name in os.environ
    )
    return f"{''.join(settings)}ray status --address={address}"


def in_a_line(error: RayError) -> str:
    """Return the text of an error of Ray: the last line of a traceback from a worker, or the first
    line of another text.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        "no reason given"
    ]
    return lines[-1 if "ray::" in lines[0] else 0][:300]
