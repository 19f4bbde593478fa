"""Sends the folder of a command through Ray's store to a PC that has no copy of it.

Not as Ray's `runtime_env`: a local `working_dir` is only taken for a whole connection (Ray 2.60),
it comes first in the worker's path, where a user's folder `workers` would hide ours, and private
clusters have no agent for it. Nothing here waits: each task waits for the one before it. What is
packed and where it is put is in `workers/command/folder.py`.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.cluster.node_tasks import NODE_LABEL
from workers.command.folder import look, pack, unpack
from workers.settings import WorkerSpec


def sent_folder(spec: WorkerSpec) -> Any:  # noqa: ANN401 - Ray's reference type has no name
    """Return a reference to the `CommandFolder` on the node of a command with a folder."""
    assert spec.command is not None  # noqa: S101 - asked for nothing else
    cwd = str(spec.command.cwd)
    there = {"num_cpus": 0, "label_selector": {NODE_LABEL: spec.node}}
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    theirs = ray.remote(look).options(**there).remote(cwd)
    at_head = ray.remote(pack).options(num_cpus=0, scheduling_strategy=here)
    packed = at_head.remote(theirs, cwd, spec.node)
    return ray.remote(unpack).options(**there).remote(packed, spec.run_id, spec.slot)
