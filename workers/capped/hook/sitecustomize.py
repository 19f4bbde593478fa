"""Reports that a capped program ran out of memory, and caps cards that torch's variable did not.

Python's `site` imports this module at the start of each interpreter that has this folder in
PYTHONPATH, which child processes inherit. The module removes the folder from `sys.path`, and then
imports the sitecustomize that would have been imported without it. It imports other modules only
when it needs them.

Does not report a program that ends by a signal or `os._exit`, runs with `-S`, `-E` or `-I`, or has
replaced PYTHONPATH. Their caps still hold.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False  # `typing` is not loaded yet, and the program may not need it
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from typing import Any

#: Set by `workers.capped`: the capped device and its cap in GiB, as `cpu:6` or `cuda:0.5`.
VARIABLE = "WORKERS_CAPPED"

#: Environment variable with the path of a file. Each process that ends out of memory appends a
#: line: its id and the capped device. A caller sets it to avoid a search of the output.
NOTE_VARIABLE = "WORKERS_CAPPED_NOTE"

#: File with the patterns of out-of-memory errors that are not recognised by their type.
TEXTS = os.path.dirname(__file__) + "/../../oom/texts.py"  # noqa: PTH120 - no pathlib yet


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an exception, or one chained to it, is an out-of-memory: by its type, or by a
    pattern of `workers.oom`.
    """
    if isinstance(error, MemoryError):
        return True  # and there may be no memory for the code below
    import re  # noqa: PLC0415 - only after a failure, like the next two
    import runpy  # noqa: PLC0415
    import traceback  # noqa: PLC0415

    patterns_of = runpy.run_path(TEXTS)
    kinds = (patterns_of[kind] for kind in ("CARD", "HOST", "PROBABLE", "LOGS", "HOST_LOGS"))
    # Types and texts of the whole chain, without lines of the program.
    text = "".join(traceback.format_exception(type(error), error, None, limit=0))
    return any(re.search(pattern, text) for patterns in kinds for pattern in patterns)


def note(device: str) -> None:
    """Append a line to the file that `NOTE_VARIABLE` names, if it is set."""
    path = os.environ.get(NOTE_VARIABLE)
    if path is not None:
        try:
            with open(path, "a") as file:  # noqa: PTH123 - no pathlib yet
                file.write(f"{os.getpid()} {device}\n")
        except OSError:  # a failed note must not change how the program ends
            pass


def report(error: BaseException | None, device: str, gib: str) -> None:
    """Write the message and the note if an out-of-memory ended the process."""
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


def report_children(device: str, gib: str) -> None:
    """Report a `multiprocessing` child as well: it ends by `os._exit` after its traceback."""
    import traceback  # noqa: PLC0415 - only in such a child

    show = traceback.print_exc
    if show.__module__ == __name__:
        return  # the parent has patched it before the fork

    def print_exc(*arguments: Any, **keywords: Any) -> None:  # noqa: ANN401 - handed through
        show(*arguments, **keywords)
        if sys._getframe(1).f_code.co_name == "_bootstrap":  # of multiprocessing.process
            report(sys.exc_info()[1], device, gib)

    traceback.print_exc = print_exc


class AfterTorch:
    """A finder that sets the cap after another finder's loader has executed `torch`."""

    def __init__(self, gib: str) -> None:
        self._cap_bytes = float(gib) * 2**30

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ANN401
        """Return torch's spec with a loader that sets the cap once it has loaded torch."""
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader  # loaders have no common type
        load = loader.exec_module

        def exec_module(torch: Any) -> None:  # noqa: ANN401 - mypy does not see torch through it
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            del loader.exec_module  # restore the loader's own method
            load(torch)
            if torch.version.cuda is not None:
                # Called when CUDA is first used: this creates no context.
                torch.cuda._lazy_call(lambda: self._lower(torch))

        loader.exec_module = exec_module
        return spec

    def _lower(self, torch: Any) -> None:  # noqa: ANN401
        """Lower torch's limit on each card where it exceeds the cap by more than rounding."""
        # torch before 2.7 cannot return the share. Before 2.10, which knows the variable's key,
        # setting a share makes its card the current one (c10/cuda/CUDACachingAllocator.cpp).
        share_of = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
        current = torch.cuda.current_device()
        for card in range(torch.cuda.device_count()):
            total_bytes = torch.cuda.get_device_properties(card).total_memory
            if share_of(card) * total_bytes > self._cap_bytes + 2**20:
                torch.cuda.set_per_process_memory_fraction(self._cap_bytes / total_bytes, card)
        if torch.cuda.current_device() != current:
            torch.cuda.set_device(current)


def begin(device: str, gib: str) -> None:
    """Report and cap this interpreter and the children that it forks."""
    # Python sets `last_value` for an exception that nothing caught, before any excepthook.
    atexit.register(lambda: report(getattr(sys, "last_value", None), device, gib))

    def watch_child() -> None:
        if "multiprocessing.process" in sys.modules:
            report_children(device, gib)

    os.register_at_fork(after_in_child=watch_child)
    if "--multiprocessing-fork" in sys.orig_argv:  # spawned, not forked
        report_children(device, gib)
    if device == "cuda":
        sys.meta_path.insert(0, AfterTorch(gib))


if __name__ == "sitecustomize":
    _here = os.path.dirname(__file__)  # noqa: PTH120 - pathlib is not loaded yet
    sys.path[:] = [entry for entry in sys.path if entry != _here]
    if VARIABLE in os.environ:
        begin(*os.environ[VARIABLE].split(":"))
    # Import the user's own sitecustomize; if there is none, `site` expects the ImportError.
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")
