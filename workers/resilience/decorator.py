"""`resilient`: calls a function with the largest batch size that fits in memory.

    @resilient(starting_batch_size=512)
    def train(batch_size, model): ...

    train(model)          # not train(512, model)

The calling convention and the first two arguments are those of accelerate's
`find_executable_batch_size`.

Contains the decorator, the types of its results, and the refusal of functions and calls; each
refusal names the function and the correct code. `attempts.py` has the course of a call. Caps no
memory, loads neither torch nor Ray, and supports every function that raises an out-of-memory of
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
class CallShape:
    """Where a function takes its batch size."""

    name: str
    owners: int = 0
    """Number of arguments before the batch size: 1 for a method."""
    with_size: inspect.Signature | None = None
    """The signature as defined; `None` if unknown."""
    without_size: inspect.Signature | None = None
    """The signature for callers."""

    def refuse_size_by_hand(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Raise a `TypeError` with the correct call if a call brings its own batch size. The
        function itself checks other calls: its decorators may remove or add arguments.
        """
        if self.with_size is None or self.without_size is None:
            return
        if _fits(self.without_size, args, kwargs) or not _fits(self.with_size, args, kwargs):
            return
        names = ", ".join([*self.without_size.parameters][self.owners :])
        raise TypeError(
            f"{self.name} was given a batch size, but resilient adds it as the first argument; "
            f"leave it out: {self.name}({names})"
        )


def _fits(
    signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> bool:
    """Whether a function accepts these arguments; others may be missing."""
    try:
        signature.bind_partial(*args, **kwargs)
    except TypeError:
        return False
    return True


def shape_of(function: Callable[..., object]) -> CallShape:
    """Find the parameter for the batch size.

    Raises:
        TypeError: There is none, or `function` is not callable, or its body does not run when it is
            called.
    """
    _refuse_what_cannot_be_repeated(function)
    name = name_of(function)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions of extension modules have no signature
        return CallShape(name=name)
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
            return CallShape(name=name, owners=owners)
        example = ", ".join([*(parameter.name for parameter in positional), "batch_size"])
        raise TypeError(
            f"{name} takes no argument that could be its batch size, and resilient calls it with "
            "one; write "
            f"def {name.rpartition('.')[2]}({example})"
        )
    size = positional[owners]
    return CallShape(
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
    """Return a function's name as its author knows it, without the enclosing functions."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
S_contra = TypeVar("S_contra", contravariant=True)
R = TypeVar("R")
S = TypeVar("S")


class Learning(Protocol):
    """The attributes of functions and methods after `resilient`."""

    batch_size: int | None
    """The size of the last success of any object; `None` before the first."""

    def reset(self) -> None:
        """Forget what all objects learned: the next call starts at `starting_batch_size`."""


class Resilient(Learning, Protocol[P, R_co]):
    """A function after `resilient`: called without its batch size."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function with a batch size and these arguments."""


class ResilientMethod(Learning, Protocol[S_contra, P, R_co]):
    """A method after `resilient`: each object learns separately."""

    def __call__(self, owner: S_contra, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the method of `owner` with a batch size and these arguments."""

    @overload
    def __get__(self, owner: None, kind: type, /) -> ResilientMethod[S_contra, P, R_co]: ...

    @overload
    def __get__(self, owner: S_contra, kind: type | None = None, /) -> Resilient[P, R_co]: ...


class ResilientOptions(TypedDict, total=False):
    """The named options of `resilient`, which documents them."""

    smallest_batch_size: int
    multiple_of: int
    failures_per_minute: int
    max_wait_s: float
    remember: bool | str
    on_retry: Callable[[Retry], None] | None


class Decorator(Protocol):
    """The type of `resilient`, also when it returns a decorator for a function."""

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
    """Call `function` with the largest batch size that fits in memory; see docs/resilient.md.

    Each call begins with the size that earlier calls allow. After an out-of-memory the memory is
    released and the function is called again from its beginning with a smaller size, so it must
    support being called twice. When memory is free again, later calls grow back. Other errors pass
    unchanged.

    Args:
        function: Takes the batch size as its first argument; a method, recognised by the name
            `self` or `cls` of its first parameter, as its second. Without it, a decorator is
            returned.
        starting_batch_size: The size of the first call, and the largest that is ever tried.
        smallest_batch_size: If this size fails, the call fails.
        multiple_of: Sizes are multiples of this, except the two above.
        failures_per_minute: Most failed attempts within any 60 s, over all calls; a call that needs
            more waits.
        max_wait_s: Seconds that one call waits in all, for that or for memory that others hold.
            Then it tries the smallest size once in any case.
        remember: Begin with the size that an earlier run learned, and store the size that this run
            learns, for this user, under the function's name and source, or under this text.
        on_retry: Called after each failed attempt, when the next one begins. An exception of it
            ends the call.

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
    states = _AttemptsByOwner(replace(rules, name=shape.name, workload=workload))

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
        # `inspect.signature` reads this.
        call.__signature__ = shape.without_size  # type: ignore[attr-defined]
    surface = cast("Resilient[..., R]", call)
    surface.batch_size = None
    # An attribute of a function: has the type of a method.
    surface.reset = reset  # type: ignore[method-assign]
    return surface


class _AttemptsByOwner:
    """The `Attempts` of a function, or of a method for each object: each has its own tensors.

    A function that was defined in the main script is sent to other processes by value, with all
    that it refers to. Learned sizes are not sent: they belong to this process, with its card and
    its other memory.
    """

    def __init__(self, rules: RetryRules) -> None:
        self._rules = rules
        self._lock = threading.Lock()
        self._shared = Attempts(rules)
        self._own: dict[int, tuple[weakref.ref[object], Attempts]] = {}

    def __reduce__(self) -> tuple[type[_AttemptsByOwner], tuple[RetryRules]]:
        return type(self), (self._rules,)

    def reset(self) -> None:
        """Forget everything learned."""
        with self._lock:
            for attempts in [self._shared, *(own for _, own in list(self._own.values()))]:
                attempts.reset()

    def of(self, *owner: object) -> Attempts:
        """Return the attempts of this object's method, or of the function if there is no object."""
        if not owner:
            return self._shared
        with self._lock:
            own, key = self._own, id(owner[0])
            if key not in own:
                try:
                    gone = weakref.ref(owner[0], lambda _: own.pop(key, None))
                except TypeError:  # a class with slots but without `__weakref__`
                    return self._shared
                own[key] = gone, Attempts(self._rules)
            return own[key][1]
