"""Sweeps of method optuna in a queue at work: the next member is asked for as a place becomes free.

What is asked depends on the queue alone: a head that was killed before it stored a member asks for
the same one again. Also says how jobs are
submitted, by a head or by a user. Decides nothing of what runs (`jobs/queue.py`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError, UsageError
from orchestrator.jobs.entries import Entry
from orchestrator.jobs.model import ENDED, Job, JobState, SweepSubmitted
from orchestrator.jobs.queue import Queue
from orchestrator.jobs.sampler import Sampler, Trial, require_optuna
from orchestrator.jobs.spec import parse
from orchestrator.jobs.sweep import JobFile, expand
from workers.command.code import code_of

#: What members in these states have reached tells something of their settings.
_TOLD = frozenset({JobState.DONE, JobState.STOPPED})


@dataclass(kw_only=True, eq=False)
class SampledSweeps:
    """The sweeps of one queue whose members are asked for."""

    queue: Queue
    config: Config
    """Of the run."""
    head_node: str | None
    """See `prepared`."""
    cards: int
    problems: dict[str, str] = field(default_factory=dict, init=False)
    """Why a sweep cannot be asked any more, by its name."""

    def __post_init__(self) -> None:
        self._read: dict[str, tuple[SweepSubmitted, JobFile, Sampler]] = {}
        self._codes: dict[str, str | None] = {}
        """Of the folders of commands: to hash one takes too long to do it for each member."""

    def next_jobs(self) -> tuple[Job, ...]:
        """Return the next member of a sweep that wants one, with the jobs that only waited for it
        to be known; empty: none wants any.

        One more than there are cards is at work, so that none of them waits for the next answer.
        """
        for name, sweep in self.queue.sweeps.items():
            if self.queue.wants_member(name, self.cards + 1) and name not in self.problems:
                try:
                    return self._asked(sweep)
                except (ConfigError, UsageError) as error:
                    self.problems[name] = f"the sweep {name} has no more members: {error}"
        return ()

    def _asked(self, sweep: SweepSubmitted) -> tuple[Job, ...]:
        there = self._read.get(sweep.name)
        if there is None or there[0] is not sweep:
            file = parse(sweep.text, sweep.origin, self.config, self._known(()))
            entry = next(each for each in file.entries if each.name == sweep.name)
            there = self._read[sweep.name] = sweep, file, sampler_of(file, entry)
        _, file, sampler = there
        # Jobs of the file that the queue has are not known to it: it makes them itself.
        file = replace(
            file, known=self._known({n for names in file.groups().values() for n in names})
        )
        sampled = {
            name: [each.job.settings for each in self.queue.members(name)]
            for name in self.queue.sweeps
        }
        trials = [
            Trial(
                settings=each.job.settings,
                value=each.best if each.state in _TOLD else None,
                has_ended=each.state in ENDED,
            )
            for each in self.queue.members(sweep.name)
        ]
        sampled[sweep.name].append(sampler.ask(trials))
        without = {job.name for job in expand(file)}  # which were submitted with the file
        fresh = [
            job
            for job in expand(file, sampled)
            if job.name not in without and job.name not in self.queue.names
        ]
        return prepared(fresh, self.head_node, sweep.cwd, self._codes)

    def _known(self, names: Collection[str]) -> tuple[Job, ...]:
        return tuple(job for job in self.queue.jobs if job.name not in names)


def sampler_of(file: JobFile, entry: Entry) -> Sampler:
    """Return what answers for the members of an entry; `UsageError` where optuna is missing."""
    assert entry.sweep is not None  # noqa: S101 - the caller has looked
    _, is_min = file.metric_of(entry)
    return Sampler(entry.sweep, is_min=is_min, is_train=entry.train is not None)


def sampled_sweeps(file: JobFile | None, queue: Queue) -> tuple[SweepSubmitted, ...]:
    """Return the sweeps of a file whose members are asked for, as they are submitted here and now,
    without those that the queue has as they are.

    `UsageError` where a name is taken, or where optuna is missing, also for sweeps of the queue: it
    is better told now than in the night.
    """
    if queue.sweeps:
        require_optuna()
    found = []
    for entry in () if file is None else file.entries:
        if file is None or entry.sweep is None or entry.sweep.method != "optuna":
            continue
        sampler_of(file, entry).ask(())
        sweep = SweepSubmitted(
            at_s=time.time(),
            name=entry.name,
            count=entry.sweep.size,
            origin=file.origin,
            text=file.text,
            cwd=str(Path.cwd()),
        )
        why = queue.why_refused(sweep)
        if why is None:
            found.append(sweep)
        elif sweep.name not in queue.sweeps:
            raise UsageError(
                f"{sweep.origin}: {why}; give the sweep another name, or begin another queue with "
                "`jobs run --new`"
            )
    return tuple(found)


def prepared(
    jobs: Iterable[Job],
    head_node: str | None,
    folder: str | Path = "",
    codes: dict[str, str | None] | None = None,
) -> tuple[Job, ...]:
    """Return jobs as they are submitted now from a folder, by default this one: with the time, the
    folder of a command, and its code.

    The folders of jobs are on the head's PC. Where other PCs work too, `head_node` is its name: a
    job that names the folder of another then runs there. `codes` are known already, by folder.
    """
    codes = {} if codes is None else codes

    def of_here(job: Job) -> Job:
        now = replace(job, submitted_at_unix_s=time.time())
        if head_node is not None and not job.nodes and _names_folder(job):
            now = replace(now, nodes=(head_node,))
        if job.command is None:
            return now
        cwd = job.command.cwd or ""
        if "{" not in cwd:
            cwd = str(Path.cwd() / folder / Path(cwd).expanduser())
            codes.setdefault(cwd, code_of(cwd) if Path(cwd).is_dir() else None)
        return replace(now, command=replace(job.command, cwd=cwd), code=codes.get(cwd))

    return tuple(map(of_here, jobs))


def _names_folder(job: Job) -> bool:
    texts = [str(value) for value in job.overrides.values()]
    if job.command is not None:
        texts += [*job.command.argv, *job.command.env.values(), job.command.cwd or ""]
    return any(".dir}" in text for text in texts)
