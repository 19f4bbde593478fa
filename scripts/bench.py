"""Benchmarks. Each verb prints a table to standard error and one JSON object to standard output.

    python scripts/bench.py oom-storm --errors 1000000
    python scripts/bench.py soak --minutes 30
    python scripts/bench.py VERB --help

Every figure is a ratio inside one run, or stands beside one: this machine's seconds say nothing about another's.
Exit code 0; 1 when a property is broken (a target that is missed is told, not punished); 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The script stands beside the packages, not in them, and they need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

from benches.common import own_stdout, show  # noqa: E402 - found since now


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a verb, and so an argument of its `run`."""

    default: Any
    text: str
    kind: Callable[[str], Any] | None = None
    """What reads it; by the default's type where this is not given."""
    choices: Sequence[str] | None = None
    many: bool = False

    def add_to(self, parser: argparse.ArgumentParser, name: str) -> None:
        """Add it under its name."""
        if self.default is False:
            parser.add_argument(f"--{name}", action="store_true", help=self.text)
            return
        kinds: dict[type, Callable[[str], Any]] = {int: _count, float: _positive}
        told = "" if self.default is None else " (default: all)" if self.many else " (default: %(default)s)"
        parser.add_argument(
            f"--{name}",
            type=self.kind or kinds.get(type(self.default), str),
            default=self.default,
            choices=self.choices,
            nargs="+" if self.many else None,
            help=self.text + told,
        )


def _seed(text: str) -> Option:
    return Option(1, text, int)


_DEVICE = Option("cpu", "what it runs on", choices=["cpu", "cuda"])
_BUDGET = Option(None, "of the worker, in MiB (default: 213 on a CPU, 3410 on a card)", _positive)
_SIZE = Option(None, "of the steps (default: 1024, 8192 on a card)", _count)
_RULES = ["adaptive", "accelerate", "toma", "guide", "aimd"]
_WHO = ["ours", "blind", "accelerate", "toma", "ideal"]
_CONFIG = {"config": Option("cluster.yaml", "of the rehearsal")}

#: Verb -> module of `benches`, what it is for, its options.
VERBS: Mapping[str, tuple[str, str, Mapping[str, Option]]] = {
    "oom-storm": (
        "storm",
        "one process survives a storm of real out-of-memory errors",
        {
            "errors": Option(1_000_000, "how many"),
            "budget-mib": Option(213.0, "of the worker, in MiB"),
            "bare": Option(False, "in this process instead of in a Ray actor"),
        },
    ),
    "overhead": (
        "overhead",
        "work per second under the whole head, against a bare torch loop",
        {
            "rounds": Option(16, "pairs of turns"),
            "seconds": Option(8.0, "of each turn"),
            "size": Option(1024, "edge of the matrices, x 64"),
            "dtype": Option("fp32", "of the matrices", choices=["fp32", "bf16"]),
            "slice-s": Option(1.0, "length of a slice"),
        },
    ),
    "startup": (
        "startup",
        "from the start of the process to ten running workers, against bare actors with torch",
        {"rounds": Option(3, "pairs of starts"), **_CONFIG},
    ),
    "startup-bare": ("startup", "the other side of `startup`, once: the same actors with nothing but torch", _CONFIG),
    "recovery": (
        "recovery",
        "from an out-of-memory to the next good step",
        {"errors": Option(500, "how many"), "device": _DEVICE, "budget-mib": _BUDGET, "size": _SIZE},
    ),
    "fuzz": (
        "fuzz",
        "hostile configurations are refused in words or become plans that add up",
        {
            "inputs": Option(50_000, "how many"),
            "seed": _seed("another one, other inputs"),
            "processes": Option(os.cpu_count() or 1, "that judge them"),
        },
    ),
    "soak": (
        "soak",
        "half an hour under random chaos, its books checked from outside all along",
        {
            "minutes": Option(30.0, "planned length"),
            "seed": _seed("of the faults"),
            "pace": Option(1.0, "times the usual rate of faults"),
        },
    ),
    "kills": (
        "kills",
        "kill workers one after the other, against a bare Ray actor with torch",
        {"kills": Option(50, "how many"), "seed": _seed("of whom it meets"), **_CONFIG},
    ),
    "head-kills": (
        "head_kills",
        "kill the head at a random moment, look what is left, and go on",
        {"rounds": Option(20, "how many"), "seed": _seed("of the moments")},
    ),
    "rejoin": (
        "rejoin",
        "a node goes and comes back under load; what the others do meanwhile",
        {
            "cycles": Option(10, "how often"),
            "quiet-s": Option(30.0, "before the first"),
            "cycle-s": Option(40.0, "from one to the next"),
        },
    ),
    "head": (
        "head",
        "processor time of the head and growth of its store, on a scripted fleet",
        {
            "workers": Option([10, 100, 1000], "how many, one row each", _count, many=True),
            "warm-up-s": Option(20.0, "before the window"),
            "window-s": Option(15.0, "of each figure"),
            "jump": Option(default=False, text="let the clock jump instead of waiting"),
        },
    ),
    "policy": (
        "policy",
        "work done under made-up courses of memory, against an oracle's",
        {
            "seeds": Option(3, "how many, eight worlds each"),
            "seed": _seed("the first of them"),
            "rules": Option(_RULES, "which", choices=_RULES, many=True),
            "rate": Option(10_000.0, "items/s, at the most"),
        },
    ),
    "pool": (
        "pool",
        "workers on one made-up card, with leases and without",
        {
            "seed": _seed("of jobs and tenants"),
            "workers": Option(4, "on the card"),
            "minutes": Option(10.0, "of each scene"),
        },
    ),
    "pressure": (
        "pressure",
        "the same for real, while a cap moves; against accelerate and toma",
        {
            "device": _DEVICE,
            "seconds": Option(60.0, "of each course"),
            "rounds": Option(3, "each meets each course as often"),
            "seed": _seed("of the courses"),
            "contestants": Option(_WHO, "which", choices=_WHO, many=True),
            "memory-mib": Option(None, "of a step at the most (default: 48, a sixth of the card on a card)", _positive),
        },
    ),
    "thermal": (
        "thermal",
        "the thermal governor on model cards, against the guides' rule",
        {"cards": Option(10, "how many"), "seed": _seed("of the first card")},
    ),
    "verify": (
        "verify",
        "checks of results: false alarms, flipped bits found, cost",
        {
            "checks": Option(20_000, "of right products"),
            "flips": Option(20, "for each bit and size"),
            "seed": _seed("of what is drawn"),
            "device": _DEVICE,
            "dtypes": Option(["fp32", "bf16", "fp16"], "also tf32 on a card", str, many=True),
        },
    ),
    "watching": (
        "watching",
        "what sensors, governor and checks cost a worker",
        {
            "rounds": Option(8, "turns of each"),
            "seconds": Option(4.0, "of each turn"),
            "size": _SIZE,
            "device": _DEVICE,
        },
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Benchmarks of the orchestrator, against something in the same run.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (_, text, options) in VERBS.items():
        verb = verbs.add_parser(name, help=text)
        for option_name, option in options.items():
            option.add_to(verb, option_name)
        if "config" in options:
            verb.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    return parser


def main() -> int:
    """Run the verb and return its exit code."""
    arguments = vars(_parser().parse_args())
    # Each verb imports its own: torch, Ray, or both.
    name = arguments.pop("verb")
    verb = importlib.import_module(f"benches.{VERBS[name][0]}")
    if name == "startup-bare":
        verb.bare_actors(**arguments)
        return 0
    # argparse has made underscores of the dashes in the options' names.
    with own_stdout():
        result = verb.run(**arguments)
    return show(result)


if __name__ == "__main__":
    sys.exit(main())
