"""The verbs and their options: parses the command line and calls the code of each verb.

Does not implement the verbs, nor decide how an error reaches the user (`main.py`).
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from orchestrator.cli import jobs, jobs_run
from orchestrator.cli import options as opt
from orchestrator.cli.loading import (
    AsJson,
    Configured,
    Here,
    Injected,
    NewRun,
    Where,
    duration_s,
    import_from_here,
    print_text,
    shared,
)
from orchestrator.errors import UsageError
from orchestrator.jobs.sweep import expand
from orchestrator.record.folders import LATEST, RUNNING
from orchestrator.view.cells import width_of

#: After its last slices a run writes its summary and ends its processes.
_SUMMARY_S = 30.0

#: Of the verbs that only name slots.
_COMMANDS = {
    "pause": "Hold slots: no more work; process and memory stay.",
    "unpause": "Let paused and drained slots work again.",
    "drain": "Hold slots and end their processes: their memory is free.",
    "reinstate": "Start quarantined slots again, their failures forgotten.",
    "save": "Have slots save now what they train.",
}

app = typer.Typer(
    name="orchestrator",
    help="Keeps several GPU workers per card busy on ordinary PCs, and survives out-of-memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
@shared
def run(  # noqa: PLR0913 - one parameter for each option of the command
    new: NewRun,
    injected: Injected,
    duration: opt.Duration = None,
    scale: opt.Scale = None,
    workload: opt.Workload = None,
    policy: opt.Policy = None,
    wait_for_nodes: opt.WaitForNodes = False,
    resume: opt.Resume = None,
    apply_power_limit: opt.ApplyPowerLimit = False,
) -> None:
    """Run the workers and show their health. Ctrl-C ends the run and writes the summary."""
    from orchestrator.cli.plan_training import refuse_folder
    from orchestrator.record.archive import read_run
    from orchestrator.run import runner

    if scale is not None and not new.rehearse:
        raise UsageError("--scale only makes sense with --rehearse")
    options = runner.Options(
        json=new.as_json,
        plain=new.plain,
        wait_for_nodes=wait_for_nodes,
        chaos=injected.faults(),
        apply_power_limit=apply_power_limit,
        yes_really=injected.yes_really,
    )
    more_s = duration_s(duration)
    typed = {"run.duration": duration, "workload.name": workload, "memory.policy": policy}
    if resume is not None:
        folder = new.run(resume)
        import_from_here()
        if new.local or new.rehearse or new.overrides or workload is not None or policy is not None:
            raise UsageError(
                "--resume uses the run's own configuration; start a new run to change anything "
                "but --duration"
            )
        raise typer.Exit(runner.go_on(read_run(folder), options, more_s))
    loaded = new.load_here(typed)
    import_from_here()
    refuse_folder(loaded)
    raise typer.Exit(runner.run(new.environment(loaded, scale), options))


app.add_typer(jobs.app, name="jobs")


@app.command()
@shared
def plan(where: Configured, jobs_file: opt.PlannedJobs = None, json_output: AsJson = False) -> None:
    """Show where each worker will go and what it may use."""
    from orchestrator.cli.plan import budgets, plan_json, plan_text
    from orchestrator.cli.plan_training import training_plan

    loaded, width = where.load(), width_of(sys.stdout)
    if jobs_file is not None:
        from orchestrator.cli import plan_jobs

        planned = plan_jobs.plan_jobs(expand(jobs_run.read_file(jobs_file, loaded)), loaded)
        text = plan_jobs.plan_jobs_text
        print_text(plan_jobs.plan_jobs_json(planned) if json_output else text(planned, width))
        return
    training = training_plan(loaded, budgets(loaded))
    print_text(plan_json(loaded, training) if json_output else plan_text(loaded, training, width))


@app.command()
@shared
def up(
    where: Configured,
    node: opt.NodeToStart,
    head_address: opt.HeadAddress = None,
    execute: opt.Execute = False,
    stay: opt.Stay = False,
    service: opt.Service = False,
) -> None:
    """Print the exact commands that make a PC a node of the cluster."""
    from orchestrator.cli import nodes
    from orchestrator.cli.service import install
    from orchestrator.cli.stay import keep

    if service and (execute or stay):
        raise UsageError("--service excludes --exec and --stay: the unit that it writes does both")
    if stay and not execute:
        raise UsageError("--stay keeps a node that this command starts: it needs --exec")
    loaded = where.load()
    if node not in loaded.nodes:
        raise UsageError(f"{where.config} has no node {node!r}; valid: {', '.join(loaded.nodes)}")
    command = nodes.command_for(loaded, node, head_address)
    if service:
        for line in install(command, where.config, where.overrides or [], head_address):
            print_text(line)
        return
    if not execute:
        typer.echo(command.script(node))
        return
    if stay:
        raise typer.Exit(keep(command))
    code = nodes.execute(command)
    for line in command.remarks if code == 0 else ():
        print_text(line)
    raise typer.Exit(code)


@app.command()
@shared
def stop(where: Where, node: opt.NodeToEnd = None) -> None:
    """End the runs under way in one run folder, as Ctrl-C would.

    Also puts back what runs that were killed have set on the cards of this PC.
    """
    from orchestrator.cli import nodes
    from workers.card_settings import put_back_left

    put_back = put_back_left()
    for line in put_back:
        print_text(line)
    loaded = where.to_read()
    settings = loaded.run
    if node is not None and node not in loaded.nodes and not nodes.processes_of(node):
        raise UsageError(
            f"no process of a node {node!r} runs here, and {where.config} has no such node; valid: "
            f"{', '.join(loaded.nodes)}"
        )
    ends_s = 3 * settings.slice_s + settings.stop_grace_s + _SUMMARY_S
    try:
        for line in nodes.stop_runs(settings.dir, wait_s=0.0 if node is None else ends_s):
            print_text(line)
    except UsageError as none_there:
        if node is None and not put_back:
            raise
        print_text(str(none_there))
    for line in () if node is None else nodes.stop_node(node):
        print_text(line)


@app.command()
@shared
def runs(where: Where, json_output: AsJson = False) -> None:
    """List the runs made so far, the newest first."""
    from orchestrator.cli.runs import runs_json, runs_text

    folder = where.runs
    print_text(runs_json(folder) if json_output else runs_text(folder, width_of(sys.stdout)))


@app.command()
@shared
def report(
    where: Where,
    run_id: opt.RunId = LATEST,
    text: opt.AsText = False,
    json_output: AsJson = False,
    html: opt.HtmlFile = None,
    curves: opt.CurvesFolder = None,
) -> None:
    """Show one run: how it ended, its table, what happened.

    Also one that is under way or was killed.
    """
    from orchestrator.cli.runs import report_json, report_text
    from orchestrator.view import html_report

    if text + json_output + (html is not None) + (curves is not None) > 1:
        raise UsageError("--text, --json, --html and --curves exclude each other")
    folder = where.run(run_id)
    if html is not None:
        html_report.write_report(html, folder)
        print_text(str(html))
        return
    if curves is not None:
        from orchestrator.view.curves import write_curves

        for line in write_curves(folder, curves):
            print_text(line)
        return
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    print_text(report_json(folder) if json_output else report_text(folder, width))


@app.command()
@shared
def export(
    where: Where,
    run_id: opt.ExportedRun,
    slot: opt.Slot,
    to: opt.NewFolder,
    merged: opt.Merged = False,
    adapter: opt.Adapter = False,
    average: opt.AveragedWeights = False,
    best: opt.BestCheckpoint = False,
) -> None:
    """Write what a slot has trained as a Hugging Face folder.

    Also of a run that goes on: its last checkpoint.
    """
    from orchestrator.cli import export as verb

    if merged and adapter:
        raise UsageError("--merged and --adapter exclude each other")
    form = "merged" if merged else "adapter" if adapter else None
    folder = where.run(run_id)
    for line in verb.export(folder, slot, to, form, average=average, best=best):
        print_text(line)


@app.command()
@shared
def logs(
    where: Where, name: opt.SlotOrJob, run_id: opt.LogsOfRun = LATEST, follow: opt.Follow = False
) -> None:
    """Show the last 100 lines that a worker or a job printed.

    All of them are in the run folder.
    """
    from orchestrator.cli.logs import output_of

    for line in output_of(where.runs, run_id, name, follow=follow):
        print_text(line)


@app.command()
@shared
def top(
    where: Where,
    run_id: opt.RunId = LATEST,
    once: opt.OneFrame = False,
    sort: opt.Sort = None,
    wanted: opt.Filter = None,
    json_output: AsJson = False,
    read_only: opt.ReadOnly = False,
) -> None:
    """Follow a run from any terminal. `?` lists the keys."""
    from orchestrator.view.top import screen

    view = screen.view_of(sort, wanted)
    folder = where.run(run_id)
    if json_output:
        print_text(screen.frame_json(folder, view))
    elif once or not screen.is_terminal():
        print_text(
            screen.frame_text(folder, view, shutil.get_terminal_size(fallback=(120, 24)).columns)
        )
    else:
        screen.watch(folder, view, read_only=read_only)


@app.command()
@shared
def notify(
    where: Where,
    run_id: opt.RunId = LATEST,
    once: opt.Once = False,
    test: opt.TestMessage = False,
) -> None:
    """Tell of a run by mail or chat until it ends.

    What goes wrong is told at once, how the run is every `notify.every`.
    """
    from orchestrator.config.notify_urls import URLS_VARIABLE, notify_urls
    from orchestrator.view.notify import notifier

    if once and test:
        raise UsageError("--once and --test exclude each other")
    loaded = where.to_read()
    urls = notify_urls(loaded.notify)
    if not urls:
        raise UsageError(
            f"there is no address: set notify.urls_file in {where.config}, or {URLS_VARIABLE}"
        )
    if test:
        raise typer.Exit(notifier.send_test(urls, print_text))
    folder = where.run(run_id)
    of_run = notifier.Notifier(folder=folder, settings=loaded.notify, urls=urls, say=print_text)
    raise typer.Exit(of_run.once() if once else of_run.follow())


@app.command()
@shared
def web(
    where: Where,
    run_id: opt.RunId = LATEST,
    port: opt.Port = 8470,
    bind: opt.Bind = None,
    control: opt.Control = False,
) -> None:
    """Show a run in a browser, also one that is over.

    Prints the address, which opens the page.
    """
    from orchestrator.view.web import serving

    serving.serve(where.runs, run_id, print_text, port=port, bind=bind, control=control)


@app.command()
def limits(
    clear: opt.Clear = False,
    json_output: AsJson = False,
) -> None:
    """List what runs have learned, or delete it. These are the sizes that fit a card."""
    from orchestrator.cli import limits as verb
    from workers.learned_limits import LimitStore

    store, now_unix_s = LimitStore(), time.time()
    if json_output:
        print_text((verb.cleared_json if clear else verb.limits_json)(store, now_unix_s))
    elif clear:
        print_text(verb.cleared_text(store, now_unix_s))
    else:
        print_text(verb.limits_text(store, now_unix_s, width_of(sys.stdout)))


@app.command()
@shared
def burn(
    new: NewRun,
    duration: opt.HeatDuration = None,
    phase: opt.Phases = None,
    apply_power_limit: opt.ApplyPowerLimit = False,
) -> None:
    """Validate every card: PASS or FAIL. In three phases: caps and precision, heat, full load."""
    from orchestrator.lab import burn as verb
    from orchestrator.run import runner

    heat_s = duration_s(duration) or verb.HEAT_S
    loaded = new.load()
    import_from_here()
    options = runner.Options(
        json=new.as_json,
        plain=new.plain,
        wait_for_nodes=False,
        apply_power_limit=apply_power_limit,
    )
    raise typer.Exit(verb.burn(loaded, new.environment, heat_s, phase or (1, 2, 3), options))


@app.command()
@shared
def doctor(where: Configured, node: opt.NodeHere = None, json_output: AsJson = False) -> None:
    """Check every node and say what to type. Without a cluster it checks this machine alone."""
    from orchestrator.doctor import verb

    raise typer.Exit(verb.doctor(where.config, where.overrides or [], node, json=json_output))


@app.command()
def init(output: opt.Output = "cluster.yaml", force: opt.Force = False) -> None:
    """Write a cluster.yaml that fits the machines.

    Those are the nodes of the running cluster, or this one.
    """
    from orchestrator.cli.init import write_config

    for line in write_config(output, force=force):
        print_text(line)


@app.command()
@shared
def tune(
    here: Here,
    preset: opt.Preset = None,
    workload: opt.TunedWorkload = "train",
    budget: opt.Budget = None,
    levers: opt.Levers = None,
) -> None:
    """Measure what each setting brings here; write tuned.yaml."""
    from orchestrator.lab.tune.tuning import Tuning, names_in

    import_from_here()
    tuning = Tuning(
        here.load({"train.preset": preset}),
        Path(here.config).read_text(encoding="utf-8"),
        rehearse=here.rehearse,
        budget_s=duration_s(budget, "--budget"),
        names=names_in(levers or ""),
        workload=workload,
    )
    is_whole = tuning.run(lambda line: typer.echo(line, err=True))
    print_text(tuning.json_text() if here.as_json else tuning.text(_width()))
    if not is_whole:
        raise typer.Exit(130)


def _add_command(do: str, summary: str, *, hidden: bool = False) -> None:
    @app.command(do, help=summary, hidden=hidden)
    @shared
    def verb(where: Where, slots: opt.Slots, run_id: opt.OfRun = RUNNING) -> None:
        if do == "resume":
            typer.echo(
                "`resume` is called `unpause` now; a run goes on with `run --resume`", err=True
            )
        _send(where, do, slots, run_id)


for _do, _summary in _COMMANDS.items():
    _add_command(_do, _summary)
_add_command("resume", "The old name of `unpause`.", hidden=True)


@app.command()
@shared
def cap(where: Where, slot: opt.Slot, amount: opt.Amount, run_id: opt.OfRun = RUNNING) -> None:
    """Bound the memory of a slot; its whole budget lifts that."""
    _send(where, "cap", [slot], run_id, amount)


def _send(
    where: Where, do: str, slots: Sequence[str], run_id: str, amount: str | None = None
) -> None:
    from orchestrator.control.client import command

    print_text(command(where.run(run_id), do, slots, amount))


def _width() -> int | None:
    """Return the columns of the terminal.

    `None` where the output goes elsewhere, and has room for all.
    """
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
