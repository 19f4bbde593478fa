"""Finds what a slot or a job of an earlier run has trained: checkpoints for `export`, and weights
for a training that begins with them (`train.from`).

Does not read checkpoints: a child process, which loads torch, takes the weights out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from orchestrator.cluster.connect import connected
from orchestrator.core.placement import plan_slots
from orchestrator.errors import NoClusterError, OrchestratorError, UsageError, one_line
from orchestrator.record.archive import StoredRun, read_run
from orchestrator.record.folders import command_for, find_run
from orchestrator.record.jobs import QUEUE_NAME, queue_of
from orchestrator.run.child import ask_child
from orchestrator.run.dispatcher import JobPlans
from orchestrator.run.environment import Mode, config_and_target_of
from orchestrator.run.job_files import CHECKPOINT, FILES
from orchestrator.run.run_dir import STATES, weights_of
from workers.learned_limits import default_path
from workers.settings import WorkerSpec

#: Files that a worker writes (`workers/training/checkpoints.py`, which loads torch).
LAST, BEST = "generation-?.pt", "best.pt"


def fetch_weights(start: str, runs_dir: Path) -> Iterator[str]:
    """Write the weights that `train.from` names to where a run finds them: those of the best
    checkpoint if one was kept, else of the last. Yield lines for the user.

    Raises:
        UsageError: There is no such run or slot, or it has no checkpoint.
        NoClusterError: Its checkpoints are on another PC, which does not answer.
        OrchestratorError: The child process has ended early.
    """
    run_id, _, slot = start.partition("/")
    folder = find_run(runs_dir, run_id)
    if folder.name != run_id:
        raise UsageError(f"train.from: {start}: write the whole name of the run, {folder.name}")
    stored = read_run(folder)
    node = spec_of(stored, slot).node
    to = weights_of(runs_dir, start).absolute()
    with ExitStack() as until_written:
        place = (stored, slot, node)
        try:
            paths = checkpoints_of(*place, BEST, folder, until_written)
        except (UsageError, NoClusterError):
            paths = checkpoints_of(*place, LAST, folder, until_written)
        question = {"checkpoints": list(map(str, paths)), "to": str(to)}
        answer = ask_child("workers.training.earlier", question)
    if isinstance(answer, str):
        raise OrchestratorError(one_line(answer))
    if "refused" in answer:
        raise UsageError(one_line(f"train.from: {start}: {answer['refused']}"))
    yield from answer["told"]
    yield f"Begins with the weights of {start}: step {answer['step']}, {answer['name']}"


def spec_of(stored: StoredRun, name: str) -> WorkerSpec:
    """Return the `WorkerSpec` of the slot, or of the first slot of the job, with this name.

    Raises:
        UsageError: The run has trained nothing there.
        ConfigError: The configuration of the job is not possible any more.
    """
    config, target = config_and_target_of(stored.facts)
    queue = queue_of(stored.folder).standings
    begun = (it for it in queue.values() if it.last_card and it.job.command is None)
    jobs = {each: it for it in begun for each in (it.job.name, *it.places)}
    if name in jobs:
        files = stored.folder.absolute() / QUEUE_NAME / FILES
        run_id = stored.facts.run_id
        plans = JobPlans(config=config, target=target, run_id=run_id, folder_of=files.joinpath)
        of_job = {plan.spec.slot: plan.spec for plan in plans.plans_of(jobs[name])}
        return of_job.get(name) or replace(next(iter(of_job.values())), slot=name)
    trains = config.workload.name == "train" and not queue
    plans_of_run = plan_slots(config, target) if trains else ()
    specs = {plan.spec.slot: plan.spec for plan in plans_of_run}
    if name not in specs:
        valid = ", ".join([*jobs, *specs]) or "none, since it has trained nothing"
        run_id = stored.facts.run_id
        raise UsageError(one_line(f"run {run_id} has no slot {name[:80]!r}; valid: {valid}"))
    return replace(specs[name], run_id=stored.facts.run_id)


def checkpoints_of(
    stored: StoredRun, slot: str, node: str, names: str, near: Path, stack: ExitStack
) -> list[Path]:
    """Return the checkpoint files of a slot: those on this PC, or copies from its node in a folder
    of `near` that lasts as long as `stack`.

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
        config, _ = config_and_target_of(facts)
        near.mkdir(parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(prefix=".checkpoints-", dir=near)
        copies = Path(stack.enter_context(place))
        try:
            with connected(config.cluster.address, config.cluster.auth):
                from orchestrator.cluster.node_tasks import copy_files  # noqa: PLC0415 - loads ray

                paths = copy_files(node, run_id, slot, names, copies)
        except NoClusterError as failure:
            raise NoClusterError(
                f"the checkpoints of {slot} are on {node}, and {failure}; start that node, or copy "
                f"state/{run_id}/{slot} of its state folder to {local}"
            ) from failure
    if paths:
        return paths
    report = command_for(folder, "report")
    raise UsageError(f"{slot} has no {names} in {local}; `{report}` shows what it did")
