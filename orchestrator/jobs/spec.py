"""Parses job files and commands typed as a job, and reports problems with file, line and key.

`entries` has the checks of single sections. The caller reads the file and passes the jobs of the
queue; nothing here checks that a folder or a program exists. Pure.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from orchestrator.config.load import (
    MAX_PROBLEMS,
    KeyPath,
    YamlSource,
    checked,
    listed,
    nearest,
    read_yaml_text,
    refusals,
)
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError, Problem, in_words
from orchestrator.jobs.entries import MAX_JOBS, VALID_NAME, Document, Entry, Shared
from orchestrator.jobs.model import Job
from orchestrator.jobs.places import plain
from orchestrator.jobs.sweep import FOLDER, JobFile, config_of, dotted_key, settings_of

_LONGEST_NAME: Final = 60
#: The source that problems name for a job typed on the command line.
_TYPED: Final = "jobs submit"
_EXAMPLE: Final = "such as jobs: [{name: first, train: {preset: gpt-nano}}]"

#: Sections of cluster.yaml that a job may override; the others apply to the whole run.
_SECTIONS: Final = ("train", "workload", "memory", "verify")
#: Keys of `train` that change what the loss measures: members that differ in one are not compared.
_UNEQUAL: Final = (
    "preset", "model", "data", "documents", "validation", "batch", "seq", "packing",
    "label_smoothing", "r_drop",
)  # fmt: skip
#: The metrics that a training reports.
_METRICS: Final = ("loss", "validation_loss")


def parse(text: str, origin: str, base: Config, known: Sequence[Job] = ()) -> JobFile:
    """Return the job file in `text`; `origin` is its name in problems.

    `base` is the configuration that trainings override, `known` the jobs of the queue, which
    `after` may name. `ConfigError` with all problems.
    """
    return _parsed(read_yaml_text(text, origin, _EXAMPLE), base, known)


def from_words(
    base: Config,
    command: Sequence[str],
    *,
    name: str | None = None,
    known: Sequence[Job] = (),
    **options: object,
) -> JobFile:
    """Return the job file of one command that is typed on the command line.

    `options` are other keys of its entry. Without `name`, the job gets a name that no job of the
    queue (`known`) has. `ConfigError` with all problems, each with its option.
    """
    line = command[0] if len(command) == 1 else list(command)
    entry: dict[str, Any] = {"command": line, **options}
    entry["name"] = _free_name(command, known) if name is None else name
    places: dict[KeyPath, tuple[str, int | None]] = {
        ("jobs", "0", key): ("-- COMMAND" if key == "command" else f"--{key}", None)
        for key in entry
    }
    return _parsed(YamlSource(name=_TYPED, data={"jobs": [entry]}, places=places), base, known)


def _free_name(command: Sequence[str], known: Sequence[Job]) -> str:
    """Return the name of a command's script, with `.2`, `.3`, … added if it is taken."""
    words = [word for word in command if word] or ["job"]
    script = next((word for word in words if re.search(r"\w\.(?:py|sh)$", word)), words[0])
    usual = re.sub(r"[^A-Za-z0-9._-]+", "-", script.rpartition("/")[2]).strip(".-_")[:40] or "job"
    taken = {name for job in known for name in (job.name, job.sweep)}
    number, name = 1, usual
    while name in taken:
        number, name = number + 1, f"{usual}.{number + 1}"
    return name


def _parsed(source: YamlSource, base: Config, known: Sequence[Job]) -> JobFile:
    """Return the data of `source` as a job file; `ConfigError` with all problems."""
    try:
        document = checked(source, Document)
    except ConfigError as error:
        raise _refusals(source, error.problems) from None
    paths = [("jobs", str(n)) for n in range(len(document.jobs))]
    lines = [source.places.get(path, (source.name, None))[1] for path in paths]
    file = JobFile(
        origin=source.name,
        entries=document.entries(),
        base=base,
        lines={it.name: line for it, line in zip(document.jobs, lines, strict=True) if line},
        known=tuple(known),
    )
    entries = [
        _Place(source=source, file=file, path=path, entry=entry, line=line)
        for path, entry, line in zip(paths, file.entries, lines, strict=True)
    ]
    # Each check assumes that the checks before it found no problem.
    problems = (
        list(_check_places(source, document, base))
        or list(_check_swept_words(entries))
        or list(_check_names(entries))
        or list(_check_jobs(file, entries))
    )
    if problems:
        raise _refusals(source, problems)
    return file


def _refusals(source: YamlSource, problems: Sequence[Problem]) -> ConfigError:
    """Return the error of `problems`; their keys have an entry's name instead of its number."""
    named = []
    for problem in problems:
        words, place = (problem.key or "").split("."), problem.source
        if words[0] == "jobs" and len(words) > 1:
            entry = source.data["jobs"][int(words[1])]
            name = entry.get("name") if isinstance(entry, dict) else None
            if source.name == _TYPED:  # the keys of the only entry are options
                place = source.name if len(words) == 2 else place
                words = words[2:] if len(words) > 3 else []
            elif isinstance(name, str) and words[2:] != ["name"]:
                words[1] = name
        named.append(replace(problem, source=place, key=".".join(words) or None))
    return refusals(source, named)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """An entry and its position in the file."""

    source: YamlSource
    file: JobFile
    path: KeyPath
    entry: Entry
    line: int | None

    def problem(self, text: str, valid: str | None, *keys: str) -> Problem:
        return self.source.problem((*self.path, *keys), text, valid)


def _check_places(source: YamlSource, document: Document, base: Config) -> Iterator[Problem]:
    """Yield a problem for each node or card that cluster.yaml does not have."""
    cards = [node.gpu for node in base.nodes.values()]
    said: list[tuple[KeyPath, Shared]] = [(("defaults",), document.defaults)]
    said += [(("jobs", str(n)), entry) for n, entry in enumerate(document.jobs)]
    for path, part in said:
        for name in part.nodes:
            if name not in base.nodes:
                text = f"there is no node {in_words(name)}{nearest(name, list(base.nodes))}"
                yield source.problem((*path, "nodes"), text, f"{listed(base.nodes)}, or any")
        if part.card is not None and not any(plain(part.card) in plain(card) for card in cards):
            text = f"no node has a card {in_words(part.card)}{nearest(part.card, cards)}"
            yield source.problem((*path, "card"), text, f"a part of {listed(cards)}")


def _check_swept_words(entries: Sequence[_Place]) -> Iterator[Problem]:
    """Yield a problem for each swept value that a command does not contain or cannot contain."""
    for at in entries:
        sweep = at.entry.sweep
        for where, values in sweep.cells() if sweep and at.entry.command else ():
            word = f"{{{where[-1]}}}"
            if not any(word in text for _, text in at.entry.texts()):
                text = "appears nowhere in command, env or cwd"
                yield at.problem(text, f"{word} where its value belongs", "sweep", *where)
            elif any(it is None or isinstance(it, bool) for it in values):
                text = "has true, false or null, which are not text"
                yield at.problem(text, "the same in quotes", "sweep", *where)


def _check_names(entries: Sequence[_Place]) -> Iterator[Problem]:
    """Yield names that are not unique, and problems of `after`: names, cycles, `each`."""
    source, file = entries[0].source, entries[0].file
    try:
        groups = file.groups
    except graphlib.CycleError as error:
        circle = error.args[1][::-1]
        at = next(at for at in entries if at.entry.name == circle[0])
        shown = " after ".join(circle if len(circle) < 12 else (*circle[:10], "…", circle[-1]))
        text = f"goes round in a circle: {shown}"
        yield at.problem(text, "one of these without the other", "after")
        return
    if groups.count > MAX_JOBS:
        text = f"makes {groups.count:,} jobs in all"
        yield source.problem(("jobs",), text, f"at most {MAX_JOBS:,}")
        return
    owners: dict[str, str] = {}
    for at in entries:
        entry, mine = at.entry, groups.jobs[at.entry.name]
        if taken := owners.keys() & {entry.name, *mine}:
            text = f"{in_words(min(taken))} is also a name of {owners[min(taken)]}"
            yield at.problem(text, "another name", "name")
        owners |= dict.fromkeys((entry.name, *mine), f"the entry on line {at.line}")
        if len(mine[-1]) > _LONGEST_NAME:
            text = f"{in_words(mine[-1])} is too long with its number"
            yield at.problem(text, VALID_NAME, "name")
        for lead in entry.leads:
            if lead not in groups.jobs:
                others = [it.name for it in file.entries if it != entry]
                others += dict.fromkeys(job.sweep or job.name for job in file.known)
                text = f"there is no job {in_words(lead)}{nearest(lead, others)}"
                key = "after" if entry.after else "after_any"
                yield at.problem(text, listed(others) or None, key)
        several = [lead for lead in entry.leads if groups.jobs.get(lead, (lead,)) != (lead,)]
        if entry.each and len(several) != 1:
            text = f"each follows one sweep, and after names {len(several)}"
            yield at.problem(text, "one sweep in after, or no each", "each")


def _check_jobs(file: JobFile, entries: Sequence[_Place]) -> Iterator[Problem]:
    """Yield the problems of the jobs that the entries make."""
    made: dict[str, list[Job]] = {}
    for job in file.jobs:
        made.setdefault(job.sweep or job.name, []).append(job)
    after = {job.name: job.after for job in (*file.known, *file.jobs)}
    for at in entries:
        jobs = _samples(at.entry, made[at.entry.name])
        found = dict.fromkeys(_check_folders(at, jobs[0], after))
        found |= dict.fromkeys(_check_keys(at))
        for job in jobs if at.entry.train is not None and not found else ():
            if len(found) < MAX_PROBLEMS:
                found |= dict.fromkeys(_check_config(at, job))
        yield from found or _check_milestones(at, jobs)


def _samples(entry: Entry, jobs: list[Job]) -> list[Job]:
    """Return jobs that stand for all jobs of an entry: for intervals, those at both bounds."""
    if entry.sweep is None or entry.sweep.count is None:
        return jobs
    ranges = entry.sweep.ranges.items()
    ends = [{key: values[end] for key, (_, values) in ranges} for end in (0, -1)]
    return [jobs[0].with_settings(settings_of(entry, settings)) for settings in ends]


def _check_folders(at: _Place, job: Job, after: Mapping[str, tuple[str, ...]]) -> Iterator[Problem]:
    """Yield each `{NAME.dir}` of an entry if the job NAME need not have ended before `job`."""
    groups = at.file.groups
    named = [(where, name) for where, text in at.entry.texts() for name in FOLDER.findall(text)]
    reached, waiting = set(), list(job.after if named else ())
    while waiting:
        if (name := waiting.pop()) not in reached:
            reached.add(name)
            waiting += after.get(name, ())
    for where, name in named:
        members = groups.jobs.get(name, ())
        if not members:
            fault = f"there is no job {name}{nearest(name, list(groups.jobs))}"
            valid = listed(groups.jobs)
        elif members != (name,) and name not in groups.followed.get(at.entry.name, ()):
            fault = f"{name} is {len(members)} jobs, each with a folder of its own"
            valid = f"{{{members[0]}.dir}}, or each: true with after: [{name}]"
        elif reached.isdisjoint(members):
            fault, valid = f"nothing says that {name} has ended before", f"after: [{name}]"
        else:
            continue
        yield at.problem(f"{{{name}.dir}}: {fault}", valid, *where)


def keys_of(entry: Entry) -> Iterator[tuple[KeyPath, str, list[Any]]]:
    """Yield the path of each key of a training, the key as in cluster.yaml, and its values."""
    for key, value in (entry.train or {}).items():
        yield ("train", key), dotted_key(key), [value]
    for where, values in entry.sweep.cells() if entry.train is not None and entry.sweep else ():
        yield ("sweep", *where), dotted_key(where[-1]), values


def _check_keys(at: _Place) -> Iterator[Problem]:
    """Yield the keys of a training that a job may not have."""
    first: dict[tuple[KeyPath, str], KeyPath] = {}
    for where, word, values in keys_of(at.entry):
        section = word.partition(".")[0]
        twin = first.setdefault((where[:-1], word), where)
        if twin != where:
            yield at.problem(f"is the same key as {twin[-1]}", "one of the two", *where)
        if section in Config.model_fields and section not in _SECTIONS:
            valid = f"{section} in cluster.yaml; a job has keys of {', '.join(_SECTIONS)}"
            yield at.problem(f"{section} is the same for all jobs of a run", valid, *where)
        elif word == "workload.name" and values != ["train"]:
            yield at.problem("a training has the workload train", "command: for other work", *where)
        elif word == "train.team":
            yield from _check_team(at, where, values)
        elif word == "train.split" and ("auto" in values or where[0] == "sweep"):
            text = "a job must say what its members divide"
            yield at.problem(text, "split: data, or layers, below train", *where)
        elif word == "train.slots":
            valid = "no slots; sweep over workload.seed for several trainings"
            yield at.problem("a job is one training in one slot", valid, *where)
        elif word == "train.checkpoints" and "node" in values:
            text = "with node, the head has neither the files of a job nor its checkpoints"
            yield at.problem(text, "head, or no checkpoints", *where)


def _check_team(at: _Place, where: KeyPath, values: list[Any]) -> Iterator[Problem]:
    """Yield why a job may not have this team."""
    named = [str(name) for team in values if isinstance(team, list) for name in team]
    pcs = list(at.file.base.nodes)
    slot = next((name for name in named if "/" in name), None)
    unknown = next((name for name in named if name not in pcs), None)
    beside = next((key for key in ("nodes", "card", "pack") if getattr(at.entry, key)), None)
    if where[0] == "sweep":
        yield at.problem("is the same for all members of a sweep", "team below train", *where)
    elif slot is not None:
        text = f"a job takes whole cards, and {in_words(slot)} is one worker of a PC"
        yield at.problem(text, "the names of PCs, or all", *where)
    elif unknown is not None:
        text = f"there is no PC {in_words(unknown)}{nearest(unknown, pcs)}"
        yield at.problem(text, f"{listed(pcs)}, or all", *where)
    elif values != [None] and beside is not None:
        text = f"names the cards of a job, and so does {beside}"
        yield at.problem(text, f"no {beside}, or no team", *where)


def _check_config(at: _Place, job: Job) -> Iterator[Problem]:
    """Yield the problems of the configuration that results from the overrides of a training."""
    # In a sweep of method list, the number of the job is the number of its row.
    row = job.name.rpartition("-")[2]
    places = {
        word: (*at.path, *where)
        for where, word, _ in keys_of(at.entry)
        if len(where) < 4 or where[-2] == row
    }
    try:
        config_of(at.file.base, job)
    except ConfigError as error:
        for problem in error.problems:
            where = places.get(problem.key or "", (*at.path, "train"))
            placed = at.source.problem(where, problem.text, problem.valid)
            yield replace(placed, key=".".join((*at.path, problem.key or "train")))


def _check_milestones(at: _Place, jobs: Sequence[Job]) -> Iterator[Problem]:
    """Yield why the members of a sweep cannot be compared."""
    entry, rule = at.entry, jobs[0].milestones
    if rule is None or rule.first is None:
        return
    own: KeyPath = (*at.path, "stop")
    stop = own if own in at.source.places else ("stop",)
    without = f"stop: {{rule: none}} in {entry.name}"
    for key in _UNEQUAL if entry.train is not None else ():
        if len({job.settings.get(f"train.{key}") for job in jobs}) > 1:
            text = f"the members of {entry.name} differ in {key}: their losses are not comparable"
            yield at.problem(text, f"{without}, or a sweep without {key}", "sweep", "over")
    if entry.train is not None and rule.metric not in _METRICS:
        text = f"a training reports no {in_words(rule.metric)}{nearest(rule.metric, _METRICS)}"
        yield at.source.problem((*stop, "metric"), text, ", ".join(_METRICS))
    steps = min((job.steps for job in jobs if job.steps is not None), default=None)
    if steps is None and rule.last is None:
        text = f"is missing, and {entry.name} does not say its steps"
        yield at.source.problem((*stop, "last"), text, "the last milestone, in optimiser steps")
    if steps is not None and rule.first >= steps:
        text = f"{rule.first} is not below the {steps} steps of {entry.name}"
        yield at.source.problem((*stop, "first"), text, f"a smaller number, or {without}")
