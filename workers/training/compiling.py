"""torch.compile for a model, or for each of its blocks; taken back where it fails or compiles again
and again.

The first dimension of what goes in is marked dynamic, so that one graph serves parts of all sizes.
A part of one sample is computed without it: torch would compile that size anew. Only parts of a
training are compiled, not its evaluation. The result differs by rounding. Says what it did in
`news`; does not say whether it pays.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import psutil
import torch
from torch import Tensor, nn

from workers.oom import classify
from workers.settings import FailureKind
from workers.training.errors import TaskError, TrainingError
from workers.training.keyed import KeyedDropout
from workers.training.settings import TrainSettings
from workers.units import MIB

T = TypeVar("T")

#: Graphs of one piece of code, for blocks that are alike or for one model. A training needs two:
#: without and with recomputation. With more, something that changes in every step is compiled into
#: them.
_MOST_GRAPHS: Final = 4

#: Parts that may run out of memory before the first compiled one ends well. The compiler takes host
#: memory itself, and on a CPU the cap counts that.
_MOST_FAILURES: Final = 3

#: Of an error's text.
_LONGEST: Final = 300

#: Host memory that the compiler takes and keeps. Measured with two small blocks: 95 MiB; larger
#: graphs take more.
_NEEDED_BYTES: Final = 256 * MIB

_COMPILED_TOO_OFTEN: Final = "FailOnRecompileLimitHit"


class Compiling:
    """Takes over `forward` of the model or of its blocks. Make it before what else does so."""

    def __init__(
        self,
        settings: TrainSettings,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        """Prepare; nothing is compiled before the first part.

        Raises:
            TaskError: Blocks shall be compiled, and the task names none.
        """
        self._unit, self._mode, self._backend = settings.compile, settings.compile_mode, backend
        self._pending = self._unit != "off"
        """Whether parts are to be compiled: until it fails."""
        self._on = False
        """Whether such a part is being computed."""
        self._failures = 0
        self._graphs = 0
        self._dropouts = [each for each in model.modules() if isinstance(each, KeyedDropout)]
        self._news: list[tuple[str, dict[str, Any]]] = []
        if self._unit == "block" and not blocks:
            raise TaskError(
                "train.compile: block needs a task that names its blocks; set train.compile: model"
            )
        units = {"off": [], "block": list(blocks), "model": [model]}[self._unit]
        kinds = {tuple(each.shape for each in unit.parameters()) for unit in units}
        self._most_graphs = _MOST_GRAPHS * len(kinds)
        self._eager: list[Callable[..., Any]] = [unit.forward for unit in units]
        self._made: list[Callable[..., Any]] = []
        """The same, as torch compiles them when they are called."""
        for place, unit in enumerate(units):
            setattr(unit, "forward", partial(self._forward, place))  # noqa: B010 - mypy has methods constant

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events since the last call: `compiled` and `not_compiled`, with their figures."""
        news, self._news = self._news, []
        return news

    def run(self, rows: int, compute: Callable[[], T]) -> T:
        """Compute a part of so many samples, compiled if that is wanted and possible.

        `compute` must change nothing: after a failure of the compiler it is called again without
        it.
        """
        if not self._pending or rows == 1:
            return compute()
        began_s = time.perf_counter()
        if not self._made and (lack := _lack()) is not None:
            self._pending = False
            self._tell("not_compiled", 0.0, reason=lack)
            return compute()
        try:
            result = self._compiled(compute)
        except Exception as error:
            reason = self._reason(error)
            if reason is None:
                raise
        else:
            self._note(rows, time.perf_counter() - began_s)
            return result
        # Outside the handler, so that what the failed part held is free.
        self._pending = False
        self._forget()
        self._tell("not_compiled", time.perf_counter() - began_s, reason=reason)
        return compute()

    def park(self) -> None:
        """Drop CUDA graphs: they hold memory, and the addresses of what moves now.

        The next part makes new ones.
        """
        if self._pending and self._mode != "default":
            self._forget()

    def _forget(self) -> None:
        torch.compiler.reset()
        self._graphs = 0

    def _compiled(self, compute: Callable[[], T]) -> T:
        from torch._dynamo import config  # noqa: PLC0415 - takes a second, and most trainings compile nothing
        from torch._inductor import config as inductor  # noqa: PLC0415 - as above

        if not self._made:
            mode = None if self._mode == "default" else self._mode
            self._made = [
                torch.compile(each, backend=self._backend, mode=mode) for each in self._eager
            ]
        limits = {"recompile_limit": self._most_graphs, "fail_on_recompile_limit_hit": True}
        self._on = True
        try:
            # One thread: more are processes, and they would outlive a worker that is killed.
            with config.patch(limits), inductor.patch({"compile_threads": 1}):
                if self._mode != "default":
                    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch has no types
                return compute()
        finally:
            self._on = False

    def _forward(self, place: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the unit's own
        if not self._on:
            return self._eager[place](*args, **kwargs)
        for each in (*args, *kwargs.values(), *(dropout.keys for dropout in self._dropouts)):
            if isinstance(each, Tensor) and each.dim():
                torch._dynamo.mark_dynamic(each, 0)
        return self._made[place](*args, **kwargs)

    def _reason(self, error: Exception) -> str | None:
        """Return why to go on without the compiler; `None`: the error is no fault of it."""
        found = classify(error)
        if isinstance(error, TrainingError) or found.kind is FailureKind.CONTEXT_CORRUPTED:
            return None
        if found.kind is not FailureKind.OTHER:
            self._failures += not self._graphs
            return (
                None
                if self._graphs or self._failures < _MOST_FAILURES
                else f"memory ran out: {found.text}"
            )
        if type(error).__name__ == _COMPILED_TOO_OFTEN:
            return (
                f"it was compiled more than {self._most_graphs} times, and would be in every step"
            )
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST]

    def _note(self, rows: int, seconds: float) -> None:
        graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if graphs != self._graphs:
            self._tell("compiled", seconds, rows=rows, graphs=graphs)
            self._graphs = graphs

    def _tell(self, name: str, seconds: float, **figures: object) -> None:
        self._news.append(
            (
                name,
                {"unit": self._unit, "mode": self._mode, "seconds": round(seconds, 3), **figures},
            )
        )


def _lack() -> str | None:
    """Return why the cap of a CPU device leaves no room for the compiler.

    `None`: it does, or there is no such cap.
    """
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    left_bytes = limit_bytes - psutil.Process().memory_info().data
    if limit_bytes == resource.RLIM_INFINITY or left_bytes >= _NEEDED_BYTES:
        return None
    left_mib, needed_mib = left_bytes // MIB, _NEEDED_BYTES // MIB
    return (
        f"the cap leaves {left_mib} MiB, and the compiler may take and keep {needed_mib} MiB "
        "of that on a CPU"
    )
