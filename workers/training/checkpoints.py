"""The checkpoints of one training in one folder: a thread saves them while the training continues,
and a later process loads them.

A checkpoint is written completely or not at all, and used only if every byte is as written. If one
cannot be written, no step is lost: `Checkpoints.failure` says why, and writing is tried again. This
module knows neither the meaning of a state nor its users.

A file is the output of `torch.save`, which `torch.load` opens, followed by 68 bytes: a mark, the
version of this format, a number that increases, the length, a BLAKE2b hash of all of that, and a
checksum of these fields. Every version of the format has this end.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import math
import os
import pickle
import queue
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final, TypeAlias, cast

import torch

from workers.files import made_whole, remove_halves
from workers.training.batches import map_tensors, tensors_in
from workers.training.host_memory import give_back, like_all, wait_asleep
from workers.units import MIB

#: The head's copy, put there before `load`. It is read like the others and never overwritten.
FROM_HEAD: Final = "from-head.pt"

#: The weights that `train.from` names, put there by the head. This is no checkpoint.
FROM_RUN: Final = "from-run.pt"

#: The state with the lowest loss of validation, beside the generations.
BEST: Final = "best.pt"

#: Number of files that are written in turn: one is good while the other is overwritten.
_GENERATIONS: Final = 2

#: Seconds that a training on the CPU loses for each second of processor time of the thread that
#: writes: they share cores, caches and memory. Measured on two busy cores: 1.0 with 2.5 MiB; with
#: 124 MiB 2.0, and 2.5 at the upper end of its 95 % interval.
_CPU_LOSS: Final = 2.5

MOST_SHARE: Final = 0.01
"""The share of the training's time that checkpoints may cost."""
EARLIER: Final = 0.8
"""A checkpoint is due after this share of the wanted time, since it waits for the end of a step and
takes time to write. So no more than the wanted time is lost.
"""
_END_S: Final = 30.0
"""Seconds that a process waits at its end for a checkpoint that is being written."""
_RETRY_S: Final = 60.0
"""Seconds after a failure until the next attempt at the latest, however rare checkpoints are."""

VERSION: Final = 1
#: Keep this word: files with another mark look damaged and are overwritten.
_MARK: Final = b"OOM-snapshot"
_FIELDS: Final = struct.Struct(f"<{len(_MARK)}sIQQ")
_DIGEST_BYTES: Final = 32
_CHECKSUM: Final = struct.Struct("<I")
_TRAILER_BYTES: Final = _FIELDS.size + _DIGEST_BYTES + _CHECKSUM.size
_CHUNK_BYTES: Final = 4 * MIB

Lever: TypeAlias = bool | int | float | str | None


class RefusedError(Exception):
    """A file cannot be used as a checkpoint; the text says why, as the end of a sentence. Or none
    of several files can: one sentence for each.
    """

    def __str__(self) -> str:
        return "; ".join(self.args) or "there is no checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a checkpoint belongs to. Equal trainings can continue from each other's checkpoints."""

    model: str
    weights: Mapping[str, str]
    """Type and shape of each weight, such as `float32 64x256`, keyed by name."""
    levers: Mapping[str, Lever] = field(default_factory=dict)
    """Settings that affect the trained weights; not those that only move memory."""

    @classmethod
    def of(
        cls,
        model: str,
        weights: Mapping[str, torch.Tensor],
        levers: Mapping[str, Lever] | None = None,
    ) -> Identity:
        """Describe these weights."""
        return cls(
            model=model,
            weights={
                name: f"{str(weight.dtype).removeprefix('torch.')} "
                + ("x".join(map(str, weight.shape)) or "scalar")
                for name, weight in weights.items()
            },
            levers=dict(levers or {}),
        )

    def plain(self) -> dict[str, Any]:
        """Return it as types that a file can hold."""
        return asdict(self)

    def difference(self, saved: object) -> str | None:
        """Describe how `saved`, made by `plain`, differs from this training; `None`: not at all."""
        match saved:
            case {"model": str(model), "weights": dict(weights), "levers": dict(levers)}:
                pass
            case _:
                return "it does not say which model it holds"
        if model != self.model:
            return f"it holds the model {model}, and this run trains {self.model}"
        for name, then, now in _differing(weights, self.weights):
            return (
                f"its weight {name} is {then or 'absent'}, and that of this model is "
                f"{now or 'absent'}"
            )
        for name, then, now in _differing(levers, self.levers):
            return f"it was trained with {name}={then}, and this run has {name}={now}"
        return None


def _differing(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted({*saved, *own}):
        if saved.get(name) != own.get(name):
            yield name, saved.get(name), own.get(name)


class Checkpoints:
    """Writes checkpoints of one training to two files in turn, so that one is always good."""

    def __init__(self, folder: Path, identity: Identity, *, save_every_s: float = 60.0) -> None:
        """Remove the temporary files of a killed process, and start the thread that writes.

        Raises nothing.
        """
        self.saved_step: int | None = None
        """The step of the newest good checkpoint; `None`: there is none."""
        self.failure: str | None = None
        """One sentence: what could not be written, where and why; `None` after the next success."""
        self._folder = folder
        self._identity = identity
        self._save_every_s = save_every_s
        self._copy = HostCopy()
        self._taken_at = time.monotonic()
        self._due_at = self._taken_at + pause_s(save_every_s, 0.0, failed=False)
        self._slots = [folder / f"generation-{index}.pt" for index in range(_GENERATIONS)]
        self._candidates = (*self._slots, folder / FROM_HEAD)
        self.good: Path | None = None
        """The newest file that is known to be good; it is kept while the next one is written."""
        self._idle = threading.Event()
        self._idle.set()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for path in self._slots:
            remove_halves(path)
        threading.Thread(target=self._run_jobs, name="checkpoints", daemon=True).start()
        # An interpreter that ends while the thread runs torch's code crashes (observed: SIGSEGV).
        weakref.finalize(self, self._idle.wait, _END_S)

    def load(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Read the newest good checkpoint of this training into host memory.

        Return its state (`None`: training starts from the beginning), and one sentence for each
        newer file that cannot be used, newest first, with one that says what is done instead.

        Raises:
            RuntimeError: There is no memory for it.
        """
        self.wait()
        try:
            self.good, content, refused = newest_good(
                self._candidates,
                lambda content: self._identity.difference(content.get("identity")),
            )
        except RefusedError as refusal:
            return None, [*refusal.args, "training begins anew"] if refusal.args else []
        self.saved_step = content["step"]
        instead = f"training goes on from step {self.saved_step}"
        return content["state"], [*refused, instead] if refused else []

    def discard(self) -> None:
        """Remove all checkpoints: the training starts from the beginning.

        Raises:
            OSError: One of them cannot be removed.
        """
        self.wait()
        self.good = None
        for path in (*self._slots, self._folder / BEST):
            path.unlink(missing_ok=True)

    def due(self) -> bool:
        """Whether to take a checkpoint now; false while one is being written."""
        return self._idle.is_set() and time.monotonic() >= self._due_at

    def save(
        self, state: Mapping[str, Any], step: int, best: Mapping[str, float] | None = None
    ) -> bool:
        """Copy a state of tensors, numbers, strings, lists and mappings, let the thread write it,
        and return at once. Call `load` or `discard` before the first `save`.

        With `best`, the measured figures of the state, the file is `best.pt`, which no later
        generation replaces. Its cost delays the next checkpoint like that of any other. Return
        `False` if another one is still being written, or there is no memory for the copy (see
        `failure`).
        """
        if not self._idle.is_set():
            return False
        began_s, self._taken_at = time.perf_counter(), time.monotonic()
        try:
            self._copy.take(state)
        except (RuntimeError, OSError, OverflowError, MemoryError) as failure:
            self._finish(step, time.perf_counter() - began_s, failure)
            return False
        cost_s = time.perf_counter() - began_s
        self._idle.clear()
        self._jobs.put(lambda: self._write(step, best, cost_s))
        return True

    def newest_copy(self) -> Mapping[str, Any] | None:
        """Return the state that was copied last, even if it was not written. Do not change it."""
        return self._copy.state

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is being written; return whether that is so."""
        return self._idle.wait(timeout_s)

    def _run_jobs(self) -> None:
        while True:
            self._jobs.get()()

    def _write(self, step: int, best: Mapping[str, float] | None, cost_s: float) -> None:
        """Write the copy, which took `cost_s`; runs in the thread, and raises nothing."""
        failure = None
        began_cpu_s = time.thread_time()
        # Never overwrite the newest good file; prefer a file that holds no checkpoint.
        others = [path for path in self._slots if path != self.good]
        target = min(others, key=lambda path: read_number(path) or 0)
        content = {"identity": self._identity.plain(), "step": step, "state": self._copy.state}
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if best is None:
                last = max(read_number(path) or 0 for path in self._candidates)
                write_file(target, content, last + 1)
            else:
                write_file(self._folder / BEST, {**content, "figures": dict(best)}, step)
        except Exception as error:  # noqa: BLE001 - training continues; `failure` reports it
            failure = error
        else:
            if best is None:
                self.good, self.saved_step = target, step
        if not self._copy.from_card:
            cost_s += _CPU_LOSS * (time.thread_time() - began_cpu_s)
        self._finish(step, cost_s, failure)
        self._idle.set()

    def _finish(self, step: int, cost_s: float, failure: Exception | None) -> None:
        pause = pause_s(self._save_every_s, cost_s, failed=failure is not None)
        self._due_at = self._taken_at + pause
        if failure is None:
            self.failure = None
            return
        last = (
            "there is no good one yet"
            if self.saved_step is None
            else f"the last good one is of step {self.saved_step}"
        )
        first_line = (str(failure).splitlines() or [type(failure).__name__])[0]
        self.failure = (
            f"the checkpoint of step {step} could not be written in {self._folder}: "
            f"{getattr(failure, 'strerror', None) or first_line}; training goes on and tries again "
            f"in {pause:.0f} s; {last}"
        )


def pause_s(save_every_s: float, cost_s: float, *, failed: bool) -> float:
    """Return the seconds from a checkpoint that cost the training `cost_s` to the next one."""
    wanted_s = min(save_every_s, _RETRY_S) if failed else save_every_s
    return max(EARLIER * wanted_s, cost_s / MOST_SHARE)


class HostCopy:
    """One copy of a state in host memory that no cap counts; its buffers are reused."""

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self.state: dict[str, Any] | None = None
        """The copied state; `None`: there is no complete copy."""
        self.from_card = False
        """Whether the state was on a card."""
        self._buffers: list[torch.Tensor] = []

    def take(self, state: Mapping[str, Any]) -> None:
        """Copy a state, and wait for the copy: later work of a card would wait for it anyway.

        Raises:
            RuntimeError, OSError, OverflowError: There is no memory for the buffers; the last copy
                stays.
        """
        tensors = list(tensors_in(state))
        self._lay_out(tensors)
        self.state, self.from_card = None, any(tensor.is_cuda for tensor in tensors)
        buffers = iter(self._buffers)
        copied = map_tensors(
            lambda tensor: next(buffers).copy_(tensor.detach(), non_blocking=True), state
        )
        for device in {tensor.device for tensor in tensors}:
            wait_asleep(device)
        self.state = copied

    def _lay_out(self, tensors: list[torch.Tensor]) -> None:
        """Allocate buffers, all of them again if one does not fit, before overwriting any."""
        forms, kept = (
            [(tensor.dtype, tensor.shape) for tensor in some] for some in (tensors, self._buffers)
        )
        if forms == kept:
            return
        self._buffers = like_all(tensors)
        if kept:
            self.state = None
            on_card = any(tensor.is_cuda for tensor in tensors)
            give_back(torch.device("cuda" if on_card else "cpu"))


def weights_sha256(weights: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values; equal on every device. No NumPy."""
    digest = hashlib.sha256()
    for device in {weight.device for weight in weights.values()}:
        wait_asleep(device)
    for name in sorted(weights):
        weight = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        if weight.nbytes:
            digest.update((ctypes.c_char * weight.nbytes).from_address(weight.data_ptr()))
    return digest.hexdigest()


def write_file(path: Path, content: dict[str, Any], number: int) -> None:
    """Write a file beside `path`, then replace `path` by it. One thread of a process at a time.

    Raises:
        Exception: It could not be written. `path` is unchanged, and no temporary file is left.
    """
    with made_whole(path) as fresh, fresh.open("wb", buffering=0) as file:
        sink = _HashingSink(file)
        try:
            torch.save(content, cast("IO[bytes]", sink))
        except RuntimeError:
            if sink.failure is not None:  # torch does not report why a write failed
                raise sink.failure from None
            raise
        fields = _FIELDS.pack(_MARK, VERSION, number, file.tell())
        sink.write(fields)
        trailer = fields + sink.digest.digest()
        sink.write(trailer[_FIELDS.size :] + _CHECKSUM.pack(zlib.crc32(trailer)))


def read_number(path: Path) -> int | None:
    """Return the increasing number of a file; `None`: there is no file, or its end is damaged."""
    try:
        with path.open("rb") as file:
            return _trailer(file)[1]
    except (OSError, RefusedError):
        return None


def newest_good(
    paths: Iterable[Path],
    difference: Callable[[Mapping[str, Any]], str | None] = lambda _: None,
) -> tuple[Path, dict[str, Any], list[str]]:
    """Return the newest usable file, its content, and one sentence for each newer file.

    `difference` returns why a content must not be used; `None`: it may.

    Raises:
        RefusedError: No file can be used.
    """
    refused: list[str] = []
    # Files without a number come first: one may be the newest, so its refusal must be reported.
    for path in sorted(paths, key=lambda path: read_number(path) or math.inf, reverse=True):
        try:
            content = read_file(path)
            reason = difference(content)
        except RefusedError as failure:
            if isinstance(failure.__cause__, FileNotFoundError | NotADirectoryError):
                continue
            reason = str(failure)
        if reason is None:
            return path, content, refused
        refused.append(f"the checkpoint {path} is not used: {reason}")
    raise RefusedError(*refused)


def read_file(path: Path) -> dict[str, Any]:
    """Verify a file and return its content, in host memory.

    Raises:
        RefusedError: It cannot be used.
        RuntimeError: There is no memory for the content.
    """
    try:
        with path.open("rb") as file:
            version, _, length, digest = _trailer(file)
            file.seek(0)
            if _digest_of(file, length + _FIELDS.size) != digest:
                raise RefusedError("its bytes are not those that were written (the hash differs)")
            if version != VERSION:
                raise RefusedError(
                    f"it has format version {version}, and this program reads version {VERSION}"
                )
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as failure:
        raise RefusedError(f"it cannot be read: {failure.strerror or failure}") from failure
    except pickle.UnpicklingError as failure:
        raise RefusedError("it holds more than tensors, numbers, strings and lists") from failure
    if not isinstance(content, dict):
        raise RefusedError("it holds no state")
    return content


class _HashingSink(io.RawIOBase):
    """Hashes what it writes, in pieces, so that other threads are not blocked for long."""

    def __init__(self, file: io.FileIO) -> None:
        self.digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self.failure: OSError | None = None
        self._file = file

    def write(self, data: Any) -> int:  # noqa: ANN401 - whatever has bytes
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK_BYTES):
            piece = view[start : start + _CHUNK_BYTES]
            self.digest.update(piece)
            try:
                while piece:
                    piece = piece[self._file.write(piece) :]
            except OSError as failure:
                self.failure = failure
                raise
        return len(view)


def _trailer(file: io.BufferedReader) -> tuple[int, int, int, bytes]:
    """Return version, number, length and hash from the end of a file."""
    size = file.seek(0, os.SEEK_END)
    if size < _TRAILER_BYTES:
        raise RefusedError(f"it has only {size} bytes")
    file.seek(size - _TRAILER_BYTES)
    end = file.read(_TRAILER_BYTES)
    trailer, checksum = end[: -_CHECKSUM.size], end[-_CHECKSUM.size :]
    mark, version, number, length = _FIELDS.unpack(trailer[: _FIELDS.size])
    whole = (
        mark == _MARK
        and length == size - _TRAILER_BYTES
        and checksum == _CHECKSUM.pack(zlib.crc32(trailer))
    )
    if not whole:
        raise RefusedError("it is no checkpoint, or its end is damaged or cut off")
    return version, number, length, trailer[_FIELDS.size :]


def _digest_of(file: io.BufferedReader, length: int) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    while length and (piece := file.read(min(length, _CHUNK_BYTES))):
        digest.update(piece)
        length -= len(piece)
    return digest.digest()
