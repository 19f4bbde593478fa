"""The tensors of a training on their way to another member: its state, its sums of gradients, and
what both call each other for where they divide a model (`layers`).

Tensors travel as their own bytes in the order of their elements, whatever their layout or device;
JSON describes what is around them. They wait in host memory that no cap counts.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from workers.team.wire import CHUNK_BYTES, PING_EVERY_S, Connection, Kind, LostError
from workers.training.batches import tensors_in
from workers.training.errors import TaskError
from workers.training.host_memory import like_all, wait_asleep
from workers.training.trainer import Trainer

#: Numbers that are added up at once on a CPU, where that takes a copy of twice the bytes.
_ADDED: Final = 1 << 20
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK: Final = (1 << 63) - 1


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a number that differs where a bit of the tensors does, but for rare chances; equal on
    every device. Waits for the device once.
    """
    sums = []
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            whole = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
            size = _ADDED if tensor.device.type == "cpu" else whole.numel()
            parts = [part.sum(dtype=torch.int64) for part in torch.split(whole, size)]
            sums.append(torch.stack(parts).sum() * (2 * place + 1))
    if not sums:
        return 0
    total = torch.stack(sums).sum()
    wait_asleep(total.device)
    return int(total) & _MASK


def split_weights(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights that are trained, and those that always stay as they are."""
    trained = {weight.data_ptr() for weight in trainer.parameters}
    weights = trainer.model.state_dict()
    return (
        {name: each for name, each in weights.items() if each.data_ptr() in trained},
        {name: each for name, each in weights.items() if each.data_ptr() not in trained},
    )


def load(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Go on from the state of another member, which may lack the weights that are not trained."""
    weights = {**trainer.model.state_dict(), **state["weights"]}
    trainer.load({**state, "weights": weights})


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of some rows, and what belongs to them."""

    unit: int
    """Its place among all that are added up."""
    flat: Tensor
    """Those of all gradients, on the host; empty where another member has them."""
    rows: int
    loss: float
    used: list[bool]
    """For each parameter whether it has a gradient."""


class OwnSums:
    """The sums that this member has to offer, by their places among all. Memory is used again."""

    def __init__(self, trainer: Trainer) -> None:
        """Allocate what the total needs."""
        self._trainer, self._on_card = trainer, trainer.device.type == "cuda"
        self.total = self._new()
        """Of all members."""
        self._buffers: dict[int, Tensor] = {}
        self.units: dict[int, Sums] = {}

    def clear(self) -> None:
        """Forget them: another step begins."""
        self.units = {}

    def take(self, unit: int, *, in_total: bool = False) -> None:
        """Copy the present sums of the training; `in_total`: to where the total will be, whose
        chunks come after the own ones were sent.
        """
        if not in_total and unit not in self._buffers:
            self._buffers[unit] = self._new()
        flat = self.total if in_total else self._buffers[unit]
        loss, used = self._trainer.sums.read(flat)
        self.units[unit] = Sums(unit, flat, self._trainer.done_rows, loss, used)

    @property
    def in_order(self) -> list[Sums]:
        """The sums by their places."""
        return [self.units[unit] for unit in sorted(self.units)]

    def said(self) -> list[list[Any]]:
        """Describe them for another member."""
        return [[each.unit, each.rows, each.loss, each.used] for each in self.in_order]

    def _new(self) -> Tensor:
        return like_all([self._trainer.sums.flat], pinned=self._on_card)[0]


def pieces(flat: Tensor) -> Iterator[Tensor]:
    """Yield a flat tensor in pieces of one chunk."""
    yield from torch.split(flat, CHUNK_BYTES // flat.element_size())


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the host without gaps; it must outlive them. No NumPy."""
    if not tensor.nbytes:
        return memoryview(b"")
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B")


def described(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as JSON can hold it, with the form of each tensor in its place.

    Raises:
        TaskError: It holds something else than tensors, numbers, texts, lists and mappings.
    """
    forms = [[str(each.dtype)[6:], list(each.shape)] for each in tensors_in(state)]
    return {"forms": forms, "tree": _plain(state)}


def send(connection: Connection, state: Mapping[str, Any] | Tensor) -> None:
    """Send the tensors of a state, or one tensor.

    Raises:
        LostError: They do not arrive.
    """
    for tensor in tensors_in(state):
        for piece in pieces(tensor.detach().cpu().contiguous().view(-1)):
            connection.send(Kind.CHUNK, 0, bytes_of(piece))


def receive(connection: Connection, said: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a state
    """Return a state that was `described`, with the tensors that follow.

    Raises:
        LostError: They do not come, or it is no state.
    """
    try:
        layouts = [
            torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for dtype, shape in said["forms"]
        ]
        tensors = like_all(layouts)
        state = _made(said["tree"], iter(tensors))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise LostError(f"it sent no state: {error}") from error
    for tensor in tensors:
        for piece in pieces(tensor.view(-1)):
            connection.into(bytes_of(piece), connection.frame())
    return state


def _plain(tree: Any) -> Any:  # noqa: ANN401 - any state
    if isinstance(tree, Tensor):
        return {"tensor": 0}
    if isinstance(tree, Mapping):  # whose keys may be numbers
        return {"map": [[key, _plain(value)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [_plain(value) for value in tree]}
    if isinstance(tree, str | int | float | bool | None):
        return tree
    raise TaskError(
        f"this training cannot be shared by a team: its state holds a {type(tree).__name__}, which "
        "cannot be sent to the others; keep tensors, numbers, texts, lists and mappings in it"
    )


def _made(tree: Any, tensors: Iterator[Tensor]) -> Any:  # noqa: ANN401 - any state
    if not isinstance(tree, dict):
        return tree
    ((kind, inner),) = tree.items()
    if kind == "tensor":
        return next(tensors)
    if kind == "map":
        return {key: _made(value, tensors) for key, value in inner}
    values = [_made(value, tensors) for value in inner]
    return tuple(values) if kind == "tuple" else values


class Call(NamedTuple):
    """What one process asks of the other, or its answer."""

    name: str
    content: Mapping[str, Any]


class Link:
    """A connection between two processes that divide a model. Each end may call at any time; a
    thread of its own reads, so that neither end waits for the other to send.
    """

    def __init__(self, connection: Connection, is_attended: Callable[[], bool]) -> None:
        """`is_attended`: whether the computing thread is there; without it the link ends, so that
        the other member waits for no answer.
        """
        self._connection, self._is_attended = connection, is_attended
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.lost: str | None = None
        """Why it is no more."""
        for target in (self._read, self._ping):
            threading.Thread(target=target, name="team-link", daemon=True).start()

    def call(self, name: str, **content: Any) -> None:  # noqa: ANN401 - tensors and plain values
        """Send a call.

        Raises:
            LostError: The other end is gone.
            TaskError: The content cannot be sent.
        """
        self._connection.tell(Kind.CALL, 0, call=name, **described(content))
        send(self._connection, content)

    def take(self, seconds: float | None = None) -> Call | None:
        """Return the next call of the other end; `None`: none came in time.

        Raises:
            LostError: The other end is gone.
        """
        try:
            call = self._calls.get(timeout=seconds)
        except queue.Empty:
            return None
        if call is None:
            self._calls.put(None)
            raise LostError(self.lost or "the connection is closed")
        return call

    def close(self) -> None:
        """Wake up both threads, and have them end."""
        self._connection.close()

    def _read(self) -> None:
        connection = self._connection
        try:
            while True:
                said = connection.frame().said
                if (reason := said.get("reason")) is not None:
                    self.lost = f"the leader refuses: {reason}"
                    return
                self._calls.put(Call(said["call"], receive(connection, said)))
        except (LostError, LookupError, TypeError, ValueError) as error:
            self.lost = str(error)
        finally:
            self.lost = self.lost or "it could not be read"
            self._calls.put(None)
            connection.release()

    def _ping(self) -> None:
        while self.lost is None:
            try:
                if not self._is_attended():
                    self._connection.close("it computes nothing: it is held, or has no memory")
                self._connection.ping()
            except LostError:
                return  # which the other thread is told as well
            time.sleep(PING_EVERY_S)
