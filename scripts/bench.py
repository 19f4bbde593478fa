"""Benchmarks. Each verb prints a table to standard error and one JSON object to standard output.

    python scripts/bench.py kills
    python scripts/bench.py policy --seeds 3
    python scripts/bench.py VERB --help

Every figure is a ratio within one run, or comes with such a ratio: seconds of one machine say
nothing about another machine. Exit code 0; 1 when a property is broken (a missed target is
reported, but does not change the exit code); 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

# The script is outside the packages, and the packages need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

from benches.common import own_stdout, show  # noqa: E402 - needs the sys.path entry above

_VERBS = yaml.safe_load(
    (Path(__file__).parent / "benches" / "verbs.yaml").read_text(encoding="utf-8")
)


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


_TYPES: Mapping[str, Callable[[str], Any]] = {
    "int": _count, "float": _positive, "seed": int, "str": str,
}  # fmt: skip


def _add(parser: argparse.ArgumentParser, name: str, option: Mapping[str, Any]) -> None:
    default, help_text = option["default"], option["help"]
    if default is False:
        parser.add_argument(f"--{name}", action="store_true", help=help_text)
        return
    many = isinstance(default, list)
    kind = option.get("type", type(default[0] if isinstance(default, list) else default).__name__)
    parser.add_argument(
        f"--{name}", type=_TYPES[kind], default=default, choices=option.get("choices"),
        nargs="+" if many else None, help=f"{help_text} (default: %(default)s)",
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Benchmarks of the orchestrator, against something in the same run."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, description in _VERBS.items():
        verb = verbs.add_parser(name, help=description["about"])
        for option_name, option in description["options"].items():
            _add(verb, option_name, option)
    arguments = vars(parser.parse_args())
    # Imported late: each module imports torch, Ray, or both.
    module = importlib.import_module(f"benches.{_VERBS[arguments.pop('verb')]['module']}")
    # SystemExit runs the cleanup that ends the processes of the benchmark.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # argparse replaces dashes by underscores in the names of options.
    with own_stdout():
        result = module.run(**arguments)
    return show(result)


if __name__ == "__main__":
    sys.exit(main())
