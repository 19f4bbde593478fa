"""Runs a program that is not changed under a memory cap.

`python -m workers.capped --gib 6 train.py ARGS` replaces itself by `python train.py ARGS`, so exit
codes, signals, standard input and tracebacks are the program's own. On a card the cap is a share of
its memory in the variable that torch's allocator reads; `hook/sitecustomize.py` corrects it where
that was not enough. On a CPU it is the kernel's `RLIMIT_DATA`, set before the interpreter loads.
Children inherit it, each for itself. It makes no CUDA context, and it is no protection against a
program that wants to escape.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import resource
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from workers.capped.hook.sitecustomize import VARIABLE, note
from workers.host.machine import visible_cards
from workers.nvml import queries
from workers.units import GIB, MIB

_HOOK: Final = Path(__file__).parent / "hook"

#: torch takes the first that is set, even if it is empty (c10/cuda/CUDAAllocatorConfig.h).
_ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_KEY: Final = "per_process_memory_fraction"

#: Under so much it is measured whether torch can be imported. That takes 178 MiB with one core, and
#: OpenBLAS takes 40 MiB for each further one (measured, torch 2.13 with NumPy 2, CPU build).
_SURELY_ENOUGH_BYTES: Final = GIB + 64 * MIB * (os.cpu_count() or 1)

#: What an import may take beyond a measured one, by how its threads come to run, and what a program
#: needs besides.
_HEADROOM_MIB: Final = 16

#: Prints what RLIMIT_DATA counts once torch is imported, in KiB. Nothing is freed on the way: under
#: a limit of so much the import succeeds, and under 2 MiB less it fails (measured).
_MEASURE: Final = """
import re
try:
    import torch
except ImportError:
    pass
print(re.search(r"VmData:\\s*(\\d+)", open("/proc/self/status").read())[1])
"""


def main(arguments: Sequence[str]) -> NoReturn:
    """Set the cap and become the program; ends with 2 and a sentence where that cannot be."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.capped",
        usage="python -m workers.capped --gib NUMBER (SCRIPT | -m MODULE | -c CODE | -) [ARG ...]",
        description="Run a program that is not changed under a memory cap. What follows the "
        "options is what stands behind `python` without a cap.",
        epilog="Where torch is built for CUDA and CUDA_VISIBLE_DEVICES shows a card, the cap is on "
        "torch's allocator, for each card; elsewhere it is on the private memory of the process. "
        "Each child process has the same cap for itself.",
        allow_abbrev=False,
    )
    parser.add_argument("--gib", type=_gib, metavar="NUMBER", help="the cap in GiB, as 6 or 0.5")
    own, program = _split(arguments)
    options, unknown = parser.parse_known_args(own)
    gib: float | None = options.gib
    if unknown:
        parser.error(f"no such option: {unknown[0]}; those of the program stand behind its name")
    if gib is None:
        parser.error("--gib NUMBER is missing; it stands before the program")
    if not program:
        parser.error("no program; name a script, -m MODULE, -c CODE, or - for standard input")
    flags = _interpreter_flags(len(arguments))
    environment = dict(os.environ)
    card_bytes = _card_bytes(environment.get("CUDA_VISIBLE_DEVICES"))
    cap_bytes = int(gib * GIB)
    if card_bytes is None:
        device, why_not = "cpu", _why_no_limit(cap_bytes) or _why_too_small(cap_bytes, flags)
    else:
        device, why_not = "cuda", _cap_allocator(environment, cap_bytes / card_bytes)
    if why_not is not None:
        parser.error(why_not)
    environment[VARIABLE] = f"{device}:{gib:.12g}"
    path = [str(_HOOK), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.orig_argv[0], *flags, *program]
    if device == "cpu":  # the hard limit stays, as a program may expect to find it
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, hard))
    os.execve(sys.executable, command, environment)  # noqa: S606 - that is what it is for


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of this command, and the program with its arguments behind them."""
    end = 0
    while end < len(arguments) and re.match("-h$|--.", arguments[end]):
        end += 2 if arguments[end] == "--gib" else 1
    program = list(arguments[end:])
    return list(arguments[:end]), program[1:] if program[:1] == ["--"] else program


def _gib(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 2**33:  # so many do not fit into a C long, in bytes
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of GiB above 0, such as 6 or 0.5"
        )
    return number


def _interpreter_flags(count: int) -> list[str]:
    """Return what stands between `python` and `-m workers.capped`; `count` arguments follow it."""
    *flags, last = sys.orig_argv[1 : len(sys.orig_argv) - count]
    if last == sys.argv[0]:  # a script that calls `main`, such as workers/command/capped.py
        return flags
    if last == "workers.capped" and flags:
        last = flags.pop()  # -m, or with other letters before it: -um
    letters = re.sub(r"m(workers\.capped)?$", "", last)
    return flags if letters == "-" else [*flags, letters]


def _why_no_limit(cap_bytes: int) -> str | None:
    """Say why the kernel cannot cap the program so."""
    limits = [limit for limit in resource.getrlimit(resource.RLIMIT_DATA) if limit >= 0]
    if min(limits, default=cap_bytes) >= cap_bytes:
        return None
    return (
        f"data is already limited to {min(limits) / GIB:.4g} GiB here (`ulimit -d`, or a cap "
        "around this one); lift that, or give no more with --gib"
    )


def _why_too_small(cap_bytes: int, flags: Sequence[str]) -> str | None:
    """Say that torch cannot be imported under the cap, and note it."""
    if cap_bytes >= _SURELY_ENOUGH_BYTES:
        return None
    done = subprocess.run(  # noqa: S603 - this Python, and our own words
        [sys.executable, *flags, "-P", "-c", _MEASURE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return None  # the program will say it
    floor_mib = int(done.stdout.split()[-1]) // 1024 + 1
    if cap_bytes >= floor_mib * MIB:
        return None
    note("cpu")
    enough_gib = math.ceil(1000 * (floor_mib + _HEADROOM_MIB) * MIB / GIB) / 1000
    return (
        f"a cap of {cap_bytes / GIB:.4g} GiB is too small: with torch imported a process here "
        f"holds {floor_mib} MiB; give --gib {enough_gib} or more"
    )


def _card_bytes(visible: str | None) -> int | None:
    """Return the memory of the smallest card that the program will see.

    `None`: it will use the CPU, as torch is not built for CUDA or no card is visible.
    """
    if not re.search(r"^cuda\b.*= *'", _text_in_torch("version.py"), re.MULTILINE):
        return None
    if visible is not None and visible.startswith("MIG-"):
        return queries.card_total_bytes(visible.partition(",")[0])
    return min((card.total_bytes for card in visible_cards() if card.total_bytes), default=None)


def _text_in_torch(name: str) -> str:
    """Read a file of the torch that the program will import, without importing it."""
    found = importlib.util.find_spec("torch")
    path = Path("" if found is None or found.origin is None else found.origin).parent / name
    return path.read_text(encoding="utf-8") if found is not None and path.is_file() else ""


def _cap_allocator(environment: MutableMapping[str, str], fraction: float) -> str | None:
    """Add the share of a card to the variable that torch will read; a lower one in it stays.

    A torch whose header does not name the key would refuse it: the hook alone caps there. Returns
    why no cap can hold.
    """
    if environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return "PYTORCH_NO_CUDA_MEMORY_CACHING is set, and then torch keeps no cap; unset it"
    if _KEY in _text_in_torch("include/c10/cuda/CUDAAllocatorConfig.h"):
        set_ones = [name for name in _ALLOCATOR_VARIABLES if name in environment]
        name = set_ones[0] if set_ones else _ALLOCATOR_VARIABLES[-1]
        settings = environment.get(name, "").rstrip(", ")
        present = [float(number) for number in re.findall(rf"{_KEY}\s*:\s*(\d*\.?\d+)", settings)]
        lowest = min([1.0, fraction, *present[-1:]])
        # Of two values torch takes the last.
        environment[name] = ",".join(filter(None, [settings, f"{_KEY}:{lowest:.9f}"]))
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
