"""The options of single verbs.

Does not say which verb has which (`app` does); those that several verbs share are in `loading`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

OptionalText = str | None

# Of `run` and `burn`.
ApplyPowerLimit = Annotated[
    bool,
    Option(
        "--apply-power-limit", help="Set power_limit_w on the cards until the run ends; as root."
    ),
]

# Of `run`.
Duration = Annotated[
    OptionalText, Option(help="Minutes, or 30s, 2h, 1h30m. Default: run.duration.", metavar="TIME")
]
Scale = Annotated[
    float | None, Option(help="Of bytes in a rehearsal; sizes by its root. Default: 1/16 on a CPU.")
]
Workload = Annotated[
    OptionalText, Option(help="matmul, train, or your own package.module:Class.", metavar="NAME")
]
Policy = Annotated[
    OptionalText, Option(help="How sizes follow memory: adaptive or classic.", metavar="NAME")
]
WaitForNodes = Annotated[
    bool, Option("--wait-for-nodes", help="Start on what is there; nodes may join later.")
]
Resume = Annotated[
    OptionalText,
    Option(help="Resume a run whose head was killed or interrupted.", metavar="RUN_ID"),
]

# Of `burn`.
HeatDuration = Annotated[
    OptionalText,
    Option(
        help="Of the heat phase, minutes or 30s, 2h; the others are never longer. Default: 60.",
        metavar="TIME",
    ),
]
Phases = Annotated[
    list[int] | None,
    Option(
        help="1 caps and precision, 2 heat, 3 full load. Default: all.",
        metavar="NUMBER",
        min=1,
        max=3,
    ),
]
# Of `tune`.
Preset = Annotated[
    OptionalText, Option(help="What is trained. Default: train.preset.", metavar="NAME")
]
TunedWorkload = Annotated[str, Option("--workload", help="train or matmul.", metavar="NAME")]
Budget = Annotated[
    OptionalText,
    Option(help="Minutes, or 30s, 2h. Default: 15; 4.5 in a rehearsal.", metavar="TIME"),
]
Levers = Annotated[
    OptionalText,
    Option(
        help="Only these, such as precision,optimizer=adamw-fused. Default: all.",
        metavar="KEY[=VALUE],...",
    ),
]
# Of `plan`.
PlannedJobs = Annotated[
    OptionalText,
    Option("--jobs", help="What a job file would do, and for how long.", metavar="FILE"),
]

# Of `up`, `stop` and `doctor`.
NodeToStart = Annotated[str, Argument(help="A key under nodes: in the configuration.")]
HeadAddress = Annotated[
    OptionalText,
    Option(
        help="How other PCs reach the head. Default: what is configured, else this PC.",
        metavar="HOST[:PORT]",
    ),
]
Execute = Annotated[bool, Option("--exec", help="Run the commands instead of printing them.")]
Stay = Annotated[
    bool,
    Option("--stay", help="With --exec: keep the node, and start it again whenever it has ended."),
]
Service = Annotated[
    bool,
    Option("--service", help="Write and start a systemd user unit that does so, and print it."),
]
NodeToEnd = Annotated[
    OptionalText,
    Option(help="Also end the Ray node that `up NODE` started on this PC.", metavar="NODE"),
]
NodeHere = Annotated[
    OptionalText, Option(help="Which node of the configuration this PC is.", metavar="NODE")
]

# Of `top`.
OneFrame = Annotated[
    bool, Option("--once", help="Print one frame and end, as where there is no terminal.")
]
Sort = Annotated[
    OptionalText,
    Option(help="By which; -COLUMN turns the order. Default: worst first.", metavar="COLUMN"),
]
Filter = Annotated[
    OptionalText,
    Option("--filter", help='Such as "state:backoff !pc1".', metavar="WORDS"),
]
ReadOnly = Annotated[
    bool, Option("--read-only", help="Without the keys that send commands to the run.")
]

# Of `notify`.
Once = Annotated[bool, Option("--once", help="Send one status of the run as it is now, and end.")]
TestMessage = Annotated[
    bool, Option("--test", help="Send one message, and say of each address whether it took it.")
]
# Of `web`.
Port = Annotated[
    int, Option(help="Of the page; 0 takes any free one.", min=0, max=65_535, metavar="NUMBER")
]
Bind = Annotated[
    str | None,
    Option(help="An address of this PC at which Prometheus gets /metrics.", metavar="ADDRESS"),
]
Control = Annotated[
    bool, Option("--control", help="Let the page send commands about slots and jobs.")
]

# Of the verbs that send a command.
Slots = Annotated[
    list[str], Argument(help="Such as pc1/3; each is named.", metavar="SLOT", show_default=False)
]
Slot = Annotated[str, Argument(help="Such as pc1/3.", metavar="SLOT")]
Amount = Annotated[
    str, Argument(help="Such as 2GiB or 900MiB; at most the slot's budget.", metavar="BYTES")
]
OfRun = Annotated[
    str,
    Option(
        "--run",
        help="As `runs` shows it, or its end. Default: the newest that runs.",
        metavar="RUN_ID",
    ),
]

# Of `logs`.
SlotOrJob = Annotated[
    str, Argument(help="A slot, such as pc1/3, or a job as `jobs list` shows it.", metavar="NAME")
]
LogsOfRun = Annotated[
    str,
    Option("--run", help="As `runs` shows it, or its end. Default: the newest.", metavar="RUN_ID"),
]
Follow = Annotated[
    bool, Option("--follow", "-f", help="Print what comes, until the run or the job has ended.")
]

# Of `report`, `limits` and `init`.
RunId = Annotated[
    str, Argument(help="As `runs` shows it, or its end. Default: the newest.", metavar="RUN_ID")
]
AsText = Annotated[bool, Option("--text", help="In words: this is the default.")]
HtmlFile = Annotated[
    Path | None,
    Option("--html", help="Into one file for a browser, charts included.", metavar="FILE"),
]
CurvesFolder = Annotated[
    Path | None,
    Option("--curves", help="Loss and validation over steps, as CSV.", metavar="DIR"),
]
Clear = Annotated[bool, Option("--clear", help="Forget them all.")]
Output = Annotated[str, Option("--output", "-o", help="Where to.", metavar="FILE")]
Force = Annotated[bool, Option("--force", help="Replace that file if it is there.")]

# Of `export`.
ExportedRun = Annotated[str, Argument(help="As `runs` shows it, or its end.", metavar="RUN_ID")]
NewFolder = Annotated[Path, Option("--to", help="A new folder, or an empty one.", metavar="DIR")]
Merged = Annotated[
    bool, Option("--merged", help="Adapters merged into the weights, in fp32: this is the default.")
]
Adapter = Annotated[bool, Option("--adapter", help="The adapters alone, for peft.")]
AveragedWeights = Annotated[
    bool, Option("--average", help="The averaged weights, where train.ema_decay keeps them.")
]
BestCheckpoint = Annotated[
    bool, Option("--best", help="What had the lowest validation loss, where that was kept.")
]

# Of `jobs`.
JobFile = Annotated[
    OptionalText, Argument(help="A job file; docs/jobs.md has one.", metavar="FILE")
]
StayForJobs = Annotated[
    bool, Option("--stay", help="Wait for more jobs when nothing is left to do.")
]
QueueService = Annotated[
    bool,
    Option(
        "--service",
        help="Write and start a systemd user unit that works a queue off with --stay, and print "
        "it.",
    ),
]
NewQueue = Annotated[bool, Option("--new", help="Begin another queue, although one is unfinished.")]
QueueDuration = Annotated[
    OptionalText,
    Option(
        "--duration", help="The longest: 30s, 2h. Default: until no job is left.", metavar="TIME"
    ),
]
