"""Options that several verbs share, in one wording. Does not say which verb has which (`app` does)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[str, typer.Option("--config", "-c", help="The configuration.", metavar="FILE")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override any key, such as workload.size=4096. May be repeated.", metavar="KEY=VALUE"),
]
RunDir = Annotated[str | None, typer.Option(help="Where run folders are. Default: run.dir.", metavar="DIR")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output, and nothing else there.")]
Local = Annotated[bool, typer.Option("--local", help="This machine alone, with what it really has.")]
Rehearse = Annotated[
    bool, typer.Option("--rehearse", help="Every node as a small copy on this machine: real Ray, real failures.")
]
Debug = Annotated[
    bool, typer.Option("--debug", help="One worker in this process, without Ray: breakpoints in your workload work.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of a live table.")]
NewRunDir = Annotated[str | None, typer.Option(help="Where run folders go. Default: run.dir.", metavar="DIR")]
FakeSensors = Annotated[
    Path | None,
    typer.Option(
        help="Of a rehearsal: temperatures and alarms by a script, such as scripts/heat.json.", metavar="FILE"
    ),
]
ApplyPowerLimit = Annotated[
    bool, typer.Option("--apply-power-limit", help="Set power_limit_w on the cards until the run ends; as root.")
]
