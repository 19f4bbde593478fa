"""The head: the user's terminal, the cluster and every decision about slots.

Never imports torch. If a file of the user hides one of the two packages, later imports would find
that file. Importing this package then ends the program at once, with a sentence.
"""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def why_hidden(folder: str) -> str | None:
    """Say which file in a folder on Python's path hides one of our packages; `None`: none does."""
    for name in ("orchestrator", "workers"):
        for file in (Path(folder, name, "__init__.py"), Path(folder, f"{name}.py")):
            if file.is_file() and Path(folder).resolve() != _ROOT:
                return (
                    f"{file.absolute()} hides the package `{name}` of this program: rename it, or "
                    "type this in another folder (a job's own is its key `cwd`)"
                )
    return None


for _folder in sys.path:
    if Path(_folder).resolve() == _ROOT:
        break
    if _why := why_hidden(_folder):
        if "ray" in sys.modules:  # a process of Ray: the head prints it
            raise ImportError(_why)
        sys.stderr.write(f"{_why}\n")
        raise SystemExit(2)
