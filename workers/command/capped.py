"""Becomes a Python program under a memory cap, in whichever environment has that program's Python.

A script, because `-m workers.capped` would find a folder `workers` of the user first. What it
imports of this product is found by the folders in a variable, which the program does not get to
see; the program's own path is as without it.
"""

from __future__ import annotations

import os
import sys

#: Where this product and the modules that it needs are; set by `launch.py`.
VARIABLE = "ORCHESTRATOR_CAPPED_PATH"

if __name__ == "__main__":
    _here, _library = os.path.dirname(__file__), os.path.dirname(os.__file__)  # noqa: PTH120
    _own = [entry for entry in sys.path if entry != _here]
    sys.path[:] = [
        *(entry for entry in _own if entry.startswith(_library) and "-packages" not in entry),
        *os.environ.pop(VARIABLE, "").split(os.pathsep),
    ]
    from workers.capped.__main__ import main

    sys.path[:] = _own
    main(sys.argv[1:])
