"""Tells in one line that a capped program ran out of memory, and caps what torch's variable did
not.

Python's `site` imports it at the start of each interpreter that has this folder in PYTHONPATH, and
children inherit that. It leaves the folder out of `sys.path`, and then imports the sitecustomize
that would have been imported without it. It loads no other module before it needs one.

It does not see a program that ends by a signal or `os._exit`, one that runs with `-S`, `-E` or
`-I`, or one whose PYTHONPATH was replaced. Their caps hold all the same.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False  # `typing` is not loaded yet, and the program may do without it
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

#: `cpu:6` or `cuda:0.5`: what is capped, and at how many GiB. Set by `workers.capped`.
VARIABLE = "WORKERS_CAPPED"

#: A file that gets a line for each process that ends for want of memory: its id, and what is
#: capped. A program that must know it sets this, and searches no output.
NOTE_VARIABLE = "WORKERS_CAPPED_NOTE"

#: The words of errors that are not out of memory by their type.
TEXTS = os.path.dirname(__file__) + "/../../oom/texts.py"  # noqa: PTH120 - no pathlib yet


def is_out_of_memory(error: Exception) -> bool:
    """Say whether an exception, or one that is chained to it, means that memory was refused: its
    type, or one of the words that `workers.oom` looks for.
    """
    if isinstance(error, MemoryError):
        return True  # and there may be no memory for what follows
    import re  # noqa: PLC0415 - only when a program has failed, as the others
    import runpy  # noqa: PLC0415
    import traceback  # noqa: PLC0415

    told = runpy.run_path(TEXTS)
    kinds = (told[kind] for kind in ("CARD", "HOST", "PROBABLE", "LOGS", "HOST_LOGS"))
    # Of all in the chain the types and the texts, without a line of the program.
    text = "".join(traceback.format_exception(type(error), error, None, limit=0))
    return any(re.search(pattern, text) for patterns in kinds for pattern in patterns)


def note(device: str) -> None:
    """Add a line to the file that is asked for, if one is."""
    path = os.environ.get(NOTE_VARIABLE)
    if path is not None:
        try:
            with open(path, "a") as file:  # noqa: PTH123 - no pathlib yet
                file.write(f"{os.getpid()} {device}\n")
        except OSError:  # it must not change how the program ends
            pass


def tell(error: BaseException | None, device: str, gib: str) -> None:
    """Write the line and the note, if this is what ended the process."""
    try:
        if isinstance(error, Exception) and is_out_of_memory(error):
            note(device)
            memory = "private memory" if device == "cpu" else "memory on each card"
            sys.stderr.write(
                f"workers.capped: process {os.getpid()} ran out of memory; "
                f"its cap is {gib} GiB of {memory}\n"
            )
            sys.stderr.flush()
    except Exception:  # noqa: BLE001, S110 - a closed stderr must not change how the program ends
        pass


def tell_of_process(device: str, gib: str) -> None:
    """Tell of a child of `multiprocessing` too, which ends by `os._exit` after its traceback."""
    import traceback  # noqa: PLC0415 - only in such a child

    show = traceback.print_exc
    if show.__module__ == __name__:
        return  # the parent did it, before it forked

    def print_exc(*arguments: Any, **keywords: Any) -> None:  # noqa: ANN401 - handed through
        show(*arguments, **keywords)
        if sys._getframe(1).f_code.co_name == "_bootstrap":  # of multiprocessing.process
            tell(sys.exc_info()[1], device, gib)

    traceback.print_exc = print_exc


class AfterTorch:
    """A finder that finds nothing itself; the module `torch` that others find gets its cap."""

    def __init__(self, gib: str) -> None:
        self._cap_bytes = float(gib) * 2**30

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ANN401
        """See `importlib.abc.MetaPathFinder`; a program may look for torch without importing it."""
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader  # finders have loaders of their own
        load = loader.exec_module

        def exec_module(torch: Any) -> None:  # noqa: ANN401 - mypy does not see torch through it
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            del loader.exec_module  # it is itself again
            load(torch)
            if torch.version.cuda is not None:
                # Called when CUDA begins to be used: no context is made here.
                torch.cuda._lazy_call(lambda: self._lower(torch))

        loader.exec_module = exec_module
        return spec

    def _lower(self, torch: Any) -> None:  # noqa: ANN401
        """Lower what torch allows itself on a card, if it is over the cap by more than rounding."""
        # torch before 2.7 does not tell the share; and before 2.10, which knows the variable's key,
        # to set one makes its card the current one (c10/cuda/CUDACachingAllocator.cpp).
        share_of = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
        current = torch.cuda.current_device()
        for card in range(torch.cuda.device_count()):
            total_bytes = torch.cuda.get_device_properties(card).total_memory
            if share_of(card) * total_bytes > self._cap_bytes + 2**20:
                torch.cuda.set_per_process_memory_fraction(self._cap_bytes / total_bytes, card)
        if torch.cuda.current_device() != current:
            torch.cuda.set_device(current)


def begin(device: str, gib: str) -> None:
    """Watch this interpreter, and the children that it forks."""
    # Python sets `last_value` for an exception that nothing caught, before any excepthook.
    atexit.register(lambda: tell(getattr(sys, "last_value", None), device, gib))

    def watch_child() -> None:
        if "multiprocessing.process" in sys.modules:
            tell_of_process(device, gib)

    os.register_at_fork(after_in_child=watch_child)
    if "--multiprocessing-fork" in sys.orig_argv:  # spawned, not forked
        tell_of_process(device, gib)
    if device == "cuda":
        sys.meta_path.insert(0, AfterTorch(gib))


if __name__ == "sitecustomize":
    _here = os.path.dirname(__file__)  # noqa: PTH120 - pathlib is not loaded yet
    sys.path[:] = [entry for entry in sys.path if entry != _here]
    if VARIABLE in os.environ:
        begin(*os.environ[VARIABLE].split(":"))
    # The import of the user's own, which `site` waits for; where there is none, its ImportError.
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")
