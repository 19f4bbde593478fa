"""The verbs of `jobs`, and their options: what is typed of a queue of jobs.

Finds the queue in the newest run that has one. What is submitted and said waits beside it,
until the head takes it at once, or when `jobs run` goes on. Does not run a queue (`jobs_run.py`),
nor lay out what is shown (`view/jobs.py`).
"""

from __future__ import annotations

import getpass
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import typer
from typer import Argument, Option
from typer.core import TyperCommand

from orchestrator.cli import jobs_run
from orchestrator.cli.loading import AS_JSON, TO, OfQueue, shared
from orchestrator.cli.printing import print_json, tell
from orchestrator.cluster.connect import connected
from orchestrator.config.load import config_from_text
from orchestrator.config.schema import Config
from orchestrator.control.queue import Message, put, waiting
from orchestrator.core.placement import Target
from orchestrator.errors import ArchiveError, NoClusterError, UsageError
from orchestrator.jobs.model import (
    ENDED,
    Job,
    JobState,
    QueueHeld,
    Said,
    Standing,
    Submitted,
    Word,
)
from orchestrator.jobs.sweep import expand
from orchestrator.record.archive import StoredEvent, head_of, read_events, read_run
from orchestrator.record.folders import command_for, go_on_command
from orchestrator.record.jobs import QUEUE_NAME, QueueReader, QueueSnapshot, queue_of
from orchestrator.record.output import Follower
from orchestrator.run.environment import Mode
from orchestrator.run.sampled_sweeps import sampled_sweeps
from orchestrator.view import jobs as view
from orchestrator.view.phrases import counted
from workers.learned_limits import default_path
from workers.units import MIB

_NAMED: Final = 8

_LOOK_EVERY_S: Final = 0.5
_INTERRUPTED: Final = 130
_EXIT_MOST: Final = 255

_RESTING: Final = frozenset({JobState.PARKED, JobState.PAUSED})
#: In which states a word changes something (`jobs/lifecycle.py`).
_OBEYING: Final = {
    Word.CANCEL: frozenset(JobState) - ENDED,
    Word.HOLD: frozenset(JobState) - ENDED - {JobState.HELD, JobState.SAVING},
    Word.RELEASE: _RESTING | {JobState.HELD},
    Word.RETRY: _RESTING | ENDED - {JobState.DONE},
}

_JOB = Argument(help="As `jobs list` shows it.", metavar="JOB")

app = typer.Typer(
    name="jobs",
    help="Work off a list of jobs: trainings and commands.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.command("run")(jobs_run.run)


class _Submit(TyperCommand):
    """Notes whether `--` was typed: what stands behind it is a command, and no file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - as in typer
        """See click."""
        ctx.meta["is_command"] = "--" in args
        return super().parse_args(ctx, args)


@app.command(cls=_Submit, context_settings={"ignore_unknown_options": True})
@shared
def submit(  # noqa: PLR0913 - one parameter for each option of the command
    queue: OfQueue,
    context: typer.Context,
    words: list[str] | None = Argument(
        None,
        help="A job file; or, behind --, a command with its arguments.",
        metavar="FILE | -- COMMAND",
        show_default=False,
    ),
    train: list[str] | None = Option(
        None, help="A training, such as preset=gpt2-small.", metavar="KEY=VALUE"
    ),
    over: list[str] | None = Option(
        None, help="A job for each value, as train.lr=1e-4,3e-4.", metavar="KEY=VALUE,..."
    ),
    name: str | None = Option(None, help="Of the job, or of its sweep.", metavar="NAME"),
    after: list[str] | None = Option(None, help="A job that must be done before.", metavar="JOB"),
    priority: int | None = Option(None, help="Higher goes first. Default: 0."),
    hours: str | None = Option(None, help="When it may run.", metavar="22:00-07:00"),
    wait: bool = Option(
        False, "--wait", help="Print what the job prints, and end with its exit code."
    ),
    json_output: bool = AS_JSON,
) -> None:
    """Put jobs into the queue: a file, training or command.

    A command stands behind `--`.

    Also while the queue runs, and while its head is dead.
    """
    folder = queue.folder
    snapshot, (base, target) = snapshot_of(folder), _ground_of(folder, queue)
    known = [standing.job for standing in snapshot.standings]
    given = words or []
    if given and not context.meta["is_command"]:
        if given[0].startswith("-"):
            raise UsageError(
                f"there is no option {given[0][:40]}; `jobs submit --help` lists them, and those "
                "of a command stand behind --"
            )
        if len(given) > 1:
            raise UsageError(
                "a command stands behind --, as in: python -m orchestrator jobs submit -- "
                f"{' '.join(given)[:200]}"
            )
        if train or over or name or after or hours or priority is not None:
            raise UsageError(
                f"{given[0]} is a job file, which says these things itself; for a command put -- "
                "before it"
            )
        file = jobs_run.read_file(given[0], base, known)
    else:
        if not given and not train:
            raise UsageError(
                "there is nothing to submit; type a job file, --train preset=gpt2-small, or "
                "-- python train.py"
            )
        from orchestrator.jobs.spec import from_words

        said = {"after": after, "priority": priority, "hours": hours}
        options = {key: value for key, value in said.items() if value is not None}
        file = from_words(base, train, over or (), given, name=name, known=known, **options)
    expanded = expand(file)
    jobs_run.fetch_starts(file, folder.parent)
    added = jobs_run.not_known(expanded, known)
    sweeps = sampled_sweeps(file, queue_of(folder / QUEUE_NAME))
    if wait and (json_output or sweeps or len(expanded) != 1):
        raise UsageError("--wait is for one job, and excludes --json")
    if added or sweeps:
        _put(folder, [*jobs_run.submitted(added, base, target, snapshot.standings), *sweeps])
    ahead = sum(standing.state not in ENDED for standing in snapshot.standings)
    names = [*(job.name for job in added), *(sweep.name for sweep in sweeps)]
    if json_output:
        told = {"run_id": folder.name, "jobs": names, "queue_ahead": ahead}
        print_json({**told, "head_is_alive": _is_alive(folder)})
    elif wait:
        typer.echo(f"submitted to run {folder.name}: {expanded[0].name}", err=True)
        raise typer.Exit(_wait_for(folder, expanded[0]))
    elif not names:
        tell(f"all {len(expanded)} jobs of it are in the queue already")
    else:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        tell(f"submitted to run {folder.name}: {', '.join(names[:_NAMED])}{more}")
        tell(f"{ahead} unfinished before {'it' if len(names) == 1 else 'them'}")
        _tell_if_dead(folder)


def _wait_for(folder: Path, job: Job) -> int:
    """Print what a job of a run folder prints, until it has ended; return the exit code for it.

    That of its program, 0 where it is DONE, else 1. Ctrl-C ends this and not the job: 130.

    Raises:
        UsageError: The queue has not taken the job.
    """
    output, reader = Follower(folder, job.name), QueueReader(folder)
    had_head, ended = True, None
    try:
        while ended is None:
            has_head = _is_alive(folder)
            if had_head and not has_head:
                typer.echo(f"the queue waits for a head: `{go_on_command(folder)}`", err=True)
            had_head = has_head
            standing = _submitted_one(folder, reader, job)
            if standing is not None and standing.state in ENDED:
                ended = standing
            typer.echo(output.more(is_last=ended is not None), nl=False)
            if ended is None:
                time.sleep(_LOOK_EVERY_S)
    except KeyboardInterrupt:
        see = command_for(folder, "jobs", "show", job.name)
        typer.echo(f"{job.name} goes on without this; look at it: {see}", err=True)
        return _INTERRUPTED
    typer.echo(f"{job.name} is {ended.state}: {ended.reason}", err=True)
    if ended.state is JobState.DONE:
        return 0
    code = ended.exit_code if ended.state is JobState.FAILED else None
    return code if code is not None and 0 < code <= _EXIT_MOST else 1


def _submitted_one(folder: Path, reader: QueueReader, job: Job) -> Standing | None:
    """Return how a job stands that was submitted; `None`: the head has not taken it yet."""
    waits = any(one.name == job.name for one in _waiting_jobs(folder))  # before the look at others
    snapshot = reader.look((), time.time())
    found = [one for one in snapshot.standings if one.job.name == job.name] if snapshot else []
    if found and found[0].job.id == job.id:
        return found[0]
    if waits:
        return None
    raise UsageError(f"the queue has refused {job.name}: events.jsonl in {folder} says why")


@app.command("list")
@shared
def list_jobs(queue: OfQueue, json_output: bool = AS_JSON) -> None:
    """Show every job: its state, how far it is, and why it waits."""
    folder = queue.folder
    snapshot = snapshot_of(folder)
    if json_output:
        print_json(view.queue_object(snapshot))
        return
    tell(view.jobs_table(snapshot), f"run {folder.name}: {view.summary_line(snapshot)}")
    if snapshot.held is not None:
        tell("`python -m orchestrator jobs release` lets it go on")
    if any(standing.state not in ENDED for standing in snapshot.standings):
        _tell_if_dead(folder)


@app.command()
@shared
def show(queue: OfQueue, job: str = _JOB, json_output: bool = AS_JSON) -> None:
    """Show all of one job, and why it waits."""
    folder = queue.folder
    snapshot = snapshot_of(folder)
    standing = standing_of(snapshot, job)
    if json_output:
        print_json(view.job_object(standing, snapshot))
    else:
        tell(*view.job_lines(standing, _happened(folder, job), snapshot))


@app.command()
@shared
def results(
    queue: OfQueue,
    as_csv: bool = Option(False, "--csv", help="As CSV, with a column for each setting."),
    json_output: bool = AS_JSON,
) -> None:
    """Show what came out of every job, the best of a metric first."""
    if as_csv and json_output:
        raise UsageError("--csv and --json exclude each other")
    snapshot = snapshot_of(queue.folder)
    if json_output:
        print_json(view.results_object(snapshot))
    elif as_csv:
        typer.echo(view.results_csv(snapshot))
    else:
        tell(view.results_table(snapshot), f"files: {snapshot.files}/JOB")


@app.command()
@shared
def fetch(queue: OfQueue, job: str = _JOB, to: Path = TO) -> None:
    """Copy a job's files from whichever PC has them."""
    folder = queue.folder
    tell(_copied(folder, standing_of(snapshot_of(folder), job), to))


def _happened(folder: Path, job: str) -> tuple[StoredEvent, ...]:
    """Return what happened to a job; nothing where the run has no record."""
    try:
        return read_events(folder, view.TOLD_OF_JOBS, slot=job)
    except ArchiveError:
        return ()


def _copied(folder: Path, standing: Standing, to: Path) -> str:
    """Copy the files of a job of a run folder into `to`; return what is to be told.

    Raises:
        UsageError: There is nothing to copy, or no place for it.
        NoClusterError: The files are on another PC, which does not answer.
    """
    job, of_run = standing.job.name, default_path().parent / "state" / folder.name
    places = [folder / QUEUE_NAME / "files" / job, of_run / job]
    try:
        for place in places:
            if place.is_dir():
                shutil.copytree(place, to, symlinks=True, dirs_exist_ok=True)
        if not to.exists():
            _copy_from_node(folder, standing, to)
    except OSError as failure:
        raise UsageError(f"{to} cannot be written: {failure.strerror or failure}") from failure
    sizes = [path.stat().st_size for path in to.rglob("*") if path.is_file()]
    if not sizes:
        raise UsageError(f"job {job} has no files yet, in {' or '.join(map(str, places))}")
    return f"{to}: {counted(len(sizes), 'file')} of {job}, {sum(sizes) / MIB:.1f} MiB"


def _copy_from_node(folder: Path, standing: Standing, to: Path) -> None:
    """Copy what is on the PC of the last attempt, where that is another one."""
    job, card = standing.job.name, standing.last_card
    try:
        facts = read_run(folder).facts
    except ArchiveError:
        return
    if card is None or facts.mode != Mode.CLUSTER:
        return
    node = card.partition(":")[0]
    config = config_from_text(facts.config_yaml, f"the configuration of run {facts.run_id}")
    try:
        with connected(config.cluster.address, config.cluster.auth):
            from orchestrator.cluster.checkpoint_copy import copied

            copied(node, facts.run_id, job, "**/*", to)
    except NoClusterError as failure:
        raise NoClusterError(
            f"the files of {job} are on {node}, and {failure}; start that node and type this again"
        ) from failure


def _add_word(word: Word, summary: str, jobs: Any) -> None:  # noqa: ANN401 - as typer's
    @app.command(word.value, help=summary)
    @shared
    def verb(queue: OfQueue, jobs: list[str] | None = jobs) -> None:
        _say(queue.folder, word, jobs or ())


_JOBS = Argument(help="As `jobs list` shows them.", metavar="JOB", show_default=False)
_JOBS_OR_QUEUE = Argument(
    None, help="As `jobs list` shows them. Default: the whole queue.", metavar="JOB"
)
_add_word(Word.CANCEL, "End jobs for good; what they saved stays.", _JOBS)
_add_word(Word.RETRY, "Put jobs that have ended back into the queue.", _JOBS)
_add_word(
    Word.HOLD, "Have jobs wait, or the whole queue: then nothing starts any more.", _JOBS_OR_QUEUE
)
_add_word(Word.RELEASE, "Let held jobs, or the whole queue, go on.", _JOBS_OR_QUEUE)


def _say(folder: Path, word: Word, names: Sequence[str]) -> None:
    snapshot, now_s, by = snapshot_of(folder), time.time(), getpass.getuser()
    named = {name: standing_of(snapshot, name) for name in names}
    said: Message = [
        Said(at_s=now_s, id=secrets.token_hex(8), word=word, job=name, by=by) for name in named
    ]
    if not names:
        reason = f"{by} holds it" if word is Word.HOLD else None
        said = [QueueHeld(at_s=now_s, reason=reason, id=secrets.token_hex(8))]
    _put(folder, said)
    what = f"{counted(len(said), 'job')}" if len(said) > _NAMED else ", ".join(names)
    tell(f"{word.value}: {what or 'the whole queue'}, in the queue of run {folder.name}")
    for name, one in named.items():
        if one.state not in _OBEYING[word] and one.recalled_to is None:
            tell(f"{name} is {one.state.value}: while it is, that changes nothing")
    _tell_if_dead(folder)


def _ground_of(folder: Path, queue: OfQueue) -> tuple[Config, Target]:
    """Return the configuration of the run, against which its jobs are checked, and its target."""
    try:
        facts = read_run(folder).facts
    except ArchiveError:
        return queue.to_read(), Target()  # nothing has begun yet
    return jobs_run.ground_of(facts)


def snapshot_of(folder: Path) -> QueueSnapshot:
    """Return how the jobs of a run folder stand, with those that the head has not taken yet."""
    try:
        rows = read_run(folder).snapshot().rows
    except ArchiveError:
        rows = ()  # nothing has begun yet
    now_s = time.time()
    snapshot = QueueReader(folder).look(rows, now_s, is_alive=_is_alive(folder))
    snapshot = snapshot or QueueSnapshot(standings=(), now_s=now_s)
    names = {standing.job.name for standing in snapshot.standings}
    new = (_not_taken(job) for job in _waiting_jobs(folder) if job.name not in names)
    return replace(snapshot, standings=(*snapshot.standings, *new))


def _not_taken(job: Job) -> Standing:
    reason, since_s = "submitted, and not taken by the head yet", job.submitted_at_unix_s
    return Standing(job=job, state=JobState.QUEUED, reason=reason, since_s=since_s)


def standing_of(snapshot: QueueSnapshot, name: str) -> Standing:
    """Return how a job stands; `UsageError` where there is none of this name."""
    for standing in view.current(snapshot):
        if standing.job.name == name:
            return standing
    names = [standing.job.name for standing in snapshot.standings]
    close = get_close_matches(name, names, 3, 0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else "`jobs list` shows all"
    raise UsageError(f"there is no job {name[:80]!r} in this queue; {hint}")


def _put(folder: Path, message: Message) -> None:
    try:
        put(folder / QUEUE_NAME, message)
    except OSError as failure:
        raise UsageError(
            f"the commands of run {folder.name} cannot be written: {failure.strerror or failure}"
        ) from failure


def _waiting_jobs(folder: Path) -> Iterator[Job]:
    """Yield the jobs that were submitted, and that the head has not taken yet."""
    for message in waiting(folder / QUEUE_NAME):
        yield from (one.job for one in message if isinstance(one, Submitted))


def _is_alive(folder: Path) -> bool:
    return head_of(folder) is not None


def _tell_if_dead(folder: Path) -> None:
    if not _is_alive(folder):
        count = len(waiting(folder / QUEUE_NAME))
        taken = f"; {counted(count, 'command')} waiting" if count else ""
        tell(f"its head is not running{taken}: `{go_on_command(folder)}` goes on")
