"""Runs an unmodified program under a memory cap.

`python -m workers.capped --gib 6 train.py ARGS` replaces itself by `python train.py ARGS`, so exit
codes, signals, standard input and tracebacks are those of the program. On a card the cap is a share
of its memory in the environment variable that torch's allocator reads; `hook/sitecustomize.py` sets
it again where the variable has no effect. On a CPU the cap is the kernel's `RLIMIT_DATA`, set
before the interpreter loads. Each child process inherits the same cap for itself. Creates no CUDA
context, and does not stop a program that wants to escape the cap.
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

#: torch reads the first one that is set, even if it is empty (c10/cuda/CUDAAllocatorConfig.h).
_ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_KEY: Final = "per_process_memory_fraction"

#: For a smaller cap, the launcher measures whether torch can be imported. The import takes 178 MiB
#: with one core, and OpenBLAS 40 MiB for each further core (measured, torch 2.13 with NumPy 2, CPU
#: build).
_SURELY_ENOUGH_BYTES: Final = GIB + 64 * MIB * (os.cpu_count() or 1)

#: Reserve for the variation of an import between runs, and for the program itself.
_HEADROOM_MIB: Final = 16

#: Prints the memory that RLIMIT_DATA counts after torch is imported, in KiB. The import frees
#: nothing: with this limit it succeeds, and with 2 MiB less it fails (measured).
_MEASURE: Final = """
import re
try:
    import torch
except ImportError:
    pass
print(re.search(r"VmData:\\s*(\\d+)", open("/proc/self/status").read())[1])
"""


def main(arguments: Sequence[str]) -> NoReturn:
    """Set the cap and become the program; exit with 2 and a message if that is impossible."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.capped",
        usage="python -m workers.capped --gib NUMBER (SCRIPT | -m MODULE | -c CODE | -) [ARG ...]",
        description="Run an unmodified program under a memory cap. After the options, write "
        "what you would write after `python`.",
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
        parser.error(f"no such option: {unknown[0]}; the program's own options follow its name")
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
    if device == "cpu":  # the hard limit stays: a program may rely on it
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (cap_bytes, hard))
    os.execve(sys.executable, command, environment)  # noqa: S606 - runs the user's program


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of this command, and the program with its arguments."""
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
    if not 0 < number < 2**33:  # more does not fit into a C long, in bytes
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of GiB above 0, such as 6 or 0.5"
        )
    return number


def _interpreter_flags(count: int) -> list[str]:
    """Return the interpreter's flags before `-m workers.capped`; `count` arguments follow it."""
    *flags, last = sys.orig_argv[1 : len(sys.orig_argv) - count]
    if last == sys.argv[0]:  # a script that calls `main`, such as workers/command/capped.py
        return flags
    if last == "workers.capped" and flags:
        last = flags.pop()  # -m, or with other letters before it: -um
    letters = re.sub(r"m(workers\.capped)?$", "", last)
    return flags if letters == "-" else [*flags, letters]


def _why_no_limit(cap_bytes: int) -> str | None:
    """Return why the kernel cannot set this cap; `None` if it can."""
    limits = [limit for limit in resource.getrlimit(resource.RLIMIT_DATA) if limit >= 0]
    if min(limits, default=cap_bytes) >= cap_bytes:
        return None
    return (
        f"data is already limited to {min(limits) / GIB:.4g} GiB here (`ulimit -d`, or an outer "
        "cap); raise that limit, or give --gib at most as much"
    )


def _why_too_small(cap_bytes: int, flags: Sequence[str]) -> str | None:
    """Return a message, and write a note, if torch cannot be imported under the cap."""
    if cap_bytes >= _SURELY_ENOUGH_BYTES:
        return None
    done = subprocess.run(  # noqa: S603 - this Python, with fixed arguments
        [sys.executable, *flags, "-P", "-c", _MEASURE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return None  # the program will report the error
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
    """Return the memory of the smallest card visible to the program.

    `None`: it will use the CPU, because torch is not built for CUDA or no card is visible.
    """
    if not re.search(r"^cuda\b.*= *'", _text_in_torch("version.py"), re.MULTILINE):
        return None
    if visible is not None and visible.startswith("MIG-"):
        return queries.card_total_bytes(visible.partition(",")[0])
    return min((card.total_bytes for card in visible_cards() if card.total_bytes), default=None)


def _text_in_torch(name: str) -> str:
    """Return the text of a file of the torch that the program will import; "" if there is none."""
    found = importlib.util.find_spec("torch")
    path = Path("" if found is None or found.origin is None else found.origin).parent / name
    return path.read_text(encoding="utf-8") if found is not None and path.is_file() else ""


def _cap_allocator(environment: MutableMapping[str, str], fraction: float) -> str | None:
    """Add the share of a card to the variable that torch reads; keep a lower share in it.

    A torch whose header does not name the key would refuse it; then only the hook sets the cap.
    Returns why no cap can hold, or `None`.
    """
    if environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return "PYTORCH_NO_CUDA_MEMORY_CACHING is set, and then torch keeps no cap; unset it"
    if _KEY in _text_in_torch("include/c10/cuda/CUDAAllocatorConfig.h"):
        set_ones = [name for name in _ALLOCATOR_VARIABLES if name in environment]
        name = set_ones[0] if set_ones else _ALLOCATOR_VARIABLES[-1]
        settings = environment.get(name, "").rstrip(", ")
        present = [float(number) for number in re.findall(rf"{_KEY}\s*:\s*(\d*\.?\d+)", settings)]
        lowest = min([1.0, fraction, *present[-1:]])
        # Of two values torch uses the last.
        environment[name] = ",".join(filter(None, [settings, f"{_KEY}:{lowest:.9f}"]))
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
