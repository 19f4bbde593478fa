"""How a function takes its arguments: where its batch size goes, and calls that must be refused.

Covers what can be known without calling. Every refusal names the function and what to write
instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: A method is recognised by the name of its first parameter; its batch size comes second.
_OWNERS = ("self", "cls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a function takes its arguments."""

    name: str
    owners: int = 0
    """1 for a method: what comes before the batch size."""
    size_name: str | None = None
    """The batch size's, if it can be given by name too."""
    others: tuple[str, ...] | None = None
    """The positional parameters after it; `None` if they are unknown or unbounded."""
    without_size: inspect.Signature | None = None

    def refuse_size_by_hand(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Refuse a call that brings its own batch size, by a `TypeError` with the call it should
        be.
        """
        given = len(args) - self.owners
        if self.size_name in kwargs:
            names = [f"{name}=…" for name in kwargs if name != self.size_name]
            what, call = f"was given {self.size_name}", [*("…" for _ in range(given)), *names]
        elif self.others is not None and given > len(self.others):
            what, call = (
                f"was given {given} arguments and has room for {len(self.others)}",
                [*self.others],
            )
        else:
            return
        raise TypeError(
            f"{self.name} {what}, but resilient itself puts the batch size in first; leave it out: "
            f"{self.name}({', '.join(call)})"
        )


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
        each
        for each in parameters
        if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}
    ]
    endless = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    owners = int(bool(positional) and positional[0].name in _OWNERS)
    if len(positional) <= owners:
        if endless:
            return Shape(name=name, owners=owners)
        example = ", ".join([*(each.name for each in positional), "batch_size"])
        raise TypeError(
            f"{name} takes no argument that could be its batch size, and resilient calls it with "
            "one; write "
            f"def {name.rpartition('.')[2]}({example})"
        )
    size = positional[owners]
    return Shape(
        name=name,
        owners=owners,
        size_name=size.name if size.kind is size.POSITIONAL_OR_KEYWORD else None,
        others=None if endless else tuple(each.name for each in positional[owners + 1 :]),
        without_size=signature.replace(
            parameters=[each for each in parameters if each is not size]
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
    for kind, found in (
        ("a coroutine function", inspect.iscoroutinefunction),
        ("a generator function", inspect.isgeneratorfunction),
        ("an asynchronous generator function", inspect.isasyncgenfunction),
    ):
        if found(function) or found(type(function).__call__):
            raise TypeError(
                f"{name_of(function)} is {kind}: its body runs after the call has returned, where "
                "resilient cannot see "
                f"it run out of memory; decorate the plain function that does one step of it"
            )


def name_of(function: object) -> str:
    """Return a function's name as its author knows it, without the functions it was defined in."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]
