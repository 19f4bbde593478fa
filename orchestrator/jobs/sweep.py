"""From the entries of a job file to its jobs, with stable names and ids.

`NAME-0`, `NAME-1`, … are the members of a sweep, in the order in which the file counts them.
Expects a file that `spec` has found right. Members of method optuna have no settings yet: those are
chosen while the queue works (`sampler`). Pure.
"""

from __future__ import annotations

import graphlib
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Final

from orchestrator.config.load import config_from_data
from orchestrator.config.schema import Config
from orchestrator.config.team import with_team_alone
from orchestrator.jobs.entries import MAX_JOBS, Entry, Sweep, with_numbers
from orchestrator.jobs.model import Job, Milestones
from workers.settings import CommandSpec, Scalar
from workers.units import GIB

#: The folder of another job, as a command or an override names it.
FOLDER: Final = re.compile(r"\{([A-Za-z0-9][A-Za-z0-9._-]*)\.dir\}", re.ASCII)
#: Keys of an entry that a job has as they are.
_AS_TYPED: Final = (
    "priority", "retries", "nodes", "card", "pack", "preempt", "parks", "hours",
)  # fmt: skip
_MEMBER: Final = re.compile(r"-\d{1,5}$", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """What the names of a file and its queue mean."""

    jobs: Mapping[str, tuple[str, ...]]
    """By name: an entry's all its jobs, a job's itself. The file's go before those of the queue."""
    followed: Mapping[str, tuple[str, ...]]
    """By entry: several jobs, by their name, of which each job of the entry follows one, also
    through others. All have as many.
    """
    count: int
    """How many jobs the file makes; above `MAX_JOBS` not all of them have names."""


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """Entries that have been found right, and what they are read with."""

    origin: str
    entries: tuple[Entry, ...]
    """With what the file says for all of them."""
    base: Config
    """Of cluster.yaml."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each entry by its name."""
    known: tuple[Job, ...] = ()
    """Jobs that the queue has already."""

    @cached_property
    def groups(self) -> Groups:
        """What each name means.

        Raises:
            graphlib.CycleError: Entries go round in a circle.
        """
        found: dict[str, tuple[str, ...]] = {}
        for job in self.known:
            found[job.name] = (job.name,)
            if job.sweep is not None:
                found[job.sweep] = (*found.get(job.sweep, ()), job.name)
        followed: dict[str, tuple[str, ...]] = {}
        count = 0
        for entry in _in_order(self.entries):
            several = [lead for lead in entry.leads if found.get(lead, (lead,)) != (lead,)]
            lead = several[0] if several and entry.each else None
            if lead is not None:
                followed[entry.name] = (lead, *followed.get(lead, ()))
            size = entry.sweep.size if entry.sweep else len(found[lead]) if lead else None
            count += 1 if size is None else size
            numbers = range(0 if count > MAX_JOBS else size or 0)
            names = (entry.name,) if size is None else tuple(f"{entry.name}-{n}" for n in numbers)
            found |= {name: (name,) for name in names}
            found[entry.name] = names
        return Groups(jobs=found, followed=followed, count=count)

    @cached_property
    def jobs(self) -> tuple[Job, ...]:
        """What the entries make, in their order. The same file gives the same names and ids."""
        return tuple(job for entry in self.entries for job in self._jobs_of(entry))

    def _jobs_of(self, entry: Entry) -> Iterator[Job]:
        names, leads = self.groups.jobs[entry.name], self.groups.followed.get(entry.name, ())
        members = _members_of(entry.sweep) if entry.sweep else [{}]
        for n, (name, settings) in enumerate(zip(names, itertools.cycle(members), strict=False)):
            job = _job(self, entry, name, {lead: self.groups.jobs[lead][n] for lead in leads})
            job = job.with_settings(settings_of(entry, settings))
            content = {it.name: getattr(job, it.name) for it in fields(job) if it.name != "origin"}
            text = json.dumps(content, sort_keys=True, default=asdict)
            yield replace(job, id=hashlib.blake2b(text.encode(), digest_size=8).hexdigest())


def _in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries, each behind those that it comes after."""
    named = {entry.name: entry for entry in entries}
    graph = {
        name: [lead if lead in named else _MEMBER.sub("", lead) for lead in entry.leads]
        for name, entry in named.items()
    }
    order = graphlib.TopologicalSorter(graph).static_order()
    return [named[name] for name in order if name in named]


def settings_of(entry: Entry, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was typed by key under the keys that are meant, and as the values."""
    if entry.train is None:
        return dict(typed)
    return {dotted_key(key): with_numbers(value) for key, value in typed.items()}


def _members_of(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the settings of each member, as typed; of method optuna those of none."""
    if sweep.method == "grid":
        grid = itertools.product(*(values for _, values in sweep.ranges.values()))
        return [dict(zip(sweep.ranges, values, strict=True)) for values in grid]
    if sweep.method == "list":
        return sweep.rows
    if sweep.method == "optuna":
        return [{}]
    return [
        {key: _drawn(*form, f"{sweep.seed}:{n}:{key}") for key, form in sweep.ranges.items()}
        for n in range(sweep.size)
    ]


def _drawn(kind: str, bounds: list[Any], key: str) -> Scalar:
    """Return a value that depends on `key` alone: one more key or member changes no other."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    share = int.from_bytes(digest, "big") / 2**64
    if kind == "choice":
        chosen: Scalar = bounds[int(share * len(bounds))]
        return chosen
    low, high = bounds
    if kind == "integer":
        return int(low + int(share * (high - low + 1)))
    value = low * (high / low) ** share if kind == "log" else low + share * (high - low)
    # Six digits are more than a learning rate needs, and a table has room for them.
    return float(min(max(float(f"{value:.6g}"), low), high))


def dotted_key(key: str) -> str:
    """Return the key of cluster.yaml that a key of a training means: `lr` is `train.lr`."""
    return key if "." in key else f"train.{key}"


def _job(file: JobFile, entry: Entry, name: str, followed: Mapping[str, str]) -> Job:
    """Return one job without settings; `followed`: of each sweep the member that it follows."""
    overrides: dict[str, Any] = {}
    command, steps, groups = None, None, file.groups.jobs
    if entry.train is not None:
        overrides = {"workload.name": "train", "train.checkpoints": "head"}
        overrides |= settings_of(entry, entry.train)
        if overrides.get("train.team") is not None:
            overrides["train.slots"] = None  # of cluster.yaml, whose trainings are others
        if overrides.get("train.epochs", file.base.train.epochs) is None:
            steps = overrides.get("train.steps", file.base.train.steps)
    else:
        command = CommandSpec(
            argv=entry.command or (),
            cwd=entry.cwd,
            env=entry.env,
            python=entry.python,
            time_limit_s=entry.time_limit,
            grace_s=entry.grace,
            cap=entry.cap,
            outputs=entry.outputs,
        )
    leads = (followed.get(lead, lead) for lead in entry.leads)
    line = file.lines.get(entry.name)
    sampled = entry.sweep if entry.sweep and entry.sweep.method == "optuna" else None
    typed = {key: getattr(entry, key) for key in _AS_TYPED}
    if isinstance(team := overrides.get("train.team"), list):
        typed["nodes"] = tuple(team)
    job = Job(
        name=name,
        id="",
        sweep=None if name == entry.name else entry.name,
        ranges=settings_of(entry, sampled.ranges) if sampled else {},
        seed=sampled.seed if sampled else 0,
        overrides=overrides,
        command=command,
        after=tuple(dict.fromkeys(job for lead in leads for job in groups.get(lead, (lead,)))),
        after_any=bool(entry.after_any),
        memory_bytes=None if entry.memory_gib is None else int(entry.memory_gib * GIB),
        milestones=_milestones(entry),
        steps=steps,
        origin=file.origin if line is None else f"{file.origin}:{line}",
        **typed,
    )
    return job.with_texts(
        lambda text: FOLDER.sub(lambda it: f"{{{followed.get(it[1], it[1])}.dir}}", text)
    )


def config_of(base: Config, job: Job, **fixed: object) -> Config:
    """Return the configuration of a run with what a job says, and `fixed`, by dotted keys.

    `ConfigError` if that is not valid.
    """
    data: dict[str, Any] = base.model_dump()
    for dotted, value in {**job.overrides, **fixed}.items():
        section, _, key = dotted.partition(".")
        data[section] = {**data.get(section, {}), key: value}
    return config_from_data(data, f"job {job.name}")


def job_config(base: Config, job: Job) -> Config:
    """Return the configuration of a job's workers: that of the run, with what the job says. A team
    has whole cards, and what leads a divided model follows from these.

    `ConfigError` if that is not valid; of a job file `spec` has refused it before.
    """
    # On any node; and the state of a training must be able to move to another PC.
    workers = sum(node.workers for node in base.nodes.values())
    fixed: dict[str, object] = {} if job.is_team else {"train.slots": workers}
    if job.command is None:
        fixed |= {"workload.name": "train", "train.checkpoints": "head"}
    return with_team_alone(config_of(base, job, **fixed))


def _milestones(entry: Entry) -> Milestones | None:
    """Return by what the jobs of an entry are compared, and when; `None`: by the loss, never."""
    rule = entry.stop
    is_compared = rule is not None and rule.rule == "asha" and entry.sweep is not None
    if rule is None or not (is_compared or (rule.metric, rule.mode) != ("loss", "min")):
        return None
    return Milestones(
        metric=rule.metric,
        is_min=rule.mode == "min",
        first=rule.first if is_compared else None,
        factor=rule.factor,
        last=rule.last,
    )
