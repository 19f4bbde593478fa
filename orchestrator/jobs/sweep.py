"""Makes the jobs of a job file from its entries, with stable names and ids.

`NAME-0`, `NAME-1`, … are the members of a sweep, in the order of the file. Expects a file that
`spec` has checked. Members of an optuna sweep have no settings yet: `sampler` chooses them while
the queue works. Pure.
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

#: `{NAME.dir}`: the folder of another job, in a command or an override.
FOLDER: Final = re.compile(r"\{([A-Za-z0-9][A-Za-z0-9._-]*)\.dir\}", re.ASCII)
#: Keys of an entry that a job copies unchanged.
_AS_TYPED: Final = (
    "priority", "retries", "nodes", "card", "pack", "preempt", "parks", "hours",
)  # fmt: skip
_MEMBER: Final = re.compile(r"-\d{1,5}$", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The jobs that each name of a job file and its queue stands for."""

    jobs: Mapping[str, tuple[str, ...]]
    """An entry's name stands for all its jobs, a job's for itself; names of the file go first."""
    followed: Mapping[str, tuple[str, ...]]
    """Keyed by entry with `each`: the sweeps that it follows, also indirectly. Job N of the entry
    follows member N of each of them; all have the same number of jobs.
    """
    count: int
    """Number of jobs of the file; above `MAX_JOBS` not all of them have names."""


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """The entries of a job file, and the context in which they are read."""

    origin: str
    entries: tuple[Entry, ...]
    """Completed with `defaults` and `stop` of the file."""
    base: Config
    """The configuration of cluster.yaml."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line number, keyed by entry name."""
    known: tuple[Job, ...] = ()
    """Jobs of the queue."""

    @cached_property
    def groups(self) -> Groups:
        """The jobs for which each name stands.

        Raises:
            graphlib.CycleError: Entries come after each other in a cycle.
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
        """The jobs in order of their entries. The same file gives the same names and ids."""
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
    """Return the entries in topological order of `after` and `after_any`."""
    named = {entry.name: entry for entry in entries}
    graph = {
        name: [lead if lead in named else _MEMBER.sub("", lead) for lead in entry.leads]
        for name, entry in named.items()
    }
    order = graphlib.TopologicalSorter(graph).static_order()
    return [named[name] for name in order if name in named]


def settings_of(entry: Entry, typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return typed settings; of a training with dotted keys, and texts like `1e-4` as numbers."""
    if entry.train is None:
        return dict(typed)
    return {dotted_key(key): with_numbers(value) for key, value in typed.items()}


def _members_of(sweep: Sweep) -> list[dict[str, Any]]:
    """Return the settings of each member, as typed; for method optuna one empty mapping."""
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
    """Return a value that depends only on `key`, so new keys or members change no other value."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    share = int.from_bytes(digest, "big") / 2**64
    if kind == "choice":
        chosen: Scalar = bounds[int(share * len(bounds))]
        return chosen
    low, high = bounds
    if kind == "integer":
        return int(low + int(share * (high - low + 1)))
    value = low * (high / low) ** share if kind == "log" else low + share * (high - low)
    # Six significant digits: more than a learning rate needs, and they fit into a table.
    return float(min(max(float(f"{value:.6g}"), low), high))


def dotted_key(key: str) -> str:
    """Return the key of cluster.yaml for a key of a training: `train.lr` for `lr`."""
    return key if "." in key else f"train.{key}"


def _job(file: JobFile, entry: Entry, name: str, followed: Mapping[str, str]) -> Job:
    """Return one job without settings; `followed` is the member that it follows, by sweep."""
    overrides: dict[str, Any] = {}
    command, steps, groups = None, None, file.groups.jobs
    if entry.train is not None:
        overrides = {"workload.name": "train", "train.checkpoints": "head"}
        overrides |= settings_of(entry, entry.train)
        if overrides.get("train.team") is not None:
            overrides["train.slots"] = None  # those of cluster.yaml are for its own training
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
    """Return `base` with the overrides of a job and then `fixed`, both by dotted keys.

    `ConfigError` if the result is not valid.
    """
    data: dict[str, Any] = base.model_dump()
    for dotted, value in {**job.overrides, **fixed}.items():
        section, _, key = dotted.partition(".")
        data[section] = {**data.get(section, {}), key: value}
    return config_from_data(data, f"job {job.name}")


def job_config(base: Config, job: Job) -> Config:
    """Return the configuration of a job's workers: that of the run, with the job's overrides. A
    team has whole cards, which decide the leader of a divided model.

    `ConfigError` if the result is not valid; for a job file `spec` reports that earlier.
    """
    # A training may run on any node, and its state must be able to move to another PC.
    workers = sum(node.workers for node in base.nodes.values())
    fixed: dict[str, object] = {} if job.is_team else {"train.slots": workers}
    if job.command is None:
        fixed |= {"workload.name": "train", "train.checkpoints": "head"}
    return with_team_alone(config_of(base, job, **fixed))


def _milestones(entry: Entry) -> Milestones | None:
    """Return the metric and milestones of an entry's jobs; `None`: the loss, without milestones."""
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
