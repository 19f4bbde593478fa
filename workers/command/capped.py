"""Becomes a Python program under a memory cap, in the environment of that program's Python.

It is a script, because `-m workers.capped` would first find a folder `workers` of the user. It
imports this product from the folders in `VARIABLE`, which it removes from the environment; the
program's own path is unchanged. If a Python cannot import it, the program runs without a cap, and
the first line of its output says so.
"""

import os
import sys

#: Environment variable set by `launch.py`: folders of this product and of the modules it needs.
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
    except Exception as _error:  # noqa: BLE001 - an old Python may raise anything
        with open("/proc/self/cmdline") as _file:  # noqa: PTH123
            _words = _file.read().split("\0")[:-1]
        _at = _words.index(sys.argv[0])
        sys.stderr.write(f"{sys.executable} cannot run workers.capped, so nothing caps: {_error}\n")
        sys.stderr.flush()
        # `--gib`, its number, and `--` follow this script.
        os.execv(sys.executable, [*_words[:_at], *_words[_at + 4 :]])  # noqa: S606
    sys.path[:] = _own
    main(sys.argv[1:])
