"""`resilient`: a function that takes a batch size first is called with the largest that fits in
memory.

    @resilient(starting_batch_size=512)
    def train(batch_size, model): ...

    train(model)          # not train(512, model)

The calling convention is that of accelerate's `find_executable_batch_size`, and so are the first
two arguments.

Covers the decorator, the types of what it returns, and which functions and calls it refuses: every
refusal names the function and what to write instead. The course of a call is in `attempts.py`. Caps
no memory, loads neither torch nor Ray, and works for every function that raises an out-of-memory of
Python or torch.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, cast, overload

from workers.learned_limits import workload_fingerprint
from workers.resilience.attempts import Attempts, Retry, RetryRules

#: A method is recognised by the name of its first parameter; its batch size comes second.
_OWNERS = ("self", "cls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a function takes its arguments."""

    name: str
    owners: int = 0
    """1 for a method: what comes before the batch size."""
    with_size: inspect.Signature | None = None
    """As it is defined; `None` if that is not known."""
    without_size: inspect.Signature | None = None
    """As it is called."""

    def refuse_size_by_hand(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Refuse a call that brings its own batch size, by a `TypeError` with the call it should
        be. Of any other the function itself says whether it fits: what decorates it may take or
        add arguments.
        """
        if self.with_size is None or self.without_size is None:
            return
        if _fits(self.without_size, args, kwargs) or not _fits(self.with_size, args, kwargs):
            return
        names = ", ".join([*self.without_size.parameters][self.owners :])
        raise TypeError(
            f"{self.name} was given a batch size, but resilient itself puts it in first; leave it "
            f"out: {self.name}({names})"
        )


def _fits(
    signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> bool:
    """Whether a function can be called so, as far as these arguments go."""
    try:
        signature.bind_partial(*args, **kwargs)
    except TypeError:
        return False
    return True


def shape_of(function: Callable[..., object]) -> Shape:
    """Find out where the batch size goes.

    Raises:
        TypeError: There is no room for one, or `function` is none, or one whose body does not run
            when it is called.
    """
    _refuse_what_cannot_be_repeated(function)
    name = name_of(function)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of extension modules have no signature
        return Shape(name=name)
    parameters = list(signature.parameters.values())
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
    ]
    endless = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    owners = int(bool(positional) and positional[0].name in _OWNERS)
    if len(positional) <= owners:
        if endless:
            return Shape(name=name, owners=owners)
        example = ", ".join([*(parameter.name for parameter in positional), "batch_size"])
        raise TypeError(
            f"{name} takes no argument that could be its batch size, and resilient calls it with "
            "one; write "
            f"def {name.rpartition('.')[2]}({example})"
        )
    size = positional[owners]
    return Shape(
        name=name,
        owners=owners,
        with_size=signature,
        without_size=signature.replace(
            parameters=[parameter for parameter in parameters if parameter is not size]
        ),
    )


def _refuse_what_cannot_be_repeated(function: object) -> None:
    if isinstance(function, staticmethod | classmethod):
        kind = type(function).__name__
        raise TypeError(f"resilient needs the function itself: put @{kind} above @resilient")
    if not callable(function):
        raise TypeError(
            f"resilient takes the function first, not {function!r}; options have names: "
            f"@resilient(starting_batch_size=512)"
        )
    kinds = (
        inspect.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
    )
    if any(is_kind(function) or is_kind(type(function).__call__) for is_kind in kinds):
        raise TypeError(
            f"{name_of(function)} is a coroutine or a generator function: its body runs after the "
            "call has returned, where resilient cannot see it run out of memory; decorate the "
            "plain function that does one step of it"
        )


def name_of(function: object) -> str:
    """Return a function's name as its author knows it, without the functions it was defined in."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
S_contra = TypeVar("S_contra", contravariant=True)
R = TypeVar("R")
S = TypeVar("S")


class Learning(Protocol):
    """What functions and methods have in common after `resilient`."""

    batch_size: int | None
    """The size of the last success, of any object; `None` before the first."""

    def reset(self) -> None:
        """Forget what was learned of all objects: the next call starts at `starting_batch_size`."""


class Resilient(Learning, Protocol[P, R_co]):
    """What `resilient` makes of a function: the same one, called without its batch size."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function with a batch size and these arguments."""


class ResilientMethod(Learning, Protocol[S_contra, P, R_co]):
    """What `resilient` makes of a method: each object learns for itself."""

    def __call__(self, owner: S_contra, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the method of `owner` with a batch size and these arguments."""

    @overload
    def __get__(self, owner: None, kind: type, /) -> ResilientMethod[S_contra, P, R_co]: ...

    @overload
    def __get__(self, owner: S_contra, kind: type | None = None, /) -> Resilient[P, R_co]: ...


class ResilientOptions(TypedDict, total=False):
    """The named options of `resilient`; what they mean is told there."""

    smallest_batch_size: int
    multiple_of: int
    failures_per_minute: int
    max_wait_s: float
    remember: bool | str
    on_retry: Callable[[Retry], None] | None


class Decorator(Protocol):
    """The types of `resilient`, and of what it returns for a function that is still to come."""

    @overload
    def __call__(
        self,
        function: None = None,
        starting_batch_size: int = 128,
        **options: Unpack[ResilientOptions],
    ) -> Decorator: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a first argument that is a number is no owner
        self,
        function: Callable[Concatenate[int, P], R],
        starting_batch_size: int = 128,
        **options: Unpack[ResilientOptions],
    ) -> Resilient[P, R]: ...

    @overload
    def __call__(
        self,
        function: Callable[Concatenate[S, int, P], R],
        starting_batch_size: int = 128,
        **options: Unpack[ResilientOptions],
    ) -> ResilientMethod[S, P, R]: ...


def _as_decorator(function: Callable[..., object]) -> Decorator:
    return cast("Decorator", function)


@_as_decorator
def resilient(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    *,
    smallest_batch_size: int = 1,
    multiple_of: int = 1,
    failures_per_minute: int = 6,
    max_wait_s: float = 120.0,
    remember: bool | str = False,
    on_retry: Callable[[Retry], None] | None = None,
) -> object:
    """Call `function` with the largest batch size that fits in memory; docs/resilient.md says more.

    Each call begins with the size that experience allows. After an out-of-memory everything is
    given back and the function is called again, smaller, from its beginning, so it must bear being
    called twice. Once memory is there again, later calls grow back. All other errors pass
    unchanged.

    Args:
        function: Takes the batch size as its first argument; a method, known by the name `self` or
        `cls` of its first
            parameter, as its second. Left out, a decorator is returned.
        starting_batch_size: The largest that is ever tried, and where the first call begins.
        smallest_batch_size: If this one fails, so does the call.
        multiple_of: Sizes are multiples of this, apart from the two above.
        failures_per_minute: Never more failed attempts within any 60 s, over all calls; a call that
        has to go on waits.
        max_wait_s: How long one call waits in all, for that or for memory that others hold. When it
        is over, the
            smallest size is tried once in any case.
        remember: Begin with what an earlier run learned, and keep what this one learns, in this
        user's store, under the
            function's name and source, or under this text.
        on_retry: Called for each failed attempt, when the next one begins. What it raises ends the
        call.

    Returns:
        The function without its batch size, with `batch_size` and `reset()`; see `Resilient`.

    Raises:
        TypeError: `function` cannot be called like this: it takes no argument, is a coroutine
            function or a generator function, or a `staticmethod` or `classmethod` object (put
            `resilient` below those). Or a batch size is no whole number.
        ValueError: The options leave no size to try.
    """
    rules = RetryRules(
        name="resilient" if function is None else name_of(function),
        starting_batch_size=starting_batch_size,
        smallest_batch_size=smallest_batch_size,
        multiple_of=multiple_of,
        failures_per_minute=failures_per_minute,
        max_wait_s=max_wait_s,
        on_retry=on_retry,
    )
    if function is None:
        return functools.partial(_wrapped, rules=rules, remember=remember)
    return _wrapped(function, rules, remember)


def _wrapped(
    function: Callable[..., R], rules: RetryRules, remember: bool | str
) -> Resilient[..., R]:
    shape = shape_of(function)
    workload = workload_fingerprint(function) if remember is True else remember or None
    states = _States(replace(rules, name=shape.name, workload=workload))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> R:  # noqa: ANN401 - whatever the function takes
        shape.refuse_size_by_hand(args, kwargs)
        owner, rest = args[: shape.owners], args[shape.owners :]
        attempts = states.of(*owner)
        result = attempts.run(lambda size: function(*owner, size, *rest, **kwargs))
        surface.batch_size = attempts.batch_size
        return result

    def reset() -> None:
        states.reset()
        surface.batch_size = None

    if shape.without_size is not None:
        # What `inspect.signature` looks for.
        call.__signature__ = shape.without_size  # type: ignore[attr-defined]
    surface = cast("Resilient[..., R]", call)
    surface.batch_size = None
    # A function's attribute: typed as what it acts like.
    surface.reset = reset  # type: ignore[method-assign]
    return surface


class _States:
    """What is known of a function; of a method, for each object by itself: each has tensors of its
    own.

    A function that was defined in the main script travels to other processes by value, with all it
    refers to; what was learned does not, because it is of this process: its card and what else it
    holds there.
    """

    def __init__(self, rules: RetryRules) -> None:
        self._rules = rules
        self._lock = threading.Lock()
        self._shared = Attempts(rules)
        self._own: dict[int, tuple[weakref.ref[object], Attempts]] = {}

    def __reduce__(self) -> tuple[type[_States], tuple[RetryRules]]:
        return type(self), (self._rules,)

    def reset(self) -> None:
        """Forget all."""
        with self._lock:
            for attempts in [self._shared, *(own for _, own in list(self._own.values()))]:
                attempts.reset()

    def of(self, *owner: object) -> Attempts:
        """Return what is known of the method of this object, or of the function that has none."""
        if not owner:
            return self._shared
        with self._lock:
            own, key = self._own, id(owner[0])
            if key not in own:
                try:
                    gone = weakref.ref(owner[0], lambda _: own.pop(key, None))
                except TypeError:  # its class has slots and none for this
                    return self._shared
                own[key] = gone, Attempts(self._rules)
            return own[key][1]
