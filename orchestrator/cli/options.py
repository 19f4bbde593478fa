"""All options, each in one wording for the verbs that have it.

Does not say which verb has which (`app` does).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Text = str | None

# Of several verbs.
ConfigPath = Annotated[str, Option("--config", "-c", help="The configuration.", metavar="FILE")]
Overrides = Annotated[
    list[str] | None,
    Option(
        "--set",
        help="Override any key, such as workload.size=4096. May be repeated.",
        metavar="KEY=VALUE",
    ),
]
RunDir = Annotated[Text, Option(help="Where run folders are. Default: run.dir.", metavar="DIR")]
AsJson = Annotated[
    bool, Option("--json", help="One JSON object on standard output, and nothing else there.")
]
Local = Annotated[bool, Option("--local", help="This machine alone, with what it really has.")]
Rehearse = Annotated[
    bool,
    Option(
        "--rehearse", help="Every node as a small copy on this machine: real Ray, real failures."
    ),
]
Plain = Annotated[bool, Option("--plain", help="Lines instead of a live table.")]
NewRunDir = Annotated[Text, Option(help="Where run folders go. Default: run.dir.", metavar="DIR")]
ApplyPowerLimit = Annotated[
    bool,
    Option(
        "--apply-power-limit", help="Set power_limit_w on the cards until the run ends; as root."
    ),
]

# Of `run`.
Duration = Annotated[
    Text, Option(help="Minutes, or 30s, 2h, 1h30m. Default: run.duration.", metavar="TIME")
]
Scale = Annotated[
    float | None, Option(help="Of bytes in a rehearsal; sizes by its root. Default: 1/16 on a CPU.")
]
Workload = Annotated[
    Text, Option(help="matmul, train, or your own package.module:Class.", metavar="NAME")
]
Policy = Annotated[
    Text, Option(help="How sizes follow memory: adaptive or classic.", metavar="NAME")
]
WaitForNodes = Annotated[
    bool, Option("--wait-for-nodes", help="Start on what is there; nodes may join later.")
]
Resume = Annotated[
    Text, Option(help="Resume a run whose head was killed or interrupted.", metavar="RUN_ID")
]
Chaos = Annotated[
    Text, Option(help='Inject faults, such as "oom:rate=0.05;kill:every=20s".', metavar="FAULTS")
]
ChaosSeed = Annotated[int, Option(help="Of --chaos: the same seed, the same faults.")]
YesReally = Annotated[
    bool,
    Option(
        "--yes-really",
        help="Allow --chaos on a real cluster; with --apply-power-limit, memory offsets.",
    ),
]

# Of `burn`.
HeatDuration = Annotated[
    Text,
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
Preset = Annotated[Text, Option(help="What is trained. Default: train.preset.", metavar="NAME")]
TunedWorkload = Annotated[str, Option("--workload", help="train or matmul.", metavar="NAME")]
Budget = Annotated[
    Text, Option(help="Minutes, or 30s, 2h. Default: 15; 4.5 in a rehearsal.", metavar="TIME")
]
Levers = Annotated[
    Text,
    Option(
        help="Only these, such as precision,optimizer=adamw-fused. Default: all.",
        metavar="KEY[=VALUE],...",
    ),
]

# Of `plan`.
PlannedJobs = Annotated[
    Text, Option("--jobs", help="What a job file would do, and for how long.", metavar="FILE")
]

# Of `up`, `stop` and `doctor`.
NodeToStart = Annotated[str, Argument(help="A key under nodes: in the configuration.")]
HeadAddress = Annotated[
    Text,
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
    Text, Option(help="Also end the Ray node that `up NODE` started on this PC.", metavar="NODE")
]
NodeHere = Annotated[
    Text, Option(help="Which node of the configuration this PC is.", metavar="NODE")
]

# Of `top`.
OneFrame = Annotated[
    bool, Option("--once", help="Print one frame and end, as where there is no terminal.")
]
Sort = Annotated[
    Text,
    Option(help="Column or key; -COLUMN turns the order. Default: worst first.", metavar="COLUMN"),
]
Filter = Annotated[
    Text, Option("--filter", help='Such as "state:lost temp>75 !node:pc1".', metavar="QUERY")
]
ReadOnly = Annotated[
    bool, Option("--read-only", help="Without the keys that send commands to the run.")
]

# Of `notify`.
Once = Annotated[bool, Option("--once", help="Send one digest of the run as it is now, and end.")]
TestMessage = Annotated[
    bool, Option("--test", help="Send one message, and say of each address whether it took it.")
]
# Of `web`.
Port = Annotated[
    int, Option(help="Of the page; 0 takes any free one.", min=0, max=65_535, metavar="NUMBER")
]
Bind = Annotated[
    str,
    Option(
        help="The address of this PC to serve; other PCs need --certificate.", metavar="ADDRESS"
    ),
]
Control = Annotated[
    bool, Option("--control", help="Let the page pause, resume, drain and reinstate slots.")
]
Certificate = Annotated[
    Path | None, Option(help="For HTTPS: the certificate, as PEM.", metavar="FILE")
]
CertificateKey = Annotated[
    Path | None, Option("--key", help="Its key, unless that is in the same file.", metavar="FILE")
]
WithoutTls = Annotated[
    bool,
    Option("--without-tls", help="Serve other PCs unencrypted: who listens can read and log in."),
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
LogsOfRun = Annotated[
    str,
    Option("--run", help="As `runs` shows it, or its end. Default: the newest.", metavar="RUN_ID"),
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
    Option("--curves", help="Loss and validation over steps, as CSV and events.", metavar="DIR"),
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
JobFile = Annotated[Text, Argument(help="A job file; docs/jobs.md has one.", metavar="FILE")]
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
    Text,
    Option(
        "--duration", help="The longest: 30s, 2h. Default: until no job is left.", metavar="TIME"
    ),
]
