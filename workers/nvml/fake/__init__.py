"""A fake NVML: a small C library that answers from a script, for machines without a card.

This module loads it into a process, so that nvidia-ml-py talks to it. It imports neither torch nor
pydantic: every worker of a rehearsal does this. What a person wrote is read, and the library built,
in `script.py`.
"""

from __future__ import annotations

import ctypes
from typing import Final

from workers.settings import FakeSensors

#: What nvidia-ml-py asks the dynamic loader for, on Linux.
SONAME: Final = "libnvidia-ml.so.1"


class FakeSensorsError(Exception):
    """The fake sensors cannot be set up as asked for; the text says what to change."""


def load(fake: FakeSensors) -> None:
    """Make `fake` the NVML of this process. To be called before anything here has asked a real one.

    A library that is already loaded is found under its soname, so what nvidia-ml-py opens later by
    that name is the one that is opened here by its path (dlopen(3)).

    Raises:
        FakeSensorsError: The files are not there or do not fit together, or this process has
            another NVML already.
    """
    try:
        library = ctypes.CDLL(fake.library_path, mode=ctypes.RTLD_GLOBAL)
        found = ctypes.CDLL(SONAME)
    except OSError as error:
        raise FakeSensorsError(f"the fake NVML cannot be loaded: {error}") from None
    # The same library has the same handle (dlopen(3)).
    if found._handle != library._handle:
        raise FakeSensorsError(
            f"this process has loaded another {SONAME} before the fake one {fake.library_path}; "
            "fake sensors have to "
            f"be loaded first, before anything asks NVML or opens a card"
        )
    bad_line = library.fake_nvml_script(fake.script_path.encode())
    if bad_line:
        where = "cannot be opened" if bad_line < 0 else f"is not understood in line {bad_line}"
        raise FakeSensorsError(f"the prepared script {fake.script_path} {where}; prepare it again")
