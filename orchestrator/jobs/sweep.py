"""From the entries of a job file to its jobs, with stable names and ids.

`NAME-0`, `NAME-1`, … are the members of a sweep, in the order in which the file counts them.
Expects a file that `spec` has found right. Does not ask a sampler (`sampler`). Pure.
"""

from __future__ import annotations

import graphlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, TypeAlias

from orchestrator.config.schema import Config
from orchestrator.jobs.entries import Defaults, Entry, Stop, Sweep, as_argument, with_numbers
from orchestrator.jobs.model import Job, Kind, Milestones
from workers.settings import CommandSpec, Scalar
from workers.units import GIB

Settings: TypeAlias = Mapping[str, Scalar]

#: The folder of another job, as a command or an override names it.
FOLDER: Final = re.compile(r"\{([A-Za-z0-9][A-Za-z0-9._-]*)\.dir\}", re.ASCII)
_MEMBER: Final = re.compile(r"-\d{1,5}$", re.ASCII)
RANGES: Final = ("log", "uniform", "integer", "choice")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """Entries that have been found right, and what they are read with."""

    origin: str
    entries: tuple[Entry, ...]
    defaults: Defaults
    stop: Stop | None
    base: Config
    """Of cluster.yaml."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each entry by its name."""
    known: tuple[Job, ...] = ()
    """Jobs that the queue has already."""
    text: str = ""
    """As it stands in the file."""

    def said(self, entry: Entry, key: str) -> Any:  # noqa: ANN401  # each key has its own type
        """Return what the entry says under `key`, or else the defaults; `None`: neither."""
        return getattr(entry if key in entry.model_fields_set else self.defaults, key)

    def stop_of(self, entry: Entry) -> Stop | None:
        """Return the rule that compares the members of `entry`; `None`: nothing does."""
        rule = entry.stop or self.stop
        return rule if rule is not None and rule.rule != "none" and entry.sweep else None

    def metric_of(self, entry: Entry) -> tuple[str, bool]:
        """Return what the members of `entry` are compared by, and whether less of it is better."""
        rule = entry.stop or self.stop or Stop(rule="none")
        return rule.metric, rule.mode == "min"

    def groups(self) -> dict[str, tuple[str, ...]]:
        """Return the jobs that each name means: an entry's all its jobs, a job's itself.

        Jobs of the queue are found too, unless the file has the name.
        """
        found: dict[str, tuple[str, ...]] = {}
        for job in self.known:
            found[job.name] = (job.name,)
            if job.sweep is not None:
                found[job.sweep] = (*found.get(job.sweep, ()), job.name)
        for entry in self.in_order():
            lead = self.lead_of(entry, found)
            count = entry.sweep.size if entry.sweep else len(found[lead]) if lead else None
            numbers = range(count or 0)
            names = (entry.name,) if count is None else tuple(f"{entry.name}-{n}" for n in numbers)
            found |= {name: (name,) for name in names}
            found[entry.name] = names
        return found

    def in_order(self) -> list[Entry]:
        """Return the entries, each behind those that it comes after.

        Raises:
            graphlib.CycleError: Some go round in a circle.
        """
        entries = {entry.name: entry for entry in self.entries}
        graph = {
            name: [lead if lead in entries else _MEMBER.sub("", lead) for lead in entry.leads]
            for name, entry in entries.items()
        }
        order = graphlib.TopologicalSorter(graph).static_order()
        return [entries[name] for name in order if name in entries]

    def count(self) -> int:
        """Return how many jobs the file makes, without making them."""
        counts: dict[str, int] = {}
        for entry in self.in_order():
            followers = max(counts.get(lead, 1) for lead in entry.leads) if entry.each else 1
            counts[entry.name] = entry.sweep.size if entry.sweep else followers
        return sum(counts.values())

    def lead_of(self, entry: Entry, groups: Mapping[str, tuple[str, ...]]) -> str | None:
        """Return the name of several jobs, each of which `entry` follows; `None`: it does not."""
        several = (lead for lead in entry.leads if groups.get(lead, (lead,)) != (lead,))
        return next(several, None) if entry.each else None

    def followed(self, entry: Entry, groups: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Return the names of several jobs of which each job of `entry` follows one, also through
        others: all have as many.
        """
        found: list[str] = []
        entries = {it.name: it for it in self.entries} if entry.each else {}
        at: Entry | None = entry
        while at is not None and (lead := self.lead_of(at, groups)) is not None:
            found.append(lead)
            at = entries.get(lead)
        return tuple(found)


def members_of(sweep: Sweep) -> list[dict[str, Scalar]]:
    """Return the settings of each member, as typed; those of method optuna are not known here."""
    if sweep.method == "grid":
        return [
            dict(zip(sweep.over, values, strict=True))
            for values in itertools.product(*sweep.over.values())
        ]
    if sweep.method == "list":
        return [dict(settings) for settings in sweep.over]
    if sweep.method == "optuna":
        return []
    return [
        {key: _drawn(values, f"{sweep.seed}:{n}:{key}") for key, values in sweep.over.items()}
        for n in range(sweep.count or 0)
    ]


def range_of(values: Any) -> tuple[str, list[Any]]:  # noqa: ANN401  # a file may hold anything
    """Return the kind of a range and its bounds or choices; a plain list is one of choices."""
    if isinstance(values, list):
        return "choice", values
    (kind, bounds), *_ = values.items()
    return kind, bounds if kind == "choice" else with_numbers(bounds)


def _drawn(values: Any, key: str) -> Scalar:  # noqa: ANN401  # a list or a range
    """Return a value that depends on `key` alone: one more key or member changes no other."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    share = int.from_bytes(digest, "big") / 2**64
    kind, bounds = range_of(values)
    if kind == "choice":
        chosen: Scalar = bounds[int(share * len(bounds))]
        return chosen
    low, high = bounds
    if kind == "integer":
        return int(low + int(share * (high - low + 1)))
    value = low * (high / low) ** share if kind == "log" else low + share * (high - low)
    # Six digits are more than a learning rate needs, and a table has room for them.
    return min(max(float(f"{value:.6g}"), float(low)), float(high))


def dotted(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys of a training as in cluster.yaml: `lr` is `train.lr`."""
    return {dotted_key(key): value for key, value in train.items()}


def dotted_key(key: str) -> str:
    """Return the key of cluster.yaml that a key of a training means."""
    return key if "." in key else f"train.{key}"


def expand(
    file: JobFile, sampled: Mapping[str, Sequence[Settings]] | None = None
) -> tuple[Job, ...]:
    """Return the jobs of the file in its order. The same file gives the same names and ids.

    Of a sweep of method optuna those members exist whose settings were `sampled`, by its name and
    in the order of their numbers; what comes after it exists once all that it comes after does.
    """
    groups = file.groups()
    jobs = [
        job
        for entry in file.entries
        for job in _jobs_of(file, entry, groups, (sampled or {}).get(entry.name, ()))
    ]
    names = {job.name for job in (*jobs, *file.known)}
    while True:
        ready = [job for job in jobs if names.issuperset(job.after)]
        if len(ready) == len(jobs):
            return tuple(jobs)
        jobs, names = ready, {job.name for job in (*ready, *file.known)}


def _jobs_of(
    file: JobFile,
    entry: Entry,
    groups: Mapping[str, tuple[str, ...]],
    sampled: Sequence[Settings],
) -> list[Job]:
    names = groups[entry.name]
    if followed := file.followed(entry, groups):
        return [
            _job(file, entry, groups, name, {}, {lead: groups[lead][n] for lead in followed})
            for n, name in enumerate(names)
        ]
    settings = [{}] if entry.sweep is None else sampled or members_of(entry.sweep)
    return [
        _job(file, entry, groups, name, chosen, {})
        for name, chosen in zip(names, settings, strict=False)
    ]


def _job(
    file: JobFile,
    entry: Entry,
    groups: Mapping[str, tuple[str, ...]],
    name: str,
    settings: Settings,
    followed: Mapping[str, str],
) -> Job:
    """Return one job; `followed` names the member that it follows of each sweep."""

    def filled(text: str) -> str:
        return FOLDER.sub(lambda it: f"{{{followed.get(it[1], it[1])}.dir}}", text)

    train = None
    if entry.train is not None:
        settings = with_numbers(dotted(settings))
        train = _overrides(file, entry, settings, filled)
    steps: Any = None
    if train is not None and train.get("train.epochs", file.base.train.epochs) is None:
        steps = train.get("train.steps", file.base.train.steps)
    leads = (followed.get(lead, lead) for lead in entry.leads)
    priority, retries = file.said(entry, "priority"), file.said(entry, "retries")
    line = file.lines.get(entry.name)
    job = Job(
        name=name,
        id="",
        kind=Kind.COMMAND if train is None else Kind.TRAIN,
        sweep=None if name == entry.name else entry.name,
        settings=settings,
        overrides=train or {},
        command=_command(file, entry, settings, filled) if train is None else None,
        after=tuple(dict.fromkeys(job for lead in leads for job in groups.get(lead, (lead,)))),
        after_any=bool(entry.after_any),
        priority=priority or 0,
        retries=1 if retries is None else retries,
        nodes=file.said(entry, "nodes") or (),
        card=file.said(entry, "card"),
        memory_bytes=None if entry.memory_gib is None else int(entry.memory_gib * GIB),
        pack=bool(file.said(entry, "pack")),
        preempt=bool(file.said(entry, "preempt")),
        parks=bool(entry.parks),
        hours=file.said(entry, "hours"),
        milestones=_milestones(file, entry, steps),
        steps=steps,
        origin=file.origin if line is None else f"{file.origin}:{line}",
    )
    content = {it.name: getattr(job, it.name) for it in fields(job) if it.name != "origin"}
    text = json.dumps(content, sort_keys=True, default=asdict)
    return replace(job, id=hashlib.blake2b(text.encode(), digest_size=8).hexdigest())


def _overrides(
    file: JobFile, entry: Entry, settings: Settings, filled: Callable[[str], str]
) -> dict[str, object]:
    save_every_s = file.defaults.save_every_s
    overrides: dict[str, Any] = {
        "workload.name": "train",
        "train.checkpoints": "head",
        **({} if save_every_s is None else {"train.save_every_s": save_every_s}),
        **with_numbers(dotted(entry.train or {})),
        **settings,
    }
    return {key: filled(it) if isinstance(it, str) else it for key, it in overrides.items()}


def _command(
    file: JobFile, entry: Entry, settings: Settings, filled: Callable[[str], str]
) -> CommandSpec:
    def said(text: str) -> str:
        for key, value in settings.items():
            text = text.replace(f"{{{key}}}", as_argument(value))
        return filled(text)

    cwd, grace_s = file.said(entry, "cwd"), file.said(entry, "grace")
    env = {**(file.defaults.env or {}), **(entry.env or {})}
    return CommandSpec(
        argv=tuple(said(word) for word in entry.command or ()),
        cwd=None if cwd is None else said(cwd),
        env={name: said(text) for name, text in env.items()},
        python=file.said(entry, "python"),
        time_limit_s=file.said(entry, "time_limit"),
        grace_s=CommandSpec(argv=()).grace_s if grace_s is None else grace_s,
        cap=entry.cap is not False,
        outputs=entry.outputs,
    )


def _milestones(file: JobFile, entry: Entry, steps: int | None) -> Milestones | None:
    rule = file.stop_of(entry)
    if rule is None or rule.first is None:
        metric, is_min = file.metric_of(entry)
        is_named = entry.sweep is not None or entry.stop is not None
        if not is_named or (metric, is_min) == ("loss", True):
            return None
        return Milestones(rule="none", metric=metric, is_min=is_min, first=1, factor=2, last=1)
    return Milestones(
        rule=rule.rule,
        metric=rule.metric,
        is_min=rule.mode == "min",
        first=rule.first,
        factor=rule.factor,
        last=rule.last or steps or rule.first,
    )
