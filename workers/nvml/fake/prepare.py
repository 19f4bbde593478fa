"""Prepares fake sensors on this machine: reads the script, builds the library, writes down the
start time.

The library is built from its C source with whatever compiler the machine has, once for each state
of the source.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pynvml

from workers.nvml.fake.library import SONAME, FakeSensorsError
from workers.nvml.fake.script import ANSWERS, FakeCard, Script, read_script
from workers.settings import FakeSensors

_SOURCE: Final = Path(__file__).with_name("fake_nvml.c")
_HEADERS: Final = tuple(
    Path(__file__).with_name(name) for name in ("script.h", "settings.h", "xids.h")
)
_FLAGS: Final = ("-std=c11", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden")
_COMPILERS: Final = ("cc", "gcc", "clang")
_TIMEOUT_S: Final = 120.0

#: What does not change between two points: counts, sums of bits, steps of the link.
_STEPS: Final = frozenset(
    {"throttle", "xids", "pcie_generation", "pcie_lanes", "ecc_errors", "remapped_rows"}
)
#: NVML's "not available", in a list of processes.
_NO_BYTES: Final = 2**64 - 1


def prepare(script_path: Path, folder: Path, *, elapsed_s: float = 0.0) -> FakeSensors:
    """Make the fake sensors of a script ready; what comes back is for `library.load`, in any
    process of this machine.

    Args:
        script_path: What a person wrote.
        folder: Where the library and the prepared script go; may be one that was used before.
        elapsed_s: How long ago the curves began.

    Raises:
        FakeSensorsError: The script is refused, or the library cannot be built.
    """
    script = read_script(script_path)
    library = build(folder)
    prepared = folder.absolute() / f"{script_path.stem}.sensors"
    fresh = prepared.with_suffix(".fresh")
    fresh.write_text(
        "".join(f"{line}\n" for line in _lines(script, time.monotonic() - elapsed_s)),
        encoding="ascii",
    )
    fresh.replace(prepared)
    return FakeSensors(library_path=str(library), script_path=str(prepared))


def _lines(script: Script, start_s: float) -> Iterator[str]:
    """Write a script as the library reads it; the form is that of `read_line` in script.h.

    The start is by CLOCK_MONOTONIC, which all processes of a machine share and which is never set.
    """
    yield f"start_s {start_s!r}"
    if script.driver is not None:
        yield f"driver {script.driver}"
    if script.cuda_driver is not None:
        major, minor = map(int, script.cuda_driver.split("."))
        yield f"cuda_driver {1000 * major + 10 * minor}"
    for function in script.missing_functions:
        yield f"missing {function}"
    for card in script.cards:
        yield f"card {card.uuid} {card.name}"
        yield from _card_lines(card)


def _card_lines(card: FakeCard) -> Iterator[str]:
    if card.repeat_s is not None:
        yield f"repeat_s {card.repeat_s!r}"
    if card.lost_after_calls is not None:
        yield (
            f"lost {card.lost_after_calls} {-1.0 if card.lost_for_s is None else card.lost_for_s!r}"
        )
    for key, error in card.fails.items():
        yield f"error {key} {getattr(pynvml, f'NVML_ERROR_{error.upper()}')}"
    if card.processes is not None:
        yield "processes"
        for process in card.processes:
            used_bytes = _NO_BYTES if process.used_bytes is None else process.used_bytes
            yield f"process {process.pid or 0} {used_bytes} {int(process.under_mps)}"
    for key in ANSWERS:
        value = getattr(card, key)
        if key == "processes" or value is None:
            continue
        points = value if isinstance(value, tuple) else ((0.0, float(value)),)
        kind = "steps" if key in _STEPS else "lines"
        yield f"curve {key} {kind} " + " ".join(f"{at_s!r} {number!r}" for at_s, number in points)


def build(folder: Path) -> Path:
    """Build the library below `folder`, unless this source was built there before.

    Args:
        folder: Any folder; is made if it is not there. May be shared by processes that build at the
        same time.

    Returns:
        The path of `libnvidia-ml.so.1`, in a folder named after the source.

    Raises:
        FakeSensorsError: There is no compiler, or it refused the source; says how to get one.
    """
    text = b"".join(path.read_bytes() for path in (_SOURCE, *_HEADERS))
    digest = hashlib.sha256(" ".join(_FLAGS).encode() + text).hexdigest()
    library = folder.absolute() / f"nvml-{digest[:12]}" / SONAME
    if library.exists():
        return library
    compiler = _compiler()
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        fresh = Path(scratch) / SONAME
        command = [*compiler, *_FLAGS, f"-Wl,-soname,{SONAME}", str(_SOURCE), "-o", str(fresh)]
        done = subprocess.run(  # noqa: S603 - CC is the user's own choice
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise FakeSensorsError(
                f"{shlex.join(command)} failed with exit code {done.returncode}:\n{done.stderr}"
            )
        fresh.replace(library)  # atomic, also if another process builds
    return library


def _compiler() -> list[str]:
    """Return the command of a C compiler: CC, which may hold arguments, or the first usual name on
    the PATH.
    """
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [[name] for name in _COMPILERS]:
        if shutil.which(command[0]):
            return command
    looked_for = (
        f"CC names {chosen[0]!r}, which is not there"
        if chosen
        else f"there is no {', '.join(_COMPILERS)}"
    )
    raise FakeSensorsError(
        f"fake sensors are built from C source, and this machine has no C compiler: {looked_for}; "
        f"install one (sudo apt install gcc, sudo dnf install gcc) or set CC to yours"
    )
