"""Job files and one-liners, and what is wrong with them, in words with file, line and key.

What one key alone is refused for is in `entries`. The caller reads the file and knows the queue;
nothing here looks for a folder or a program. Pure.
"""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from orchestrator.config.schema import Config
from orchestrator.config.validation import (
    MAX_PROBLEMS,
    checked,
    in_words,
    nearest,
    refusals,
    validated,
)
from orchestrator.config.yaml_source import KeyPath, YamlSource, listed, read_yaml_text
from orchestrator.errors import ConfigError, Problem
from orchestrator.jobs.entries import VALID_NAME, Document, Entry, Sweep
from orchestrator.jobs.model import Job
from orchestrator.jobs.places import plain
from orchestrator.jobs.sweep import FOLDER, RANGES, JobFile, dotted_key, expand, range_of

#: More jobs than this in a file are a mistake of an exponent. A turn of the head looks at each job
#: of the queue: at 1,000 of them for about 10 ms.
MAX_JOBS: Final = 2_000
_LONGEST_NAME: Final = 60
#: What problems of words on a command line are called after.
_TYPED: Final = "jobs submit"
_EXAMPLE: Final = "such as jobs: [{name: first, train: {preset: gpt-nano}}]"

#: Sections of cluster.yaml that a job may differ in; the others are those of the whole run.
_SECTIONS: Final = ("train", "workload", "memory", "verify")
#: What makes a loss of another kind: members of a sweep that differ in it are not compared.
_UNEQUAL: Final = (
    "preset", "model", "data", "documents", "validation", "batch", "seq", "packing",
    "label_smoothing", "r_drop",
)  # fmt: skip
#: Of a training.
_METRICS: Final = ("loss", "validation_loss")


def parse(text: str, origin: str, base: Config, known: Sequence[Job] = ()) -> JobFile:
    """Return the job file in `text`; problems are called after `origin`.

    `base` is the configuration from which a training differs in what it says, `known` the jobs of
    the queue, which `after` may name. `ConfigError` with everything that is wrong.
    """
    return replace(_right(read_yaml_text(text, origin, _EXAMPLE), base, known), text=text)


def from_words(
    base: Config,
    command: Sequence[str],
    *,
    name: str | None = None,
    known: Sequence[Job] = (),
    **options: object,
) -> JobFile:
    """Return the one entry of a command that is typed on a command line.

    `options` are other keys of an entry. Without a `name` it gets one that no job of `known`, the
    queue's, has. `ConfigError` with everything that is wrong, each with its option.
    """
    line = command[0] if len(command) == 1 else list(command)
    entry: dict[str, Any] = {"command": line, **options}
    entry["name"] = _free_name(command, known) if name is None else name
    places: dict[KeyPath, tuple[str, int | None]] = {
        ("jobs", "0", key): ("-- COMMAND" if key == "command" else f"--{key}", None)
        for key in entry
    }
    source = YamlSource(name=_TYPED, data={"jobs": [entry]}, places=places)
    return _right(source, base, known)


def _free_name(command: Sequence[str], known: Sequence[Job]) -> str:
    """Return the name of a command's script, or with `.2`, … behind it where that is taken."""
    words = [word for word in command if word] or ["job"]
    script = next((word for word in words if re.search(r"\w\.(?:py|sh)$", word)), words[0])
    usual = re.sub(r"[^A-Za-z0-9._-]+", "-", script.rpartition("/")[2]).strip(".-_")[:40] or "job"
    taken = {name for job in known for name in (job.name, job.sweep)}
    number, name = 1, usual
    while name in taken:
        number, name = number + 1, f"{usual}.{number + 1}"
    return name


def _right(source: YamlSource, base: Config, known: Sequence[Job]) -> JobFile:
    """Return the data of `source` as a job file; `ConfigError` with all problems."""
    try:
        document = checked(source, Document)
    except ConfigError as error:
        raise _refusals(source, error.problems) from None
    file = JobFile(
        origin=source.name,
        entries=tuple(document.jobs),
        defaults=document.defaults,
        stop=document.stop,
        base=base,
        lines={
            entry.name: line
            for n, entry in enumerate(document.jobs)
            if (line := _line_of(source, n)) is not None
        },
        known=tuple(known),
    )
    # Each of these rests on what those before it have found right.
    for check in (_of_sweeps, _of_places, _of_names, _of_jobs):
        if problems := list(check(source, file)):
            raise _refusals(source, problems)
    return file


def _line_of(source: YamlSource, entry: int) -> int | None:
    return source.places.get(("jobs", str(entry)), (source.name, None))[1]


def _refusals(source: YamlSource, problems: Sequence[Problem]) -> ConfigError:
    """Return the error, with the entry's name in place of its number in each key."""
    named = []
    for problem in problems:
        words, place = (problem.key or "").split("."), problem.source
        if words[0] == "jobs" and len(words) > 1:
            entry = source.data["jobs"][int(words[1])]
            name = entry.get("name") if isinstance(entry, dict) else None
            if source.name == _TYPED:  # of one entry, whose keys are options
                place = source.name if len(words) == 2 else place
                words = words[2:] if len(words) > 3 else []
            elif isinstance(name, str) and words[2:] != ["name"]:
                words[1] = name
        named.append(replace(problem, source=place, key=".".join(words) or None))
    return refusals(source, named)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """An entry where it stands."""

    source: YamlSource
    file: JobFile
    path: KeyPath
    entry: Entry

    def problem(self, text: str, valid: str | None, *keys: str) -> Problem:
        return self.source.problem((*self.path, *keys), text, valid)


def _placed(source: YamlSource, file: JobFile) -> Iterator[_Place]:
    for n, entry in enumerate(file.entries):
        yield _Place(source=source, file=file, path=("jobs", str(n)), entry=entry)


def _of_sweeps(source: YamlSource, file: JobFile) -> Iterator[Problem]:
    """Yield what is wrong with each sweep by itself."""
    for at in _placed(source, file):
        yield from _of_sweep(at, at.entry.sweep) if at.entry.sweep is not None else ()


def _of_sweep(at: _Place, sweep: Sweep) -> Iterator[Problem]:
    over, is_list, entry = sweep.over, sweep.method == "list", at.entry
    rows = (over if isinstance(over, list) else [None]) if is_list else [over]
    if not rows or not all(isinstance(row, dict) and row for row in rows):
        valid = (
            "[{lr: 1e-4, batch: 8}, …]" if is_list else "KEY: [values], such as lr: [1e-4, 3e-4]"
        )
        text = f"{in_words(over)} is not what method {sweep.method} takes"
        yield at.problem(text if over else "holds nothing", valid, "sweep", "over")
        return
    faults = 0
    for where, values in sweep.cells():
        fault = _fault_of_values([values] if is_list else values, sweep.method)
        valid = "a single value" if is_list else "a list such as [1e-4, 3e-4]"
        if sweep.count is not None:
            valid = f"{valid}, {{log: [1e-5, 1e-3]}}, {{uniform: [0, 0.3]}}, {{integer: [1, 8]}}"
        if fault is None and entry.command:
            valid = f"{{{where[-1]}}} where its value belongs"
            if not any(f"{{{where[-1]}}}" in text for _, text in entry.texts()):
                fault = "stands nowhere in command, env or cwd"
            elif any(it is None or isinstance(it, bool) for it in _chosen(values)):
                fault, valid = "holds true, false or null, which are no text", "the same in quotes"
        if fault is not None:
            faults += 1
            yield at.problem(fault, valid, "sweep", *where)
    if (sweep.count is None) == (sweep.method in {"random", "optuna"}):
        text = "is missing" if sweep.count is None else f"is not for method {sweep.method}"
        valid = f"a number of jobs with method random and optuna, at most {MAX_JOBS:,}"
        yield at.problem(text, valid, "sweep", "count")
    elif not faults and not 1 <= sweep.size <= MAX_JOBS:
        text = f"makes {sweep.size:,} jobs" if sweep.size < 10**18 else "makes over 10^18 jobs"
        key = "over" if sweep.count is None else "count"
        yield at.problem(text, f"1 to {MAX_JOBS:,} jobs", "sweep", key)


def _fault_of_values(values: object, method: str) -> str | None:
    """Return what is wrong with the values, or the range, of one key of a sweep."""
    if isinstance(values, dict) and method == "grid":
        return "is a range, which is for method random and optuna"
    if not isinstance(values, list) and not (isinstance(values, dict) and len(values) == 1):
        return f"{in_words(values)} is not a list of values"
    kind, bounds = range_of(values)
    if kind not in RANGES:
        return f"there is no range {in_words(kind)}{nearest(kind, RANGES)}"
    if not isinstance(bounds, list) or not bounds:
        return "holds no values"
    if any(isinstance(it, (dict, list)) for it in bounds):
        return "holds a list or a mapping, which is not a single value"
    return None if kind == "choice" else _fault_of_bounds(kind, bounds)


def _fault_of_bounds(kind: str, bounds: list[Any]) -> str | None:
    types = (int,) if kind == "integer" else (int, float)
    if len(bounds) != 2 or any(type(it) not in types or abs(it) > 1e300 for it in bounds):
        return f"{kind} takes two {'whole ' if kind == 'integer' else ''}numbers"
    low, high = bounds
    if low >= high or (kind == "log" and low <= 0):
        least = "above 0 and " if kind == "log" else ""
        return f"{kind} begins at {in_words(low)}, and has to begin {least}below {in_words(high)}"
    return None


def _of_places(source: YamlSource, file: JobFile) -> Iterator[Problem]:
    """Yield nodes and cards that cluster.yaml does not have."""
    nodes = file.base.nodes
    cards = [node.gpu for node in nodes.values()]
    placed = [(at.path, at.entry) for at in _placed(source, file)]
    for path, part in ((("defaults",), file.defaults), *placed):
        for name in part.nodes or ():
            if name not in nodes:
                text = f"there is no node {in_words(name)}{nearest(name, list(nodes))}"
                yield source.problem((*path, "nodes"), text, f"{listed(nodes)}, or any")
        if part.card is not None and not any(plain(part.card) in plain(card) for card in cards):
            text = f"no node has a card {in_words(part.card)}{nearest(part.card, cards)}"
            yield source.problem((*path, "card"), text, f"a part of {listed(cards)}")


def _of_names(source: YamlSource, file: JobFile) -> Iterator[Problem]:
    """Yield names that are not unique, and what is wrong with `after`: names, circles, `each`."""
    try:
        count = file.count()
    except graphlib.CycleError as error:
        circle = error.args[1][::-1]
        at = next(at for at in _placed(source, file) if at.entry.name == circle[0])
        shown = " after ".join(circle if len(circle) < 12 else (*circle[:10], "…", circle[-1]))
        text = f"goes round in a circle: {shown}"
        yield at.problem(text, "one of these without the other", "after")
        return
    if count > MAX_JOBS:
        yield source.problem(("jobs",), f"makes {count:,} jobs in all", f"at most {MAX_JOBS:,}")
        return
    groups = file.groups()
    owners: dict[str, str] = {}
    for at in _placed(source, file):
        entry, mine = at.entry, groups[at.entry.name]
        if taken := owners.keys() & {entry.name, *mine}:
            text = f"{in_words(min(taken))} is also a name of {owners[min(taken)]}"
            yield at.problem(text, "another name", "name")
        owner = f"the entry on line {_line_of(source, int(at.path[1]))}"
        owners |= dict.fromkeys((entry.name, *mine), owner)
        if len(mine[-1]) > _LONGEST_NAME:
            yield at.problem(
                f"{in_words(mine[-1])} is too long with its number", VALID_NAME, "name"
            )
        for lead in entry.leads:
            if lead not in groups:
                others = [it.name for it in file.entries if it != entry]
                others += dict.fromkeys(job.sweep or job.name for job in file.known)
                text = f"there is no job {in_words(lead)}{nearest(lead, others)}"
                yield at.problem(
                    text, listed(others) or None, "after" if entry.after else "after_any"
                )
        several = [lead for lead in entry.leads if groups.get(lead, (lead,)) != (lead,)]
        if entry.each and len(several) != 1:
            text = f"each follows one sweep, and after names {len(several)}"
            yield at.problem(text, "one sweep in after, or no each", "each")


def _of_jobs(source: YamlSource, file: JobFile) -> Iterator[Problem]:
    """Yield what is wrong with the jobs that the entries make."""
    groups = file.groups()
    plain = {name: getattr(file.base, name).model_dump() for name in _SECTIONS}
    made: dict[str, list[Job]] = {entry.name: [] for entry in file.entries}
    for job in expand(file, _ends_of_ranges(file)):
        made[job.sweep or job.name].append(job)
    after = {
        job.name: job.after for job in (*file.known, *(it for all_ in made.values() for it in all_))
    }
    for at in _placed(source, file):
        jobs = made[at.entry.name]
        found = dict.fromkeys(_of_folders(at, jobs[0], groups, after))
        found |= dict.fromkeys(_of_keys(at))
        for job in jobs if at.entry.train is not None and not found else ():
            if len(found) < MAX_PROBLEMS:
                found |= dict.fromkeys(_of_config(at, job, plain))
        yield from found or _of_milestones(at, jobs)


def _ends_of_ranges(file: JobFile) -> dict[str, list[dict[str, Any]]]:
    """Return settings for sweeps over ranges: in turn all first ends and all last ends."""
    sampled = {}
    for entry in file.entries:
        if entry.sweep is not None and entry.sweep.count is not None:
            ranges = {key: range_of(values)[1] for key, values in entry.sweep.over.items()}
            ends = [{key: values[end] for key, values in ranges.items()} for end in (0, -1)]
            sampled[entry.name] = [ends[n % 2] for n in range(entry.sweep.size)]
    return sampled


def _of_folders(
    at: _Place,
    job: Job,
    groups: Mapping[str, tuple[str, ...]],
    after: Mapping[str, tuple[str, ...]],
) -> Iterator[Problem]:
    """Yield each `{NAME.dir}` of an entry whose job is not sure to have ended before `job`."""
    entry = at.entry
    if not any(FOLDER.search(text) for _, text in entry.texts()):
        return
    followed = at.file.followed(entry, groups)
    reached, waiting = set(), list(job.after)
    while waiting:
        if (name := waiting.pop()) not in reached:
            reached.add(name)
            waiting += after.get(name, ())
    for where, text in entry.texts():
        for name in FOLDER.findall(text):
            members, fault, valid = groups.get(name, ()), None, f"after: [{name}]"
            if not members:
                fault = f"there is no job {name}{nearest(name, list(groups))}"
                valid = listed(groups)
            elif members != (name,) and name not in followed:
                fault = f"{name} is {len(members)} jobs, each with a folder of its own"
                valid = f"{{{members[0]}.dir}}, or each: true with after: [{name}]"
            elif reached.isdisjoint(members):
                fault = f"nothing says that {name} has ended before"
            if fault is not None:
                yield at.problem(f"{{{name}.dir}}: {fault}", valid, *where)


def keys_of(entry: Entry) -> Iterator[tuple[KeyPath, str, Any]]:
    """Yield where each key of a training stands, the key as in cluster.yaml, and its values."""
    for key, value in (entry.train or {}).items():
        yield ("train", key), dotted_key(key), [value]
    for where, values in entry.sweep.cells() if entry.train is not None and entry.sweep else ():
        yield ("sweep", *where), dotted_key(where[-1]), _chosen(values)


def _chosen(values: Any) -> list[Any]:  # noqa: ANN401  # a list, a range, or a value
    return range_of(values)[1] if isinstance(values, (dict, list)) else [values]


def _of_keys(at: _Place) -> Iterator[Problem]:
    """Yield keys of a training that a job may not have."""
    first: dict[tuple[KeyPath, str], KeyPath] = {}
    may_move = len(at.file.said(at.entry, "nodes") or ()) != 1
    for where, word, values in keys_of(at.entry):
        section = word.partition(".")[0]
        twin = first.setdefault((where[:-1], word), where)
        if twin != where:
            yield at.problem(f"is the same key as {twin[-1]}", "one of the two", *where)
        if section in Config.model_fields and section not in _SECTIONS:
            valid = f"{section} in cluster.yaml; a job has keys of {', '.join(_SECTIONS)}"
            yield at.problem(f"{section} is the same for all jobs of a run", valid, *where)
        elif word == "workload.name" and values != ["train"]:
            yield at.problem("an entry with train: trains", "command: for other work", *where)
        elif word == "train.slots":
            valid = "no slots; sweep over workload.seed for several trainings"
            yield at.problem("a job is one training in one slot", valid, *where)
        elif word == "train.checkpoints" and "node" in values and may_move:
            text = "node keeps checkpoints on one PC, and this job may move to another"
            valid = "head, or also nodes: with the one node it may run on"
            yield at.problem(text, valid, *where)


def _of_config(at: _Place, job: Job, plain: Mapping[str, Mapping[str, Any]]) -> Iterator[Problem]:
    """Yield what is wrong with the configuration that a training leads to."""
    # Sections without an override are frozen models, which are not validated again.
    data = {name: getattr(at.file.base, name) for name in Config.model_fields}
    for word, value in job.overrides.items():
        section, _, name = word.partition(".")
        changed = data[section] if isinstance(data.get(section), dict) else plain.get(section, {})
        data[section] = {**changed, name: value}
    # Of the rows of a list, this job's is that of its number.
    row = job.name.rpartition("-")[2]
    places: dict[str, KeyPath] = {"train.save_every_s": ("defaults", "save_every_s")}
    places |= {
        word: (*at.path, *where)
        for where, word, _ in keys_of(at.entry)
        if len(where) < 4 or where[-2] == row
    }
    try:
        validated(YamlSource(name=at.source.name, data=data))
    except ConfigError as error:
        for problem in error.problems:
            where = places.get(problem.key or "", (*at.path, "train"))
            placed = at.source.problem(where, problem.text, problem.valid)
            yield replace(placed, key=".".join((*at.path, problem.key or "train")))


def _of_milestones(at: _Place, jobs: Sequence[Job]) -> Iterator[Problem]:
    """Yield why the members of a sweep cannot be compared."""
    entry, rule = at.entry, at.file.stop_of(at.entry)
    if rule is None or rule.first is None:
        return

    def problem(key: str, text: str, valid: str) -> Problem:
        place: KeyPath = (*at.path, "stop", key) if entry.stop else ("stop", key)
        return at.source.problem(place, text, valid)

    without = f"stop: {{rule: none}} in {entry.name}"
    for key in _UNEQUAL if entry.train is not None else ():
        if len({job.settings.get(f"train.{key}") for job in jobs}) > 1:
            text = f"the members of {entry.name} differ in {key}: their losses are not comparable"
            yield at.problem(text, f"{without}, or a sweep without {key}", "sweep", "over")
    if entry.train is not None and rule.metric not in _METRICS:
        text = f"a training tells no {in_words(rule.metric)}{nearest(rule.metric, _METRICS)}"
        yield problem("metric", text, ", ".join(_METRICS))
    steps = min((job.steps for job in jobs if job.steps is not None), default=None)
    if steps is None and rule.last is None:
        text = f"is missing, and {entry.name} does not say its steps"
        yield problem("last", text, "the last milestone, in optimiser steps")
    if steps is not None and rule.first >= steps:
        text = f"{rule.first} is not below the {steps} steps of {entry.name}"
        yield problem("first", text, f"a smaller number, or {without}")
