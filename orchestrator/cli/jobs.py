"""The verbs of `jobs` with their options, and the output of `logs`.

Finds the queue in the newest run that has one. Submitted jobs and orders are files beside the
queue: a live head reads them at once, otherwise the next `jobs run` does. Does not decide what runs
where (`jobs/queue.py`), runs nothing itself (`run/runner.py`), and does not lay out tables
(`view/jobs.py`).
"""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import typer
from typer import Argument

from orchestrator.cli.loading import AS_JSON, NewRunOptions, QueueOptions, flag, shared, value
from orchestrator.cli.printing import print_json, print_text
from orchestrator.config.load import nearest, read_text
from orchestrator.config.schema import Config, WorkersConfig
from orchestrator.config.team import without_team
from orchestrator.control.queue import put, say, waiting
from orchestrator.core.placement import Target
from orchestrator.errors import ArchiveError, UsageError
from orchestrator.jobs.lifecycle import EVENTS
from orchestrator.jobs.model import ENDED, Job, JobOrder, JobState, Standing
from orchestrator.jobs.queue import Queue
from orchestrator.jobs.sampler import settings_for
from orchestrator.jobs.spec import from_words, keys_of, parse
from orchestrator.jobs.sweep import JobFile
from orchestrator.record.archive import StoredRun, head_of, read_run
from orchestrator.record.command_file import any_waits
from orchestrator.record.events import StoredEvent, read_events
from orchestrator.record.folders import (
    LATEST,
    RUNNING,
    command_for,
    find_queue,
    find_run,
    go_on_command,
    listed_run,
)
from orchestrator.record.jobs import QUEUE_NAME, QueueSnapshot, queue_of, queue_snapshot
from orchestrator.record.output import Follower, last_lines
from orchestrator.run.earlier import fetch_weights
from orchestrator.run.environment import config_and_target_of
from orchestrator.run.prediction import on_target, submitted
from orchestrator.view import jobs as view

#: A queue ends when it is empty. This only bounds a queue with jobs that never end.
_LONGEST: Final = "365d"

_NAMED: Final = 8

_READ_EVERY_S: Final = 0.5
_INTERRUPTED: Final = 130
_EXIT_MOST: Final = 255

_JOB = Argument(help="As `jobs list` shows it.", metavar="JOB")

app = typer.Typer(
    name="jobs",
    help="Work off a list of jobs: trainings and commands.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
@shared
def run(
    here: NewRunOptions,
    file: str | None = Argument(None, help="A job file; docs/jobs.md has one.", metavar="FILE"),
    stay: bool = flag("--stay", "Wait for more jobs when nothing is left to do."),
    new: bool = flag("--new", "Start another queue, even if one is unfinished."),
) -> None:
    """Run the jobs of a file, and jobs that are submitted meanwhile.

    After a crash or a reboot, the same command continues the unfinished queue.
    """
    from orchestrator.run import runner

    base = without_team(here.load_or_shipped())
    runs_dir = Path(base.run.dir)
    waits_in = here.mode if stay and file is None else ""
    before = None if new else _unfinished_queue(runs_dir, waits_in)
    queue = Queue() if before is None else queue_of(before.folder)
    read = None if file is None else read_file(file, base, queue.jobs)
    jobs: Sequence[Job] = () if read is None else read.jobs
    check_sampling((*jobs, *queue.jobs))
    fetch_initial_weights(read, runs_dir)
    if before is not None and _never_started(before, queue, jobs):
        before = None

    def options(added: Sequence[Job], config: Config, target: Target) -> runner.Options:
        return runner.Options(
            json=here.as_json,
            plain=here.plain,
            wait_for_nodes=True,
            jobs=on_target(added, config, target),
            stays=stay,
        )

    if before is not None:
        _check_mode(before, file, here.mode)
        added = new_jobs(jobs, queue.jobs)
        _announce_resume(before, queue, len(added), stays=stay)
        resumed = options(added, *config_and_target_of(before.facts))
        cluster = base.cluster if Path(here.config).exists() else None
        raise typer.Exit(runner.resume_run(before, resumed, None, cluster=cluster))
    if file is None and not stay:
        raise UsageError(
            "there is no unfinished queue to continue; name a job file, or wait for jobs with "
            "--stay"
        )
    # A job's share of its card changes, but the share of an MPS client is fixed.
    loaded = without_team(here.load_here({"run.duration": _LONGEST}))
    loaded = loaded.model_copy(update={"workers": WorkersConfig()})
    environment = here.environment(loaded)
    started = options(jobs, environment.config, environment.target)
    raise typer.Exit(runner.run(environment, started))


@app.command()
@shared
def submit(
    queue: QueueOptions,
    words: list[str] = Argument(
        help="A job file, which ends in .yaml; or, after --, a command with its arguments.",
        metavar="FILE | -- COMMAND",
        show_default=False,
    ),
    name: str | None = value("NAME", "Name of the job."),
    after: list[str] | None = value("JOB", "A job that must be DONE before. May be repeated."),
    priority: int | None = value("NUMBER", "Higher priorities start first. Default: 0."),
    hours: str | None = value("22:00-07:00", "When the job may run."),
    wait: bool = flag("--wait", "Print the output of the job, and end with its exit code."),
    json_output: bool = AS_JSON,
) -> None:
    """Put jobs into the queue: a file, or a command.

    This works with and without a running head.
    """
    folder = queue.folder
    snapshot, (base, target) = snapshot_of(folder), _config_and_target(folder, queue)
    known = [standing.job for standing in snapshot.standings]
    of_command = {"after": after, "priority": priority, "hours": hours}
    options = {key: value for key, value in of_command.items() if value is not None}
    if len(words) == 1 and words[0].endswith((".yaml", ".yml")):
        if options or name:
            raise UsageError(f"{words[0]} is a job file, which says names, hours and more itself")
        file = read_file(words[0], base, known)
    else:
        file = from_words(base, words, name=name, known=known, **options)
    fetch_initial_weights(file, folder.parent)
    added = new_jobs(file.jobs, known)
    check_sampling(added)
    if wait and (json_output or len(file.jobs) != 1):
        raise UsageError("--wait is for one job, and excludes --json")
    if added:
        put(folder / QUEUE_NAME, submitted(added, base, target))
    ahead = sum(standing.state not in ENDED for standing in snapshot.standings)
    names = [job.name for job in added]
    if json_output:
        answer = {"run_id": folder.name, "jobs": names, "queue_ahead": ahead}
        print_json({**answer, "head_is_alive": _is_alive(folder)})
    elif wait:
        raise typer.Exit(_wait_for(folder, file.jobs[0].name))
    elif not names:
        print_text(f"all {len(file.jobs)} submitted jobs are in the queue already")
    else:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        print_text(f"submitted to run {folder.name}: {', '.join(names[:_NAMED])}{more}")
        print_text(f"{ahead} unfinished before {'it' if len(names) == 1 else 'them'}")
        _warn_if_head_is_dead(folder)


def _wait_for(folder: Path, job: str) -> int:
    """Print the output of a job until it has ended; return the exit code of the verb.

    It is 0 if the job is DONE, else the exit code of its program, or 1 without one. Ctrl-C ends
    only the waiting, with 130.
    """

    def is_over() -> bool:
        return standing_of(snapshot_of(folder), job).state in ENDED

    try:
        typer.echo(f"submitted to run {folder.name}: {job}", err=True)
        if not _is_alive(folder):
            typer.echo(f"the queue waits for a head: `{go_on_command(folder)}`", err=True)
        for text in follow_output(folder, job, is_over):
            typer.echo(text, nl=False)
    except KeyboardInterrupt:
        see = command_for(folder, "jobs", "show", job)
        typer.echo(f"{job} continues; to see it: {see}", err=True)
        return _INTERRUPTED
    ended = standing_of(snapshot_of(folder), job)
    typer.echo(f"{job} is {ended.state}: {ended.reason}", err=True)
    if ended.state is JobState.DONE:
        return 0
    code = ended.exit_code if ended.state is JobState.FAILED else None
    return code if code is not None and 0 < code <= _EXIT_MOST else 1


@app.command("list")
@shared
def list_jobs(queue: QueueOptions, json_output: bool = AS_JSON) -> None:
    """Show every job: its state, its progress, and why it waits."""
    folder = queue.folder
    snapshot = snapshot_of(folder)
    if json_output:
        print_json(view.queue_object(snapshot, view.current(snapshot)))
        return
    print_text(
        view.jobs_table(snapshot, view.current(snapshot)),
        f"run {folder.name}: {view.summary_line(snapshot)}",
    )
    if snapshot.held is not None:
        print_text("`python -m orchestrator jobs release` continues the queue")
    if any(standing.state not in ENDED for standing in snapshot.standings):
        _warn_if_head_is_dead(folder)


@app.command()
@shared
def show(queue: QueueOptions, job: str = _JOB, json_output: bool = AS_JSON) -> None:
    """Show one job in full, and why it waits."""
    folder = queue.folder
    snapshot = snapshot_of(folder)
    standing = standing_of(snapshot, job)
    if json_output:
        print_json(view.job_object(standing, snapshot))
        return
    events: Sequence[StoredEvent] = ()
    with suppress(ArchiveError):  # the run has no record yet
        events = read_events(folder, EVENTS, slot=job)
    print_text(*view.job_lines(standing, events, snapshot))


@app.command()
@shared
def results(queue: QueueOptions, json_output: bool = AS_JSON) -> None:
    """Show the results of all jobs, the best of each metric first."""
    snapshot = snapshot_of(queue.folder)
    if json_output:
        print_json(view.queue_object(snapshot, view.best_first(snapshot)))
    else:
        print_text(
            view.jobs_table(snapshot, view.best_first(snapshot)), f"files: {snapshot.files}/JOB"
        )


def _add_order(order: JobOrder, summary: str, jobs: Any) -> None:  # noqa: ANN401 - as typer's
    @app.command(order.value, help=summary)
    @shared
    def verb(queue: QueueOptions, jobs: list[str] | None = jobs) -> None:
        _send_order(queue.folder, order, jobs or ())


_JOBS = Argument(help="As `jobs list` shows them.", metavar="JOB", show_default=False)
_JOBS_OR_QUEUE = Argument(
    None, help="As `jobs list` shows them. Default: the whole queue.", metavar="JOB"
)
_add_order(JobOrder.CANCEL, "End jobs for good; their files stay.", _JOBS)
_add_order(JobOrder.RETRY, "Put jobs that have ended back into the queue.", _JOBS)
_add_order(
    JobOrder.HOLD,
    "Hold jobs, or the whole queue: then no job starts any more.",
    _JOBS_OR_QUEUE,
)
_add_order(JobOrder.RELEASE, "Continue held jobs, or the whole queue.", _JOBS_OR_QUEUE)


def _send_order(folder: Path, order: JobOrder, names: Sequence[str]) -> None:
    snapshot = snapshot_of(folder)
    named = [standing_of(snapshot, name).job.name for name in dict.fromkeys(names)]
    say(folder / QUEUE_NAME, order, named or [None], by=getpass.getuser())
    print_text(
        f"{order}: {', '.join(named) or 'the whole queue'}, in the queue of run {folder.name}"
    )
    _warn_if_head_is_dead(folder)


def _config_and_target(folder: Path, queue: QueueOptions) -> tuple[Config, Target]:
    """Return the configuration and the target of a run, against which its jobs are checked."""
    try:
        facts = read_run(folder).facts
    except ArchiveError:
        return queue.load_or_shipped(), Target()  # the run has not started yet
    return config_and_target_of(facts)


def snapshot_of(folder: Path) -> QueueSnapshot:
    """Return the queue of a run folder, including orders that the head has not read yet."""
    sent = waiting(folder / QUEUE_NAME)  # read before the queue, so that no order is missed
    try:
        rows = read_run(folder).snapshot().rows
    except ArchiveError:
        rows = ()  # the run has not started yet
    now_s = time.time()
    snapshot = queue_snapshot(folder, rows, now_s, is_alive=_is_alive(folder), sent=sent)
    return snapshot or QueueSnapshot(standings=(), now_s=now_s)


def standing_of(snapshot: QueueSnapshot, name: str) -> Standing:
    """Return the standing of a job; `UsageError` if the queue has no job of this name."""
    for standing in view.current(snapshot):
        if standing.job.name == name:
            return standing
    hint = nearest(name, [one.job.name for one in snapshot.standings])
    why = f"there is no job {name[:80]!r} in this queue"
    raise UsageError(why + (hint or "; `jobs list` shows all"))


def _is_alive(folder: Path) -> bool:
    return head_of(folder) is not None


def _warn_if_head_is_dead(folder: Path) -> None:
    if not _is_alive(folder):
        print_text(f"its head is not running: `{go_on_command(folder)}` continues the queue")


def _unfinished_queue(runs_dir: Path, waits_in: str = "") -> StoredRun | None:
    """Return the newest run with a queue, if the queue is unfinished, or the mode is `waits_in`.

    `UsageError`: the head of the run is alive.
    """
    try:
        newest = listed_run(find_queue(runs_dir, LATEST))
    except UsageError:  # no run has a queue
        return None
    if newest.outcome == RUNNING:
        raise UsageError(
            f"the queue of run {newest.run_id} is under way; add to it: python -m orchestrator jobs "
            "submit FILE; or begin another: --new"
        )
    mode = None if newest.run is None else newest.run.facts.mode
    is_over = queue_of(newest.folder).is_over and not any_waits(newest.folder / QUEUE_NAME)
    return None if is_over and mode != waits_in else read_run(newest.folder)


def _never_started(stored: StoredRun, queue: Queue, jobs: Sequence[Job]) -> bool:
    """Return whether a queue was refused before it started, for example without a cluster, and all
    of its jobs are in `jobs`: then a new queue starts them, with the present options.
    """
    is_covered = {job.id for job in queue.jobs} <= {job.id for job in jobs}
    was_refused = stored.outcome == "failed" and stored.elapsed_s == 0
    return was_refused and is_covered and not any_waits(stored.folder / QUEUE_NAME)


def _check_mode(stored: StoredRun, file: str | None, wanted: str) -> None:
    """Refuse to continue an unfinished queue that belongs to another mode than `wanted`."""
    mode = stored.facts.mode
    if mode != wanted and (file is not None or wanted != "cluster"):
        place = "of the cluster" if mode == "cluster" else f"one of --{mode}"
        raise UsageError(
            f"the unfinished queue of run {stored.facts.run_id} is {place}; continue it: python "
            "-m orchestrator jobs run; or begin another: --new"
        )


def _announce_resume(stored: StoredRun, queue: Queue, added: int, *, stays: bool) -> None:
    known = queue.standings
    left = sum(standing.state not in ENDED for standing in known.values())
    text = f"Continuing the queue of run {stored.facts.run_id}: {left} of {len(known)} jobs left"
    new, waits = f", {added} new" if added else "", "; it waits for more" if stays else ""
    see = command_for(stored.folder, "jobs", "list")
    typer.echo(f"{text}{new}{waits}; to see it: {see}", err=True)


def new_jobs(jobs: Iterable[Job], known: Iterable[Job]) -> list[Job]:
    """Return the jobs that the queue does not have yet; `UsageError` for a name that is in use."""
    in_queue, requested = {job.name: job for job in known}, [*jobs]
    for job in requested:
        other = in_queue.get(job.name, job)
        if other.id != job.id:
            raise UsageError(
                f"{job.origin}: the queue has another job {job.name}, from {other.origin}; give "
                "this one another name, or begin another queue: jobs run --new"
            )
    return [job for job in requested if job.name not in in_queue]


def check_sampling(jobs: Iterable[Job]) -> None:
    """Refuse sweeps with the method optuna if it is not installed, before anything runs."""
    for job in {job.sweep: job for job in jobs if job.awaits_settings}.values():
        settings_for(job, ())


def fetch_initial_weights(file: JobFile | None, runs_dir: Path) -> None:
    """Fetch the weights that trainings of a job file start from; see `fetch_weights`."""
    keys = (key for entry in (file.entries if file else ()) for key in keys_of(entry))
    starts = (start for _, order, values in keys if order == "train.from" for start in values)
    for start in dict.fromkeys(filter(None, starts)):
        for line in fetch_weights(start, runs_dir):
            typer.echo(line, err=True)


def read_file(file: str, base: Config, known: Sequence[Job] = ()) -> JobFile:
    """Return a parsed job file, for a queue that has the jobs `known`.

    `ConfigError` lists all of its problems, each with line and key.
    """
    if file.endswith((".py", ".sh")):
        raise UsageError(f"{file} is a program; type: python -m orchestrator jobs submit -- {file}")
    text = read_text(file, "jobs run PATH with the path of a job file")
    return parse(text, file, base, known)


def follow_output(folder: Path, name: str, is_over: Callable[[], bool]) -> Iterator[str]:
    """Yield the output of a slot or a job of a run folder, until it has ended."""
    output, may_come = Follower(folder, name), True
    while may_come:
        may_come = not is_over()  # before the lines are read, so that none is missed
        yield output.more(is_last=not may_come)
        time.sleep(_READ_EVERY_S if may_come else 0.0)


def output_of(runs_dir: Path, run_id: str, name: str, *, follow: bool) -> Iterator[str]:
    """Yield the last lines that a slot (`pc1/3`) or a job printed; with `follow`, all stored lines,
    and new ones until it has ended.

    `UsageError`: there is no such run, slot or job.
    """
    folder = _folder(runs_dir, run_id, name)
    state, is_over = _state(folder, name)
    lines = last_lines(folder, name)
    if follow and not is_over:
        yield from follow_output(folder, name, lambda: _state(folder, name)[1])
    else:
        yield "".join(f"{line}\n" for line in lines or [f"{name} has printed nothing{state}"])


def _folder(runs_dir: Path, run_id: str, name: str) -> Path:
    """Return the folder of a run; `latest` is, for the name of a job, the newest with a queue."""
    if "/" not in name:  # names of slots have a slash
        with suppress(UsageError):
            return find_queue(runs_dir, run_id)
    return find_run(runs_dir, run_id)


def _state(folder: Path, name: str) -> tuple[str, bool]:
    """Return the state of a job in words, and whether its output is complete."""
    is_over = head_of(folder) is None
    if "/" not in name and (folder / QUEUE_NAME).is_dir():
        standing = standing_of(snapshot_of(folder), name)
        words = f"; it is {standing.state.value}: {standing.reason}"
        return words, is_over or standing.state in ENDED
    known = [record.slot for record in read_run(folder).slots]
    if name not in known:
        raise UsageError(f"run {folder.name} has no slot {name!r}; valid: {', '.join(known)}")
    return "", is_over
