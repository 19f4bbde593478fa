"""Checks the product on a real card. Prints one JSON object to standard output and tables to
standard error.

    python scripts/gpu_acceptance.py                       # on the first card, within six minutes
    python scripts/gpu_acceptance.py --quick               # within two minutes
    python scripts/gpu_acceptance.py --only cap speed      # some of the checks
    python scripts/gpu_acceptance.py --device cpu --quick  # the same, scaled down, without a card

Needs torch, psutil and nvidia-ml-py (`pynvml`). Needs neither Ray nor an installation of this
project. The card should be idle. Memory of other programs stays theirs: budgets that do not fit
beside it are reduced, and a note says so. Exit code 0: every check that could be made holds; 1: a
check is broken; 2: wrong arguments, or no card.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    _prepare()
    from acceptance import suite
    from acceptance.machine import open_machine
    from benches.common import own_stdout

    names = list(suite.CHECKS)
    parser = argparse.ArgumentParser(description="Checks the product on a real card.")
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda", help="(default: %(default)s)")
    add("--only", nargs="+", choices=names, metavar="CHECK", help=f"of: {', '.join(names)}")
    add("--quick", action="store_true", help="shorter turns and fewer rounds, the same limits")
    arguments = parser.parse_args()
    with own_stdout():
        try:
            command = " ".join(sys.orig_argv)
            here = open_machine(arguments.device, quick=arguments.quick, command=command)
        except RuntimeError as error:
            print(f"{error}\nwithout a card, type: --device cpu", file=sys.stderr)
            return 2
        versions = "{card}, driver {driver}, torch {torch}, Python {python}".format(**here.host)
        print(versions, file=sys.stderr)
        found = suite.run(here, arguments.only or names)
    answer = suite.as_json(here, found)
    verdicts = "  ".join(f"{each.check} {each.word}" for each, _ in found)
    print(f"\n{verdicts}\n{answer['took_s']:.0f} s", file=sys.stderr)
    print(json.dumps(answer))
    return 0 if answer["ok"] else 1


def _prepare() -> None:
    """Let this process and its children import the packages and number the cards alike."""
    places = [str(_ROOT), str(_ROOT / "scripts")]
    sys.path[:0] = places
    # The fork server of the children reads PYTHONPATH when it preloads torch.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [*places, *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    from workers.host.cuda_environment import set_for_cuda

    set_for_cuda(os.environ)
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    os.environ.setdefault("PYTHONWARNINGS", "ignore:Failed to initialize NumPy:UserWarning")


if __name__ == "__main__":
    sys.exit(main())
