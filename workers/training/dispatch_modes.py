"""What operators do: the base of all modes that watch them, and those for the time in which parts
are compared (what operators return, what they draw at random, in which precision they compute, and
by which numbers a loss decides).

Compares nothing (`parts.py` does).
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workers.training.batches import is_plain, tensors_in
from workers.training.random_state import drawn_on_host

#: Of torch, which has no types for them.
Operator: TypeAlias = Any
Returned: TypeAlias = Any

_COMPARISONS: Final = frozenset(getattr(torch.ops.aten, name) for name in ("gt", "ge", "lt", "le"))

_HALF: Final = frozenset({torch.bfloat16, torch.float16})


class OperatorMode(TorchDispatchMode):
    """Sees each operator, in `run`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # missing in torch's stubs

    def __torch_dispatch__(
        self,
        func: Operator,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Returned:
        return self.run(func, args, dict(kwargs or {}))

    def run(self, func: Operator, args: tuple[Any, ...], given: dict[str, Any]) -> Returned:
        """Return what an operator returns; here as it is."""
        return func(*args, **given)


class Widened(OperatorMode):
    """Has operators compute in fp32 where `torch.autocast` asks for half precision, so that a
    comparison sees less rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.did = False
        """Whether anything was left in fp32."""

    def __enter__(self) -> Widened:
        torch.clear_autocast_cache()  # weights in half precision
        super().__enter__()  # type: ignore[no-untyped-call]  # missing in torch's stubs
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # as above
        torch.clear_autocast_cache()  # weights in fp32

    def run(self, func: Operator, args: tuple[Any, ...], given: dict[str, Any]) -> Returned:
        """Leave out a cast from fp32 to half precision."""
        if (
            func is torch.ops.aten._to_copy.default
            and given.get("dtype") in _HALF
            and args[0].dtype == torch.float32
        ):
            given["dtype"], self.did = torch.float32, True
        return func(*args, **given)


class Results(OperatorMode):  # type: ignore[no-untyped-call]  # as above
    """Has `look` see what operators return."""

    def __init__(self, look: Callable[[Tensor], object]) -> None:
        super().__init__()
        self._look = look

    def run(self, func: Operator, args: tuple[Any, ...], given: dict[str, Any]) -> Returned:
        """Show each tensor that an operator returns."""
        result = func(*args, **given)
        for each in tensors_in([result]):
            self._look(each)
        return result


class Draws(OperatorMode):  # type: ignore[no-untyped-call]  # as above
    """Sees what operators draw at random; `constant`: has all samples get the same."""

    def __init__(self, *, constant: bool) -> None:
        super().__init__()
        self._constant = constant
        self.shapes: list[object] = []
        """The shape of each draw, and before it the state of a generator of its own; at the end
        what Python and NumPy have drawn.
        """

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # as above
        self.shapes.append(drawn_on_host())

    def run(self, func: Operator, args: tuple[Any, ...], given: dict[str, Any]) -> Returned:
        """Take note of the shape of what is drawn."""
        if (generator := given.get("generator")) is not None:
            self.shapes.append(generator.get_state().tolist())
        result = func(*args, **given)
        # A fused kernel (`_scaled_dot_product_...`, `_cudnn_rnn`) has the tag and may draw nothing.
        fused = func._schema.name.startswith(("aten::_", "aten::miopen"))
        if torch.Tag.nondeterministic_seeded in func.tags and not fused:
            for drawn in tensors_in([result]):
                self.shapes.append(drawn.shape)
                if self._constant:
                    drawn.fill_(0.5 if drawn.is_floating_point() else drawn.dtype == torch.bool)
        return result


class Deciding(OperatorMode):  # type: ignore[no-untyped-call]  # as above
    """Sees the single real numbers that are compared with others; and those of a gradient that
    `item()` hands to Python, which may compare them there.
    """

    #: By what a number is divided or multiplied to see whether another one would decide otherwise.
    #: One that Python gets may also be kept there, so it stays near.
    _COMPARED: Final = 10.0
    _HANDED_OUT: Final = 2.0

    def __init__(
        self, others: Sequence[float] = (), near: float = 0.0, way: int = 0, rows: int = 1
    ) -> None:
        """Have numbers that are none of `others` smaller (`way` is -1) or larger (1): one of no
        gradient, such as a count, as much as in a part of one of so many rows.
        """
        super().__init__()
        self._others, self._near, self._way, self._rows = others, near, way, rows
        self._values = dict[int, Tensor]()
        """Those of a gradient that were detached from it, which are at the same place."""
        self.numbers: list[float] = []

    def run(self, func: Operator, args: tuple[Any, ...], given: dict[str, Any]) -> Returned:
        """Take note of numbers, and change them."""
        if func.overloadpacket in _COMPARISONS:
            first, second = (self._seen(each, self._COMPARED) for each in args)
            args = first, (second if first is args[0] else args[1])  # not both by one factor
        elif func is torch.ops.aten.detach.default:
            if _is_single(args[0]) and args[0].requires_grad:
                self._values[args[0].data_ptr()] = args[0]
        elif (
            func is torch.ops.aten._local_scalar_dense.default
            and _is_single(args[0])
            and (args[0].requires_grad or args[0].data_ptr() in self._values)
        ):
            args = (self._seen(args[0], self._HANDED_OUT),)
        return func(*args, **given)

    def _seen(self, number: Any, factor: float) -> Any:  # noqa: ANN401 - of an operator
        if not _is_single(number) or not math.isfinite(value := number.item()):
            return number
        self.numbers.append(value)
        if not self._way or not is_new(value, self._others, self._near):
            return number
        factor = factor if number.requires_grad else min(factor, self._rows)
        return number * factor if self._way > 0 else number / factor


def _is_single(number: object) -> bool:
    """Whether it is one real number; of a plan or a compiler a tensor may have none."""
    return (
        isinstance(number, Tensor)
        and type(number) in {Tensor, torch.nn.Parameter}
        and is_plain(number)
        and number.numel() == 1
        and number.is_floating_point()
    )


def is_new(value: float, others: Sequence[float], near: float) -> bool:
    """Whether a number is none of some others, which are in their order, but for rounding."""
    at = bisect(others, value)
    beside = others[max(0, at - 1) : at + 1]
    return not any(math.isclose(value, each, rel_tol=near, abs_tol=1e-12) for each in beside)
