"""The verb `jobs fetch`: copies the files of a job from the head's folder of it, or from the PC on
which it ran last.

Does not know what the files are.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from orchestrator.cluster.connect import connected
from orchestrator.config.load import config_from_text
from orchestrator.errors import ArchiveError, NoClusterError, UsageError
from orchestrator.jobs.journal import JOURNAL_NAME, QUEUE_NAME, records
from orchestrator.jobs.model import Assigned
from orchestrator.record.archive import read_run
from orchestrator.run.environment import Mode
from orchestrator.view.phrases import counted
from workers.learned_limits import default_path
from workers.units import MIB


def fetch(folder: Path, job: str, to: Path) -> str:
    """Copy the files of a job of a run folder into `to`; return what is to be told.

    Raises:
        UsageError: There is nothing to copy, or no place for it.
        NoClusterError: The files are on another PC, which does not answer.
    """
    of_run = default_path().parent / "state" / folder.name
    places = [folder / QUEUE_NAME / "files" / job, of_run / job]
    try:
        for place in places:
            if place.is_dir():
                shutil.copytree(place, to, symlinks=True, dirs_exist_ok=True)
        if not to.exists():
            _copy_from_node(folder, job, to)
    except OSError as failure:
        raise UsageError(f"{to} cannot be written: {failure.strerror or failure}") from failure
    sizes = [path.stat().st_size for path in to.rglob("*") if path.is_file()]
    if not sizes:
        raise UsageError(f"job {job} has no files yet, in {' or '.join(map(str, places))}")
    return f"{to}: {counted(len(sizes), 'file')} of {job}, {sum(sizes) / MIB:.1f} MiB"


def _copy_from_node(folder: Path, job: str, to: Path) -> None:
    """Copy what is on the PC of the last attempt, where that is another one."""
    told = records(folder / QUEUE_NAME / JOURNAL_NAME)
    cards = [one.card for one in told if isinstance(one, Assigned) and one.job == job]
    try:
        facts = read_run(folder).facts
    except ArchiveError:
        return
    if not cards or facts.mode != Mode.CLUSTER:
        return
    node = cards[-1].partition(":")[0]
    config = config_from_text(facts.config_yaml, f"the configuration of run {facts.run_id}")
    try:
        with connected(config.cluster.address, config.cluster.auth):
            from orchestrator.cluster.checkpoint_copy import copied

            copied(node, facts.run_id, job, "**/*", to)
    except NoClusterError as failure:
        raise NoClusterError(
            f"the files of {job} are on {node}, and {failure}; start that node and type this again"
        ) from failure
