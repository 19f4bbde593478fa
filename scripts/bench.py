"""Benchmarks. Each verb prints a table to standard error and one JSON object to standard output.

    python scripts/bench.py oom-storm --errors 1000000
    python scripts/bench.py overhead --rounds 16 --seconds 6
    python scripts/bench.py startup --rounds 3
    python scripts/bench.py recovery --errors 500
    python scripts/bench.py fuzz --inputs 50000 --seed 1
    python scripts/bench.py soak --minutes 30
    python scripts/bench.py kills --kills 50
    python scripts/bench.py head-kills --rounds 20
    python scripts/bench.py rejoin --cycles 10
    python scripts/bench.py policy --seeds 3
    python scripts/bench.py pool --seed 1
    python scripts/bench.py pressure --rounds 3
    python scripts/bench.py thermal --cards 10
    python scripts/bench.py verify --checks 20000
    python scripts/bench.py watching --rounds 8
    python scripts/bench.py head --workers 10 100 1000

Every figure is a ratio inside one run, or stands beside one: this machine's seconds say nothing about another's.
Exit code 0; 1 when a property is broken (a target that is missed is told, not punished); 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from workers.units import MIB

if TYPE_CHECKING:
    from benches.common import Result

# The script stands beside the packages, not in them, and they need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


def main() -> int:
    """Run the verb and return its exit code."""
    arguments = _parser().parse_args()
    # Each verb imports its own: torch, Ray, or both.
    if arguments.verb == "startup-bare":
        from benches import startup

        startup.bare_actors(arguments.config, arguments.overrides)
        return 0
    from benches.common import show

    with _own_stdout():
        result = _run(arguments)
    return show(result)


def _run(arguments: argparse.Namespace) -> Result:
    match arguments.verb:
        case "oom-storm":
            from benches import storm

            result = storm.run(arguments.errors, int(arguments.budget_mib * MIB), bare=arguments.bare)
        case "overhead":
            from benches import overhead

            result = overhead.run(
                arguments.rounds, arguments.seconds, arguments.size, arguments.dtype, arguments.slice_s
            )
        case "startup":
            from benches import startup

            result = startup.run(arguments.rounds, arguments.config, arguments.overrides)
        case "recovery":
            from benches import recovery

            budget_mib = arguments.budget_mib or (3.33 * 1024 if arguments.device == "cuda" else 213)
            size = arguments.size or (8192 if arguments.device == "cuda" else 1024)
            result = recovery.run(arguments.errors, arguments.device, int(budget_mib * MIB), size)
        case "fuzz":
            from benches import fuzz

            result = fuzz.run(arguments.inputs, arguments.seed, arguments.processes)
        case "soak":
            from benches import soak

            result = soak.run(arguments.minutes, arguments.seed, arguments.pace)
        case "kills":
            from benches import kills

            result = kills.run(arguments.kills, arguments.seed, arguments.config, arguments.overrides)
        case "head-kills":
            from benches import head_kills

            result = head_kills.run(arguments.rounds, arguments.seed)
        case "rejoin":
            from benches import rejoin

            result = rejoin.run(arguments.cycles, arguments.quiet_s, arguments.cycle_s)
        case "head":
            from benches import head

            result = head.run(arguments.workers, arguments.warm_up_s, arguments.window_s)
        case "policy" | "pool" | "pressure":
            result = _run_sizes(arguments)
        case _:
            result = _run_card(arguments)
    return result


def _run_card(arguments: argparse.Namespace) -> Result:
    """Run one of the verbs that are about the card and what it computes."""
    match arguments.verb:
        case "thermal":
            from benches import thermal

            result = thermal.run(arguments.cards, arguments.seed)
        case "verify":
            from benches import verify

            result = verify.run(arguments.checks, arguments.flips, arguments.seed, arguments.device, arguments.dtypes)
        case "watching":
            from benches import watching

            size = arguments.size or (8192 if arguments.device == "cuda" else 1024)
            result = watching.run(arguments.rounds, arguments.seconds, size, arguments.device)
    return result


def _run_sizes(arguments: argparse.Namespace) -> Result:
    """Run one of the verbs that judge the rules for a step's size."""
    match arguments.verb:
        case "policy":
            from benches import policy

            result = policy.run(arguments.seeds, arguments.seed, arguments.rules, arguments.rate)
        case "pool":
            from benches import common, pool

            figures = pool.run(arguments.seed, arguments.workers, arguments.minutes)
            result = common.Result(bench="pool", figures=figures)
        case "pressure":
            from benches import pressure

            memory_bytes = arguments.memory_mib and int(arguments.memory_mib * MIB)
            result = pressure.run(
                arguments.device,
                memory_bytes,
                arguments.seconds,
                arguments.rounds,
                arguments.seed,
                arguments.contestants,
            )
    return result


@contextlib.contextmanager
def _own_stdout() -> Iterator[None]:
    """Send whatever is printed meanwhile to standard error: Ray tells there, too, of the actors that a verb ends."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Benchmarks of the orchestrator, against something in the same run.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    verb = verbs.add_parser("oom-storm", help="one process survives a storm of real out-of-memory errors")
    verb.add_argument("--errors", type=_count, default=1_000_000, help="how many (default: a million)")
    verb.add_argument("--budget-mib", type=float, default=213.0, help="of the worker, in MiB (default: %(default)s)")
    verb.add_argument("--bare", action="store_true", help="in this process instead of in a Ray actor")

    verb = verbs.add_parser("overhead", help="work per second under the whole head, against a bare torch loop")
    verb.add_argument("--rounds", type=_count, default=16, help="pairs of turns (default: %(default)s)")
    verb.add_argument("--seconds", type=float, default=8.0, help="of each turn (default: %(default)s)")
    verb.add_argument("--size", type=_count, default=1024, help="edge of the matrices, x 64 (default: %(default)s)")
    verb.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="(default: %(default)s)")
    verb.add_argument("--slice-s", type=float, default=1.0, help="length of a slice (default: the shipped one)")

    for name, text in (
        ("startup", "from the start of the process to ten running workers, against bare actors with torch"),
        ("startup-bare", "the other side of `startup`, once: the same actors with nothing but torch in them"),
    ):
        verb = verbs.add_parser(name, help=text)
        if name == "startup":
            verb.add_argument("--rounds", type=_count, default=3, help="pairs of starts (default: %(default)s)")
        verb.add_argument("--config", default="cluster.yaml", help="(default: %(default)s)")
        verb.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")

    verb = verbs.add_parser("recovery", help="from an out-of-memory to the next good step")
    verb.add_argument("--errors", type=_count, default=500, help="how many (default: %(default)s)")
    verb.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    verb.add_argument("--budget-mib", type=float, default=None, help="(default: 213 on a CPU, 3410 on a card)")
    verb.add_argument("--size", type=_count, default=None, help="of the good steps (default: 1024, 8192 on a card)")

    verb = verbs.add_parser("fuzz", help="hostile configurations are refused in words or become plans that add up")
    verb.add_argument("--inputs", type=_count, default=50_000, help="how many (default: %(default)s)")
    verb.add_argument("--seed", type=int, default=1, help="another one, other inputs (default: %(default)s)")
    verb.add_argument("--processes", type=_count, default=os.cpu_count(), help="(default: one for each core)")

    verb = verbs.add_parser("head", help="processor time of the head and growth of its store, on a scripted fleet")
    verb.add_argument("--workers", type=_count, nargs="+", default=[10, 100, 1000], help="(default: 10 100 1000)")
    verb.add_argument("--warm-up-s", type=_positive, default=20.0, help="before the window (default: %(default)g)")
    verb.add_argument("--window-s", type=_positive, default=15.0, help="of each figure (default: %(default)g)")
    _add_trials(verbs)
    _add_card(verbs)
    return parser


def _add_card(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs that are about the card and what it computes."""
    verb = verbs.add_parser("thermal", help="the thermal governor on model cards, against the guides' rule")
    verb.add_argument("--cards", type=_count, default=10, help="how many (default: %(default)s)")
    verb.add_argument("--seed", type=int, default=1, help="of the first card (default: %(default)s)")

    verb = verbs.add_parser("verify", help="checks of results: false alarms, flipped bits found, cost")
    verb.add_argument("--checks", type=_count, default=20_000, help="of right products (default: %(default)s)")
    verb.add_argument("--flips", type=_count, default=20, help="for each bit and size (default: %(default)s)")
    verb.add_argument("--seed", type=int, default=1, help="of what is drawn (default: %(default)s)")
    verb.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    verb.add_argument("--dtypes", nargs="+", default=["fp32", "bf16", "fp16"], help="also tf32 on a card")

    verb = verbs.add_parser("watching", help="what sensors, governor and checks cost a worker")
    verb.add_argument("--rounds", type=_count, default=8, help="turns of each (default: %(default)s)")
    verb.add_argument("--seconds", type=float, default=4.0, help="of each turn (default: %(default)s)")
    verb.add_argument("--size", type=_count, default=None, help="(default: 1024, 8192 on a card)")
    verb.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")


def _add_trials(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs that let a whole run meet trouble."""
    verb = verbs.add_parser("soak", help="half an hour under random chaos, its books checked from outside all along")
    verb.add_argument("--minutes", type=float, default=30.0, help="planned length (default: %(default)s)")
    verb.add_argument("--seed", type=int, default=1, help="of the faults (default: %(default)s)")
    verb.add_argument("--pace", type=float, default=1.0, help="times the usual rate of faults (default: %(default)s)")

    verb = verbs.add_parser("kills", help="kill workers one after the other, against a bare Ray actor with torch")
    verb.add_argument("--kills", type=_count, default=50, help="how many (default: %(default)s)")
    verb.add_argument("--seed", type=int, default=1, help="of whom it meets (default: %(default)s)")
    verb.add_argument("--config", default="cluster.yaml", help="(default: %(default)s)")
    verb.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")

    verb = verbs.add_parser("head-kills", help="kill the head at a random moment, look what is left, and go on")
    verb.add_argument("--rounds", type=_count, default=20, help="how many (default: %(default)s)")
    verb.add_argument("--seed", type=int, default=1, help="of the moments (default: %(default)s)")

    verb = verbs.add_parser("rejoin", help="a node goes and comes back under load; what the others do meanwhile")
    verb.add_argument("--cycles", type=_count, default=10, help="how often (default: %(default)s)")
    verb.add_argument("--quiet-s", type=float, default=30.0, help="before the first (default: %(default)s)")
    verb.add_argument("--cycle-s", type=float, default=40.0, help="from one to the next (default: %(default)s)")
    _add_sizes(verbs)


def _add_sizes(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verbs that judge the rules for a step's size."""
    verb = verbs.add_parser("policy", help="work done under made-up courses of memory, against an oracle's")
    rules = ["adaptive", "accelerate", "toma", "guide", "aimd"]
    verb.add_argument("--seeds", type=_count, default=3, help="how many, eight worlds each (default: %(default)s)")
    verb.add_argument("--seed", type=int, default=1, help="the first of them (default: %(default)s)")
    verb.add_argument("--rules", nargs="+", choices=rules, default=rules, help="which (default: all)")
    verb.add_argument("--rate", type=_positive, default=10_000.0, help="items/s, at the most (default: %(default)g)")

    verb = verbs.add_parser("pool", help="workers on one made-up card, with leases and without")
    verb.add_argument("--seed", type=int, default=1, help="of jobs and tenants (default: %(default)s)")
    verb.add_argument("--workers", type=_count, default=4, help="on the card (default: %(default)s)")
    verb.add_argument("--minutes", type=_positive, default=10.0, help="of each scene (default: %(default)g)")

    verb = verbs.add_parser("pressure", help="the same for real, while a cap moves; against accelerate and toma")
    who = ["ours", "blind", "accelerate", "toma", "ideal"]
    verb.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    verb.add_argument("--seconds", type=_positive, default=60.0, help="of each course (default: %(default)s)")
    verb.add_argument("--rounds", type=_count, default=3, help="each meets each course as often (default: %(default)s)")
    verb.add_argument("--seed", type=int, default=1, help="of the courses (default: %(default)s)")
    verb.add_argument("--contestants", nargs="+", choices=who, default=who, help="which (default: all)")
    verb.add_argument("--memory-mib", type=_positive, default=None, help="(default: 48, a sixth of the card on a card)")


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


if __name__ == "__main__":
    sys.exit(main())
