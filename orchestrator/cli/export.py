"""The verb `export`: finds the checkpoints of one training, and has a child process, which loads
torch, write what was trained as a folder of Hugging Face.

Does not know what is in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from orchestrator.core.placement import plan_slots
from orchestrator.errors import OrchestratorError, UsageError, one_line
from orchestrator.record.archive import read_run
from orchestrator.run.earlier import BEST, LAST, checkpoints_of
from orchestrator.run.environment import ground_of
from orchestrator.run.job_files import ask_export
from workers.units import MIB


def export(
    folder: Path, slot: str, to: Path, form: str | None, *, average: bool, best: bool
) -> Iterator[str]:
    """Write what a slot of a run has trained into a new folder; yield what is to be told.

    `form`: `adapter`, or `None`: merged where there are adapters. `best`: what had the lowest
    validation loss, and not the last checkpoint. `UsageError`: there is nothing to write, or no
    place for it; `NoClusterError`: the checkpoints are on another PC, which does not answer;
    `OrchestratorError`: the process that writes has ended early.
    """
    to = to.expanduser().absolute()
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise UsageError(f"{to} is there already; name a new folder, or remove that one")
    stored = read_run(folder)
    facts = stored.facts
    config, target = ground_of(facts)
    if config.workload.name != "train":
        raise UsageError(
            f"run {facts.run_id} has trained nothing: see `python -m orchestrator runs`"
        )
    specs = {plan.spec.slot: plan.spec for plan in plan_slots(config, target)}
    if slot not in specs:
        raise UsageError(f"run {facts.run_id} has no slot {slot[:80]!r}; valid: {', '.join(specs)}")
    with ExitStack() as until_written:
        names = BEST if best else LAST
        paths = checkpoints_of(stored, slot, specs[slot].node, names, to.parent, until_written)
        spec = replace(specs[slot], run_id=facts.run_id)
        told = ask_export(spec, paths, to, form=form, average=average)
    if isinstance(told, str):
        raise OrchestratorError(one_line(told))
    if "refused" in told:
        raise UsageError(one_line(told["refused"]))
    yield from told["told"]
    saved = next((it.row.progress.saved_step for it in stored.slots if it.slot == slot), None)
    if not best and told["step"] < (saved or 0):
        yield f"the run has saved step {saved}, of which there is no checkpoint here"
    size_mib, form = told["bytes"] / MIB, told["form"]
    yield f"{to}: step {told['step']} of {slot}, {form}, {size_mib:.1f} MiB"
