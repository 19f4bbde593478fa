"""The tensors of a training on their way to another member: its state, its sums of gradients, and
the calls of two members that divide a model (`layers`).

A tensor is sent as the bytes of its elements in order, whatever its layout or device; JSON
describes the containers around it. Received tensors lie in host memory that no cap counts.
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

#: Elements that a CPU sums at once: summing makes a copy of twice their bytes.
_SUMMED_AT_ONCE: Final = 1 << 20
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MASK: Final = (1 << 63) - 1


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a number that differs if any bit of the tensors does, except by rare chance; it is
    equal on every device. Waits for the device once.
    """
    sums = []
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            whole = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
            size = _SUMMED_AT_ONCE if tensor.device.type == "cpu" else whole.numel()
            parts = [part.sum(dtype=torch.int64) for part in torch.split(whole, size)]
            sums.append(torch.stack(parts).sum() * (2 * place + 1))
    if not sums:
        return 0
    total = torch.stack(sums).sum()
    wait_asleep(total.device)
    return int(total) & _MASK


def split_weights(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the trained weights, and the weights that never change."""
    trained = {weight.data_ptr() for weight in trainer.parameters}
    weights = trainer.model.state_dict()
    return (
        {name: each for name, each in weights.items() if each.data_ptr() in trained},
        {name: each for name, each in weights.items() if each.data_ptr() not in trained},
    )


def load(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Load the state of another member, which may lack the weights that are not trained."""
    weights = {**trainer.model.state_dict(), **state["weights"]}
    trainer.load({**state, "weights": weights})


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of gradients of some rows, and what belongs to them."""

    unit: int
    """Position in the order in which the leader adds sums up."""
    flat: Tensor
    """The sums of all gradients, on the host; empty if another member has them."""
    rows: int
    loss: float
    used: list[bool]
    """Whether each parameter has a gradient."""


class OwnSums:
    """The sums of this member, by unit, in buffers that are used again."""

    def __init__(self, trainer: Trainer) -> None:
        """Allocate the buffer of the total."""
        self._trainer, self._on_card = trainer, trainer.device.type == "cuda"
        self.total = self._new()
        """The sums of all members."""
        self._buffers: dict[int, Tensor] = {}
        self.units: dict[int, Sums] = {}

    def clear(self) -> None:
        """Forget all sums, because another step begins."""
        self.units = {}

    def take(self, unit: int, *, in_total: bool = False) -> None:
        """Copy the present sums of the training. `in_total`: into `total`, which is received only
        after these were sent.
        """
        if not in_total and unit not in self._buffers:
            self._buffers[unit] = self._new()
        flat = self.total if in_total else self._buffers[unit]
        loss, used = self._trainer.sums.read(flat)
        self.units[unit] = Sums(unit, flat, self._trainer.done_rows, loss, used)

    @property
    def in_order(self) -> list[Sums]:
        """The sums in the order of their units."""
        return [self.units[unit] for unit in sorted(self.units)]

    def describe(self) -> list[list[Any]]:
        """Return unit, rows, loss and used parameters of each, for another member."""
        return [[each.unit, each.rows, each.loss, each.used] for each in self.in_order]

    def _new(self) -> Tensor:
        return like_all([self._trainer.sums.flat], pinned=self._on_card)[0]


def pieces(flat: Tensor) -> Iterator[Tensor]:
    """Yield a flat tensor in pieces of one chunk."""
    yield from torch.split(flat, CHUNK_BYTES // flat.element_size())


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous host tensor, which must outlive them. Without NumPy."""
    if not tensor.nbytes:
        return memoryview(b"")
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B")


def describe(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as JSON can hold it, with dtype and shape of each tensor in its place.

    Raises:
        TaskError: The state holds something else than tensors, numbers, texts, lists and mappings.
    """
    forms = [[str(each.dtype)[6:], list(each.shape)] for each in tensors_in(state)]
    return {"forms": forms, "tree": _as_json(state)}


def send(connection: Connection, state: Mapping[str, Any] | Tensor) -> None:
    """Send the tensors of a state, or one tensor.

    Raises:
        LostError: The connection is lost.
    """
    for tensor in tensors_in(state):
        for piece in pieces(tensor.detach().cpu().contiguous().view(-1)):
            connection.send(Kind.CHUNK, 0, bytes_of(piece))


def receive(connection: Connection, message: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a state
    """Return the state that `describe` described, with the tensors that follow.

    Raises:
        LostError: The connection is lost, or the description is none of a state.
    """
    try:
        layouts = [
            torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for dtype, shape in message["forms"]
        ]
        tensors = like_all(layouts)
        state = _from_json(message["tree"], iter(tensors))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise LostError(f"it sent no state: {error}") from error
    for tensor in tensors:
        for piece in pieces(tensor.view(-1)):
            connection.receive_chunk(bytes_of(piece), connection.next_frame())
    return state


def _as_json(tree: Any) -> Any:  # noqa: ANN401 - any state
    if isinstance(tree, Tensor):
        return {"tensor": 0}
    if isinstance(tree, Mapping):  # as a list: its keys may be numbers
        return {"map": [[key, _as_json(value)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [_as_json(value) for value in tree]}
    if isinstance(tree, str | int | float | bool | None):
        return tree
    raise TaskError(
        f"this training cannot be shared by a team: its state holds a {type(tree).__name__}, which "
        "cannot be sent to the others; keep tensors, numbers, texts, lists and mappings in it"
    )


def _from_json(tree: Any, tensors: Iterator[Tensor]) -> Any:  # noqa: ANN401 - any state
    if not isinstance(tree, dict):
        return tree
    ((kind, inner),) = tree.items()
    if kind == "tensor":
        return next(tensors)
    if kind == "map":
        return {key: _from_json(value, tensors) for key, value in inner}
    values = [_from_json(value, tensors) for value in inner]
    return tuple(values) if kind == "tuple" else values


class Call(NamedTuple):
    """A request of one process to the other, or its answer."""

    name: str
    content: Mapping[str, Any]


class Link:
    """A connection between two processes that divide a model. Each end may call at any time: a
    thread reads all calls, so that neither end waits for the other to send.
    """

    def __init__(self, connection: Connection, is_attended: Callable[[], bool]) -> None:
        """`is_attended` returns whether the computing thread is there. If not, the link closes, so
        that the other member does not wait for answers.
        """
        self._connection, self._is_attended = connection, is_attended
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.lost: str | None = None
        """Why the link ended; `None`: it is open."""
        for target in (self._read, self._ping):
            threading.Thread(target=target, name="team-link", daemon=True).start()

    def call(self, name: str, **content: Any) -> None:  # noqa: ANN401 - tensors and plain values
        """Send a call.

        Raises:
            LostError: The other end is gone.
            TaskError: `content` cannot be sent.
        """
        self._connection.send_json(Kind.CALL, 0, call=name, **describe(content))
        send(self._connection, content)

    def take(self, seconds: float | None = None) -> Call | None:
        """Return the next call of the other end; `None`: none came within `seconds`.

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
        """Close the connection, which ends both threads."""
        self._connection.close()

    def _read(self) -> None:
        connection = self._connection
        try:
            while True:
                message = connection.next_frame().message
                if (reason := message.get("reason")) is not None:
                    self.lost = f"the leader refuses: {reason}"
                    return
                self._calls.put(Call(message["call"], receive(connection, message)))
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
                return  # `_read` fails as well, and records why
            time.sleep(PING_EVERY_S)
