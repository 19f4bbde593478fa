"""Finds what a slot of an earlier run has trained: its checkpoints, for `export`, and its weights,
for a training that begins with them (`train.from`).

Does not know what is in a checkpoint: a child process, which loads torch, takes the weights out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from orchestrator.cluster.connect import connected
from orchestrator.core.placement import plan_slots
from orchestrator.errors import NoClusterError, OrchestratorError, UsageError, one_line
from orchestrator.record.archive import StoredRun, read_run
from orchestrator.record.folders import command_for, find_run
from orchestrator.record.jobs import QUEUE_NAME
from orchestrator.run.child import ask_child
from orchestrator.run.environment import Mode, ground_of
from orchestrator.run.job_files import CHECKPOINT, FILES
from orchestrator.run.run_dir import STATES, weights_of
from workers.learned_limits import default_path

#: Files that a worker writes (`workers/training/checkpoints.py`, which loads torch).
LAST, BEST = "generation-?.pt", "best.pt"


def fetch_weights(start: str, runs_dir: Path) -> Iterator[str]:
    """Write the weights that `train.from` names to where a run finds them, those of the best
    checkpoint where one was kept; yield what is to be told.

    Raises:
        UsageError: There is no such run or slot, or it has no checkpoint.
        NoClusterError: Its checkpoints are on another PC, which does not answer.
        OrchestratorError: The process that takes them out has ended early.
    """
    run_id, _, slot = start.partition("/")
    folder = find_run(runs_dir, run_id)
    if folder.name != run_id:
        raise UsageError(f"train.from: {start}: write the whole name of the run, {folder.name}")
    stored = read_run(folder)
    nodes = {plan.spec.slot: plan.spec.node for plan in plan_slots(*ground_of(stored.facts))}
    nodes |= {record.slot: record.row.node for record in stored.slots}
    if slot not in nodes:
        valid = ", ".join(sorted(nodes))
        raise UsageError(one_line(f"run {run_id} has no slot {slot[:80]!r}; valid: {valid}"))
    to = weights_of(runs_dir, start).absolute()
    with ExitStack() as until_written:
        place = (stored, slot, nodes[slot])
        try:
            paths = checkpoints_of(*place, BEST, folder, until_written)
        except (UsageError, NoClusterError):
            paths = checkpoints_of(*place, LAST, folder, until_written)
        question = {"checkpoints": list(map(str, paths)), "to": str(to)}
        told = ask_child("workers.training.earlier", question)
    if isinstance(told, str):
        raise OrchestratorError(one_line(told))
    if "refused" in told:
        raise UsageError(one_line(f"train.from: {start}: {told['refused']}"))
    yield from told["told"]
    yield f"Begins with the weights of {start}: step {told['step']}, {told['name']}"


def checkpoints_of(
    stored: StoredRun, slot: str, node: str, names: str, near: Path, stack: ExitStack
) -> list[Path]:
    """Return the files that may hold what a slot has trained: here, or copied from its node into a
    folder of `near` that lasts as long as `stack`.

    Raises:
        UsageError: There are none.
        NoClusterError: They are on another PC, which does not answer.
    """
    facts, folder = stored.facts, stored.folder
    run_id = facts.run_id
    local = default_path().parent / "state" / run_id / slot
    paths = [*local.glob(names)]
    if names == LAST:
        paths += folder.glob(f"{STATES}/{slot}.pt")
        paths += folder.glob(f"{QUEUE_NAME}/{FILES}/{slot}/{CHECKPOINT}")
    if not paths and facts.mode == Mode.CLUSTER:
        config, _ = ground_of(facts)
        near.mkdir(parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(prefix=".checkpoints-", dir=near)
        copies = Path(stack.enter_context(place))
        try:
            with connected(config.cluster.address, config.cluster.auth):
                from orchestrator.cluster.node_tasks import copied  # noqa: PLC0415 - loads ray

                paths = copied(node, run_id, slot, names, copies)
        except NoClusterError as failure:
            raise NoClusterError(
                f"the checkpoints of {slot} are on {node}, and {failure}; start that node, or copy "
                f"state/{run_id}/{slot} of its state folder to {local}"
            ) from failure
    if paths:
        return paths
    report = command_for(folder, "report")
    raise UsageError(f"{slot} has no {names} in {local}; `{report}` shows what it did")
