"""Builds the fake NVML from its C source with whatever compiler the machine has; once for each state of the source."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from workers.nvml.fake.library import SONAME, FakeSensorsError

_SOURCE: Final = Path(__file__).with_name("fake_nvml.c")
_HEADERS: Final = tuple(Path(__file__).with_name(name) for name in ("power.h", "script.h", "xids.h"))
_FLAGS: Final = ("-std=c11", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-fvisibility=hidden")
_COMPILERS: Final = ("cc", "gcc", "clang")
_TIMEOUT_S: Final = 120.0


class NoCompilerError(FakeSensorsError):
    """There is no C compiler on this machine; says how to get one."""


def build(folder: Path) -> Path:
    """Build the library below `folder`, unless this source was built there before.

    Args:
        folder: Any folder; is made if it is not there. May be shared by processes that build at the same time.

    Returns:
        The path of `libnvidia-ml.so.1`, in a folder named after the source.

    Raises:
        NoCompilerError: There is none, or CC names none.
        FakeSensorsError: The compiler refused the source.
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603 - CC is the user's own choice
        if done.returncode:
            raise FakeSensorsError(f"{shlex.join(command)} failed with exit code {done.returncode}:\n{done.stderr}")
        fresh.replace(library)  # atomic, also if another process builds
    return library


def _compiler() -> list[str]:
    """Return the command of a C compiler: CC, which may hold arguments, or the first usual name on the PATH.

    Raises:
        NoCompilerError: There is none.
    """
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [[name] for name in _COMPILERS]:
        if shutil.which(command[0]):
            return command
    looked_for = f"CC names {chosen[0]!r}, which is not there" if chosen else f"there is no {', '.join(_COMPILERS)}"
    raise NoCompilerError(
        f"fake sensors are built from C source, and this machine has no C compiler: {looked_for}; "
        f"install one (sudo apt install gcc, sudo dnf install gcc) or set CC to yours"
    )
