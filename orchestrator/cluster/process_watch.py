"""Asks nodes what the processes of silent slots do: one small process on each node looks, and
nothing waits for it.

Under MPS it also tells the daemon of its node which client is going to be killed.

Decides nothing: `core/silence.py` says what the answers mean, `workers/host/activity.py` how a node
looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from workers.host.activity import ActivityMeter
from workers.messages import Activity
from workers.node_agent import mps

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

    def __init__(self, label: str) -> None:
        self._label = label
        self._observers: dict[str, Any] = {}
        self._asked: dict[str, tuple[Any, frozenset[int]]] = {}

    def begin(self, node: str) -> None:
        """Start the node's observer, unless it has one: it must be up before something hangs."""
        if node not in self._observers:
            options = {
                "num_cpus": 0,
                "label_selector": {self._label: node},
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
        ref, asked = self._asked.get(node, (None, frozenset()))
        if ref is not None and not ray.wait([ref], timeout=0)[0]:
            return dict.fromkeys(asked & pids.keys())
        answer: dict[int, Activity] = {}
        if ref is not None:
            try:
                answer = ray.get(ref)
            except RayError:  # it comes back with its node
                asked = frozenset()
        self._asked[node] = (
            (self._observers[node].look.remote(dict(pids)), frozenset(pids))
            if pids
            else (None, frozenset())
        )
        return {pid: answer.get(pid) for pid in pids if pid in answer or pid not in asked}
