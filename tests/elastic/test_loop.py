"""The loop: what it asks and tells in which order, and what it takes for an out-of-memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from workers.elastic.loop import Loop
from workers.oom import Failure
from workers.settings import FailureKind
from workers.testing import injected_error

HELD_BYTES = 7


class Scene:
    """All that surrounds a loop. Offers sizes from a list, and keeps a log."""

    reason = ""

    def __init__(self, *offered: int) -> None:
        self.offered = list(offered)
        self.log: list[Any] = []
        self.witness: weakref.ref[Tensor] | None = None
        self.loop: Loop[int] = Loop(self, self, Around(self))

    def next(self, allowed_bytes: int | None) -> int:
        return self.offered.pop(0)

    def succeeded(self, size: int, peak_bytes: int | None, is_partial: bool) -> None:
        self.log.append(("succeeded", size, peak_bytes, is_partial))

    def failed(self, size: int, at_least_bytes: int | None) -> None:
        self.log.append(("failed", size, at_least_bytes))

    def allowed_bytes(self) -> int:
        return 100

    def measured(self, part: Callable[[], Any]) -> Any:
        return part()

    def peak_bytes(self) -> int:
        return 5

    def failed_bytes(self, failure: Failure) -> int:
        assert failure.kind in {FailureKind.DEFINITE, FailureKind.PROBABLE}
        return HELD_BYTES

    def release(self) -> None:
        self.log.append(("release", self.witness is not None and self.witness() is not None))


class Around:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def begins(self, size: int) -> None:
        self.scene.log.append(("begins", size))

    def ended(self, size: int) -> None:
        self.scene.log.append(("ended", size))

    def ran_out(self, size: int, failure: Failure, at_least_bytes: int | None) -> None:
        self.scene.log.append(("ran out", size, at_least_bytes))

    def starved(self, reason: str) -> None:
        raise AssertionError("a size was offered")


class Tensor:
    """What a failed part holds."""


def raised(error: Exception) -> int:
    raise error


def fits(most: int, scene: Scene) -> Callable[[int], int]:
    def part(size: int) -> int:
        local = Tensor()
        scene.witness = weakref.ref(local)
        if size > most:
            raise injected_error(FailureKind.DEFINITE)
        return size

    return part


def test_it_gives_back_outside_the_handler_and_tries_what_is_offered_next() -> None:
    scene = Scene(8, 4)
    gc.disable()
    try:
        assert scene.loop.run(fits(4, scene)) == 4
    finally:
        gc.enable()
    assert scene.log == [
        ("begins", 8),
        ("release", False),
        ("failed", 8, HELD_BYTES),
        ("ran out", 8, HELD_BYTES),
        ("begins", 4),
        ("succeeded", 4, 5, False),
        ("ended", 4),
    ]


@pytest.mark.parametrize(("kinds", "believed"), [("pp", True), ("ppp", False), ("ppdp", True)])
def test_a_probable_out_of_memory_is_believed_twice(kinds: str, believed: bool) -> None:
    of = {"p": FailureKind.PROBABLE, "d": FailureKind.DEFINITE}
    errors = [injected_error(of[kind]) for kind in kinds]
    with nullcontext() if believed else pytest.raises(RuntimeError, match="CUBLAS"):
        Scene(5, 4, 3, 2, 1).loop.run(lambda _size: raised(errors.pop(0)) if errors else 0)
    assert errors == []


def test_a_part_with_less_to_do_says_so_for_itself_alone() -> None:
    scene = Scene(8, 8)
    scene.loop.run(lambda _size: scene.loop.was_partial())
    scene.loop.run(lambda size: size)
    assert [each[-1] for each in scene.log if each[0] == "succeeded"] == [True, False]
