"""The verb `jobs run`: reads a job file, finds the queue to go on with, or begins one.

Does not decide what runs where (`jobs/queue.py`), and runs nothing itself (`run/runner.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import typer
from typer import Argument, Option

from orchestrator.cli.loading import Injected, NewRun, duration_s, shared
from orchestrator.cli.printing import tell
from orchestrator.cli.service import install_queue
from orchestrator.config.load import config_from_text
from orchestrator.config.schema import Config, WorkersConfig
from orchestrator.config.yaml_source import read_text
from orchestrator.core.placement import Target
from orchestrator.errors import UsageError
from orchestrator.jobs.model import Job, Standing, Submitted
from orchestrator.jobs.places import likeness
from orchestrator.jobs.queue import Queue
from orchestrator.jobs.spec import keys_of
from orchestrator.jobs.sweep import JobFile, expand
from orchestrator.record.archive import StoredRun, read_run
from orchestrator.record.command_file import any_waits
from orchestrator.record.folders import RUNNING, command_for, list_runs
from orchestrator.record.jobs import QUEUE_NAME, queue_of
from orchestrator.record.store import RunFacts
from orchestrator.run.earlier import fetch_weights
from orchestrator.run.prediction import least_room_of
from orchestrator.run.sampled_sweeps import prepared, sampled_sweeps

#: A queue ends when it is empty. This only bounds it where nothing ever ends.
_LONGEST = "365d"


@shared
def run(
    here: NewRun,
    injected: Injected,
    file: str | None = Argument(None, help="A job file; docs/jobs.md has one.", metavar="FILE"),
    duration: str | None = Option(
        None, help="The longest: 30s, 2h. Default: until no job is left.", metavar="TIME"
    ),
    stay: bool = Option(False, "--stay", help="Wait for more jobs when nothing is left to do."),
    service: bool = Option(
        False,
        "--service",
        help="Write and start a systemd user unit that works a queue off with --stay, and print "
        "it.",
    ),
    new: bool = Option(False, "--new", help="Begin another queue, although one is unfinished."),
) -> None:
    """Work off a job file, and what is submitted meanwhile.

    The same command after a crash or a reboot goes on with what is unfinished.
    """
    from orchestrator.run import runner

    if service and (file is not None or new or injected.chaos or stay):
        raise UsageError(
            "--service excludes --stay, which its unit says itself, and a job file, --new and "
            "--chaos, which would come again after each restart; add jobs with: "
            "python -m orchestrator jobs submit FILE"
        )
    loaded = _loaded(here, {"run.duration": duration or _LONGEST}, begins=new or service)
    runs_dir = Path(loaded.run.dir)
    if service:
        for line in install_queue(_words(here, duration), lambda: _queue_before(runs_dir)):
            tell(line)
        return
    waits_in = here.mode if stay and file is None else ""
    before = None if new else _queue_before(runs_dir, waits_in)
    queue = Queue() if before is None else queue_of(before.folder)
    read = None if file is None else read_file(file, loaded, queue.jobs)
    jobs: Sequence[Job] = () if read is None else expand(read)
    fetch_starts(read, runs_dir)
    if before is not None and _never_began(before, queue, jobs):
        before = None

    def options(added: Sequence[Job], config: Config, target: Target) -> runner.Options:
        of_queue = runner.QueueOptions(
            stays=stay, sweeps=sampled_sweeps(read, queue), jobs=on_target(added, config, target)
        )
        return runner.Options(
            json=here.as_json,
            plain=here.plain,
            wait_for_nodes=True,
            chaos=injected.faults(),
            queue=of_queue,
        )

    if before is not None:
        _check_mode(before, file, here.mode)
        added = not_known(jobs, queue.jobs)
        _say_that_it_goes_on(before, queue, len(added), stays=stay)
        goes_on = options(added, *ground_of(before.facts))
        cluster = loaded.cluster if Path(here.config).exists() else None
        raise typer.Exit(runner.go_on(before, goes_on, duration_s(duration), cluster=cluster))
    if file is None and not stay:
        raise UsageError(
            "there is no unfinished queue to go on with; name a job file, or wait for jobs with "
            "--stay"
        )
    environment = here.environment(loaded)
    begins = options(jobs, environment.config, environment.target)
    raise typer.Exit(runner.run(environment, begins))


def _loaded(here: NewRun, typed: Mapping[str, str], *, begins: bool) -> Config:
    """Return the configuration; the shipped one where there is none, for a queue that goes on."""
    if here.mode == "cluster" and not begins and not Path(here.config).exists():
        shipped = here.to_read()
        if _queue_before(Path(shipped.run.dir)) is not None:
            return shipped
    loaded = here.load_here(typed)
    if loaded.workers.mps:  # a job's share of the card changes; that of an MPS client cannot
        loaded = loaded.model_copy(update={"workers": WorkersConfig()})
    return loaded


def _words(here: NewRun, duration: str | None) -> list[str]:
    """Return the options of a queue's service; paths count from its folder, which is this one."""
    words = [*here.words]
    words += [] if here.run_dir is None else ["--run-dir", here.run_dir]
    words += [] if duration is None else ["--duration", duration]
    return words if here.mode == "cluster" else [*words, f"--{here.mode}"]


def _queue_before(runs_dir: Path, waits_in: str = "") -> StoredRun | None:
    """Return the newest run with a queue that has something left to do; one of the mode `waits_in`
    also where it has nothing left.

    Raises:
        UsageError: Its head is at work.
    """
    for listed in list_runs(runs_dir):
        folder = listed.folder / QUEUE_NAME
        if not folder.exists():
            continue
        if listed.outcome == RUNNING:
            raise UsageError(
                f"the queue of run {listed.run_id} is under way; add to it: python -m "
                "orchestrator jobs submit FILE; or begin another: --new"
            )
        mode = None if listed.run is None else listed.run.facts.mode
        is_over = queue_of(listed.folder).is_over and not any_waits(folder)
        return None if is_over and mode != waits_in else read_run(listed.folder)
    return None


def _never_began(stored: StoredRun, queue: Queue, jobs: Sequence[Job]) -> bool:
    """Return whether a queue was refused before it began, as without a cluster, and has none but
    `jobs`: they begin anew, where and how the user says now.
    """
    is_covered = {job.id for job in jobs}.issuperset(job.id for job in queue.jobs)
    was_refused = stored.outcome == "failed" and stored.elapsed_s == 0
    has_more = bool(queue.sweeps) or any_waits(stored.folder / QUEUE_NAME)
    return was_refused and is_covered and not has_more


def _check_mode(stored: StoredRun, file: str | None, wanted: str) -> None:
    """Refuse jobs that were meant for another place than that of the unfinished queue."""
    run_id, mode = stored.facts.run_id, stored.facts.mode
    if mode != wanted and (file is not None or wanted != "cluster"):
        place = "of the cluster" if mode == "cluster" else f"one of --{mode}"
        raise UsageError(
            f"the unfinished queue of run {run_id} is {place}; go on with it: python -m "
            "orchestrator jobs run; or begin another: --new"
        )


def _say_that_it_goes_on(stored: StoredRun, queue: Queue, added: int, *, stays: bool) -> None:
    known = queue.standings
    left = sum(standing.ended_at_s is None for standing in known.values())
    typer.echo(
        f"Going on with the queue of run {stored.facts.run_id}: {left} of {len(known)} jobs left"
        + (f", {added} new" if added else "")
        + ("; it waits for more" if stays else "")
        + f"; look at it: {command_for(stored.folder, 'jobs', 'list')}",
        err=True,
    )


def ground_of(facts: RunFacts) -> tuple[Config, Target]:
    """Return the configuration and the target of a run."""
    config = config_from_text(facts.config_yaml, f"the configuration of run {facts.run_id}")
    return config, Target(device=facts.device, one_machine=facts.one_machine)


def not_known(jobs: Iterable[Job], known: Iterable[Job]) -> list[Job]:
    """Return the jobs that the queue does not have yet; `UsageError` for a name that is taken."""
    there = {job.name: job for job in known}
    added = []
    for job in jobs:
        other = there.get(job.name)
        if other is None:
            added.append(job)
        elif other.id != job.id:
            raise UsageError(
                f"{job.origin}: the queue has another job {job.name}, from {other.origin}; give "
                "this one another name, or begin another queue: jobs run --new"
            )
    return added


def on_target(
    jobs: Sequence[Job], config: Config, target: Target
) -> Callable[[Config, Target], tuple[Submitted, ...]]:
    """Return what makes the records of jobs for a run on the target that is found in the end.

    What cannot be is refused here, before anything starts.
    """
    expected = submitted(jobs, config, target)
    return lambda config, found: expected if found == target else submitted(jobs, config, found)


def submitted(
    jobs: Iterable[Job], config: Config, target: Target, there: Iterable[Standing] = ()
) -> tuple[Submitted, ...]:
    """Return the records of jobs that are submitted here and now, to a run on `target`.

    `UsageError` where a job names what cannot be trained. What was predicted for jobs that are
    `there` is not asked for again: that loads torch, which takes seconds.
    """
    ready = prepared(jobs, None if target.one_machine else config.head_node)
    known = {
        likeness(each.job): each.least_room_bytes
        for each in there
        if each.least_room_bytes and not each.out_of_memory  # which may have raised it
    }
    least = {
        job.name: known[alike]
        for job in ready
        if (alike := likeness(job)) in known and alike and "train.from" not in job.overrides
    }
    unknown = [job for job in ready if job.name not in least]
    least |= least_room_of(unknown, config, on_card=target.device != "cpu")
    return tuple(
        Submitted(at_s=job.submitted_at_unix_s, job=job, least_bytes=least.get(job.name))
        for job in ready
    )


def fetch_starts(file: JobFile | None, runs_dir: Path) -> None:
    """Have ready the weights that trainings of a job file begin with; see `fetch_weights`."""
    keys = (key for entry in (file.entries if file else ()) for key in keys_of(entry))
    starts = (start for _, word, values in keys if word == "train.from" for start in values)
    for start in dict.fromkeys(filter(None, starts)):
        for line in fetch_weights(start, runs_dir):
            typer.echo(line, err=True)


def read_file(file: str, base: Config, known: Sequence[Job] = ()) -> JobFile:
    """Return a job file, for a queue that has the jobs `known`.

    `ConfigError` with every problem of it, each with line and key.
    """
    from orchestrator.jobs.spec import parse

    if file.endswith((".py", ".sh")):
        raise UsageError(f"{file} is a program; type: python -m orchestrator jobs submit -- {file}")
    text = read_text(file, "jobs.yaml", "jobs run PATH", "the path of a job file")
    return parse(text, file, base, known)
