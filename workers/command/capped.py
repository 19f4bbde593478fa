"""Becomes a Python program under a memory cap, in whichever environment has that program's Python.

A script, because `-m workers.capped` would find a folder `workers` of the user first. What it
imports of this product is found by the folders in a variable, which the program does not get to
see; the program's own path is as without it. A Python that cannot load that runs the program
without a cap, and the first line of its output says so.
"""

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
    try:
        from workers.capped.__main__ import main
    except Exception as _error:  # noqa: BLE001 - whatever an old Python says
        with open("/proc/self/cmdline") as _file:  # noqa: PTH123
            _words = _file.read().split("\0")[:-1]
        _at = _words.index(sys.argv[0])
        sys.stderr.write(f"{sys.executable} cannot run workers.capped, so nothing caps: {_error}\n")
        sys.stderr.flush()
        # Behind this script stand `--gib`, its number, and `--`.
        os.execv(sys.executable, [*_words[:_at], *_words[_at + 4 :]])  # noqa: S606
    sys.path[:] = _own
    main(sys.argv[1:])
