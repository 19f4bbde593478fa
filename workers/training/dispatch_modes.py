"""Dispatch modes that watch or change operators of torch: the base of all such modes, and those for
comparing parts. These note the results of operators, their random draws, and the numbers that a
loss compares; or they replace half precision by fp32, or change the last bits of products.

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
from workers.training.random_state import host_generator_state

#: Values without a static type in torch.
Operator: TypeAlias = Any
Returned: TypeAlias = Any

_COMPARISONS: Final = frozenset(getattr(torch.ops.aten, name) for name in ("gt", "ge", "lt", "le"))

_HALF: Final = frozenset({torch.bfloat16, torch.float16})

#: The precision of TF32, which cards use for fp32: ten fraction bits.
TF32_PRECISION: Final = 2.0**-10

#: Products of matrices, and layers of them. Their rounding depends on how many samples are computed
#: together.
_PRODUCTS: Final = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "convolution", "_cudnn_rnn")
)


class OperatorMode(TorchDispatchMode):
    """Calls `run` for each operator."""

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
        """Run an operator; subclasses may change its arguments or result."""
        return func(*args, **given)


class Widened(OperatorMode):
    """Makes operators compute in fp32 where `torch.autocast` asks for half precision, so that a
    comparison contains less rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.did = False
        """Whether any cast to half precision was left out."""

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


class LastBits(OperatorMode):  # type: ignore[no-untyped-call]  # as above
    """Changes the last bit of every other element of each matrix product, as another order of its
    sums might (Monte Carlo arithmetic; Parker, 1997). The effect on a result is its rounding.
    """

    def run(self, func: Operator, args: tuple[Any, ...], given: dict[str, Any]) -> Returned:
        """Run an operator; change the last bits of a product in place."""
        result = func(*args, **given)
        if func.overloadpacket in _PRODUCTS:
            product = result[0] if isinstance(result, tuple) else result
            is_dense = type(product) is Tensor and is_plain(product) and product.is_contiguous()
            if is_dense and (product.is_floating_point() or product.is_complex()):
                precision = _precision_of(func.overloadpacket, product)
                product.view(-1)[1::2].mul_(1 - precision)
        return result


def _precision_of(operator: Operator, product: Tensor) -> float:
    """Return the precision in which a product was computed: TF32 on a card that may use it."""
    backends: Any = torch.backends
    layers = {"convolution": backends.cudnn.conv, "_cudnn_rnn": backends.cudnn.rnn}
    of_card = layers.get(operator.__name__, backends.cuda.matmul)
    is_single = product.is_cuda and product.dtype == torch.float32
    if is_single and "tf32" in {of_card.fp32_precision, backends.fp32_precision}:
        return TF32_PRECISION
    return torch.finfo(product.dtype).eps


class Results(OperatorMode):  # type: ignore[no-untyped-call]  # as above
    """Calls `watch` with each tensor that an operator returns."""

    def __init__(self, watch: Callable[[Tensor], object]) -> None:
        super().__init__()
        self._watch = watch

    def run(self, func: Operator, args: tuple[Any, ...], given: dict[str, Any]) -> Returned:
        """Run an operator and pass its results to `watch`."""
        result = func(*args, **given)
        for each in tensors_in([result]):
            self._watch(each)
        return result


class Draws(OperatorMode):  # type: ignore[no-untyped-call]  # as above
    """Notes what operators draw at random. `constant`: gives all samples the same number."""

    def __init__(self, *, constant: bool) -> None:
        super().__init__()
        self._constant = constant
        self.shapes: list[object] = []
        """The shape of each draw, after the state of its generator if it has its own; at the end,
        what Python and NumPy have drawn.
        """

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # as above
        self.shapes.append(host_generator_state())

    def run(self, func: Operator, args: tuple[Any, ...], given: dict[str, Any]) -> Returned:
        """Run an operator, and note the shape of what it draws."""
        if (generator := given.get("generator")) is not None:
            self.shapes.append(generator.get_state().tolist())
        result = func(*args, **given)
        # A fused kernel (`_scaled_dot_product_...`, `_cudnn_rnn`) has the tag but may draw nothing.
        fused = func._schema.name.startswith(("aten::_", "aten::miopen"))
        if torch.Tag.nondeterministic_seeded in func.tags and not fused:
            for drawn in tensors_in([result]):
                self.shapes.append(drawn.shape)
                if self._constant:
                    drawn.fill_(0.5 if drawn.is_floating_point() else drawn.dtype == torch.bool)
        return result


class ComparedNumbers(OperatorMode):  # type: ignore[no-untyped-call]  # as above
    """Notes the single real numbers that operators compare with others; and those with a gradient
    that `item()` returns to Python, which may compare them there.
    """

    #: Factors that change a number to see whether another value would decide otherwise. A number
    #: that Python gets may be kept there, so its factor is small.
    _COMPARED: Final = 10.0
    _HANDED_OUT: Final = 2.0

    def __init__(
        self, others: Sequence[float] = (), near: float = 0.0, way: int = 0, rows: int = 1
    ) -> None:
        """Divide (`way` -1) or multiply (1) numbers that are none of `others`. A number without a
        gradient, such as a count, changes by at most `rows`, the factor between batch and sample.
        """
        super().__init__()
        self._others, self._near, self._way, self._rows = others, near, way, rows
        self._values = dict[int, Tensor]()
        """Numbers with a gradient, by the memory address that their detached copies share."""
        self.numbers: list[float] = []

    def run(self, func: Operator, args: tuple[Any, ...], given: dict[str, Any]) -> Returned:
        """Note the numbers of an operator, and change them."""
        if func.overloadpacket in _COMPARISONS:
            first, second = (self._noted(each, self._COMPARED) for each in args)
            args = first, (second if first is args[0] else args[1])  # change only one
        elif func is torch.ops.aten.detach.default:
            if _is_single(args[0]) and args[0].requires_grad:
                self._values[args[0].data_ptr()] = args[0]
        elif (
            func is torch.ops.aten._local_scalar_dense.default
            and _is_single(args[0])
            and (args[0].requires_grad or args[0].data_ptr() in self._values)
        ):
            args = (self._noted(args[0], self._HANDED_OUT),)
        return func(*args, **given)

    def _noted(self, number: Any, factor: float) -> Any:  # noqa: ANN401 - of an operator
        if not _is_single(number) or not math.isfinite(value := number.item()):
            return number
        self.numbers.append(value)
        if not self._way or not is_new(value, self._others, self._near):
            return number
        factor = factor if number.requires_grad else min(factor, self._rows)
        return number * factor if self._way > 0 else number / factor


def _is_single(number: object) -> bool:
    """Whether a value is one real number with a value, unlike the tensors of a plan or compiler."""
    return (
        isinstance(number, Tensor)
        and type(number) in {Tensor, torch.nn.Parameter}
        and is_plain(number)
        and number.numel() == 1
        and number.is_floating_point()
    )


def is_new(value: float, others: Sequence[float], near: float) -> bool:
    """Whether a number differs from all of `others`, in ascending order, by more than rounding."""
    at = bisect(others, value)
    beside = others[max(0, at - 1) : at + 1]
    return not any(math.isclose(value, each, rel_tol=near, abs_tol=1e-12) for each in beside)
