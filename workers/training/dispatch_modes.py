"""What operators do: the base of all modes that watch them, and those for the time in which parts
are compared (what operators return, what they draw at random, in which precision they compute).

Compares nothing (`parts.py` does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workers.training.batches import tensors_in
from workers.training.random_state import drawn_on_host

#: Of torch, which has no types for them.
Operator: TypeAlias = Any
Returned: TypeAlias = Any

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
