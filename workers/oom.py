"""Classifies exceptions for the worker, and formats them as text: exception objects never leave the worker.

Covers the way from an exception, with everything chained to it, to a `FailureKind` and its evidence, and the
formatting of a traceback. Does not cover what is done about it and how often a probable out-of-memory is accepted (the
engine decides), nor errors that end the process at once, such as a kill by the kernel. Never imports torch: it reads
types by their names, so it works before torch is loaded and where there is none.

An exception is judged by its type, then its code, then its text; the first rule that matches decides. Of all
exceptions in the chain the gravest verdict counts: poisoned, definite, probable, other.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from workers.settings import FailureKind

#: A kind and its evidence.
_Verdict: TypeAlias = tuple[FailureKind, str]

_TEXT_LIMIT_CHARS: Final = 300

#: Chains are a few links long; a longer one is a bug, and classifying it must end.
_CHAIN_LIMIT: Final = 64

_GRAVITY: Final[Mapping[FailureKind, int]] = MappingProxyType(
    {FailureKind.CONTEXT_CORRUPTED: 3, FailureKind.DEFINITE: 2, FailureKind.PROBABLE: 1, FailureKind.OTHER: 0}
)

#: `cudaErrorMemoryAllocation`. Codes and the texts below are those of CUDA 13.0 (driver_types.h, cudaGetErrorString);
#: HIP uses the same numbers for out of memory, illegal address, assert and launch failure.
_CUDA_OUT_OF_MEMORY: Final = 2

#: cudaError codes after which this process gets no more work out of the device, and what the runtime calls them.
#: For those marked * NVIDIA says in so many words that the process must be terminated and relaunched; the others are
#: a device, a driver or an MPS server that went away, where a fresh process is the only thing left to try.
#: Absent on purpose: 219 (a graphics context was wrong) and 720 (a cooperative launch was too large) are refused
#: calls, not a broken device.
_CORRUPTING_CODES: Final[Mapping[int, tuple[str, str]]] = MappingProxyType(
    {
        46: ("cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"),
        100: ("cudaErrorNoDevice", "no CUDA-capable device is detected"),
        101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
        214: ("cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"),
        220: ("cudaErrorNvlinkUncorrectable", "uncorrectable NVLink error detected during the execution"),
        226: ("cudaErrorContained", "Invalid access of peer GPU memory over nvlink or a hardware error"),  # *
        700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),  # *
        702: ("cudaErrorLaunchTimeout", "the launch timed out and was terminated"),  # *
        709: ("cudaErrorContextIsDestroyed", "context is destroyed"),
        710: ("cudaErrorAssert", "device-side assert triggered"),  # *
        714: ("cudaErrorHardwareStackError", "hardware stack error"),  # *
        715: ("cudaErrorIllegalInstruction", "an illegal instruction was encountered"),  # *
        716: ("cudaErrorMisalignedAddress", "misaligned address"),  # *
        717: ("cudaErrorInvalidAddressSpace", "operation not supported on global/shared address space"),  # *
        718: ("cudaErrorInvalidPc", "invalid program counter"),  # *
        719: ("cudaErrorLaunchFailure", "unspecified launch failure"),  # *
        721: ("cudaErrorTensorMemoryLeak", "tensor memory not completely freed"),  # *
        802: ("cudaErrorSystemNotReady", "system not yet initialized"),
        803: (
            "cudaErrorSystemDriverMismatch",
            "system has unsupported display driver / cuda driver combination",
        ),
        805: (
            "cudaErrorMpsConnectionFailed",
            "MPS client failed to connect to the MPS control daemon or the MPS server",
        ),
        806: (
            "cudaErrorMpsRpcFailure",
            "the remote procedural call between the MPS server and the MPS client failed",
        ),
        807: ("cudaErrorMpsServerNotReady", "MPS server is not ready to accept new MPS client requests"),
        808: (
            "cudaErrorMpsMaxClientsReached",
            "the hardware resources required to create MPS client have been exhausted",
        ),
        809: (
            "cudaErrorMpsMaxConnectionsReached",
            "the hardware resources required to support device connections have been exhausted",
        ),
        810: ("cudaErrorMpsClientTerminated", "the MPS client has been terminated by the server"),  # *
        911: ("cudaErrorExternalDevice", "an async error has occured in external entity outside of CUDA"),  # *
        999: ("cudaErrorUnknown", "unknown error"),
    }
)

#: Prefixes of the CUDA runtime. Some texts above are common ("unknown error"), so they count only after one of these.
_SPOKEN_BY_THE_RUNTIME: Final = re.compile(
    r"(?:CUDA error|CUDA driver error|HIP error|Triton Error \[(?:CUDA|HIP)\]): (?P<text>"
    + "|".join(re.escape(text) for _, text in _CORRUPTING_CODES.values())
    + ")"
)

#: Distinctive texts; they count anywhere in the message of a `RuntimeError`.
_PHRASES: Final[Mapping[FailureKind, tuple[str, ...]]] = MappingProxyType(
    {
        FailureKind.CONTEXT_CORRUPTED: (
            "an illegal memory access was encountered",
            "an illegal instruction was encountered",
            "device-side assert triggered",
            "unspecified launch failure",
            "misaligned address",
            "uncorrectable ECC",
            "uncorrectable NVLink",
            "the launch timed out and was terminated",
            "no CUDA-capable device is detected",
            "CUDA-capable device(s) is/are busy or unavailable",
            "GPU is lost",
            "has fallen off the bus",
            "device unavailable",
        ),
        FailureKind.DEFINITE: (
            "CUDA out of memory",
            "CUDA error: out of memory",
            "CUDA driver error: out of memory",
            "CUDA_ERROR_OUT_OF_MEMORY",
            "HIP out of memory",
            "HIP error: out of memory",
            # cudaMallocAsync says so after "Allocation on device" and its number.
            "would exceed allowed memory. (out of memory)",
            "DefaultCPUAllocator: can't allocate memory",
            "DefaultCPUAllocator: not enough memory:",
            "Error code 12 (Cannot allocate memory)",
            "std::bad_alloc",
            "Failed to allocate a Tensor object",
        ),
        FailureKind.PROBABLE: (
            "CUBLAS_STATUS_ALLOC_FAILED",
            # At cublasCreate this is memory; elsewhere it can be an indexing bug. Hence only probable.
            "CUBLAS_STATUS_NOT_INITIALIZED",
            "HIPBLAS_STATUS_ALLOC_FAILED",
            "CUSOLVER_STATUS_ALLOC_FAILED",
            "CUSPARSE_STATUS_ALLOC_FAILED",
            "CUFFT_ALLOC_FAILED",
            "CUDNN_STATUS_ALLOC_FAILED",
            "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
            "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
            "GET was unable to find an engine",
            "!handles_.at(i) INTERNAL ASSERT FAILED",
            "CUDA driver error: device not ready",
        ),
    }
)

#: oneDNN without memory. The same words followed by "descriptor" mean an operation it cannot do, which is a bug.
_ONEDNN_ALLOCATION: Final = re.compile(r"could not create a (?:primitive|memory)\b(?! desc)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What an exception means. Holds strings only, so it keeps no frame and no tensor alive, and it pickles."""

    kind: FailureKind
    evidence: str
    """The rule that matched: `type torch.OutOfMemoryError`, `code 700 (cudaErrorIllegalAddress)`, `text "…"`."""
    text: str
    """First line of the message of the exception that decided, at most 300 characters; its type if it has none."""


def classify(exc: BaseException) -> Failure:
    """Judge `exc` and everything chained to it: causes, contexts and the members of groups.

    The gravest verdict in the chain counts, and of equals the one nearest to `exc`. Call it inside the handler, keep
    only what it returns, and leave the handler: the traceback holds the tensors of the step that failed.
    """
    verdict = Failure(kind=FailureKind.OTHER, evidence="no rule matched", text=_first_line(exc))
    for link in _chain(exc):
        found = _judge(link)
        if found is not None and _GRAVITY[found[0]] > _GRAVITY[verdict.kind]:
            verdict = Failure(kind=found[0], evidence=found[1], text=_first_line(link))
    return verdict


def traceback_text(exc: BaseException, limit_chars: int = 8192) -> str:
    """Format the traceback of `exc`, causes included, as text of at most `limit_chars` characters.

    A longer one loses its middle: the first cause stands at the top, and what happened in the end at the bottom.
    Nothing of the traceback itself is kept, neither frames nor the values in them.
    """
    try:
        text = "".join(traceback.TracebackException.from_exception(exc).format())
    except MemoryError:  # host memory is what ran out: say at least what it was
        text = f"{type(exc).__name__} (no memory left to format its traceback)\n"
    if len(text) <= limit_chars:
        return text
    mark = "\n[…]\n"
    head_chars = limit_chars // 4
    tail_chars = limit_chars - head_chars - len(mark)
    if tail_chars <= 0:
        return text[:limit_chars]
    return text[:head_chars] + mark + text[-tail_chars:]


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """Yield `exc` and what is chained to it, nearest first, each once."""
    waiting = deque([exc])
    seen: set[int] = set()
    while waiting and len(seen) < _CHAIN_LIMIT:
        link = waiting.popleft()
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            waiting.extend(link.exceptions)
        if link.__cause__ is not None:
            waiting.append(link.__cause__)
        if link.__context__ is not None and not link.__suppress_context__:
            waiting.append(link.__context__)


def _judge(exc: BaseException) -> _Verdict | None:
    """Judge one exception on its own: by type, by code, by text. `None` if no rule matches."""
    # torch and the libraries below it raise these two; in any other type such words are about memory, not a lack of it.
    speaks_for_torch = isinstance(exc, RuntimeError | SystemError)
    return _judge_type(exc) or _judge_code(exc) or (_judge_text(_message(exc)) if speaks_for_torch else None)


def _judge_type(exc: BaseException) -> _Verdict | None:
    if isinstance(exc, MemoryError):
        return FailureKind.DEFINITE, "type MemoryError"
    if (torch_type := _torch_type(exc, "OutOfMemoryError")) is not None:
        return FailureKind.DEFINITE, f"type {torch_type.__module__}.{torch_type.__name__}"
    return None


def _judge_code(exc: BaseException) -> _Verdict | None:
    if isinstance(exc, OSError) and exc.errno == errno.ENOMEM:
        return FailureKind.DEFINITE, f"code errno {errno.ENOMEM} (ENOMEM)"
    if _torch_type(exc, "AcceleratorError") is None:
        return None
    code = getattr(exc, "error_code", None)
    if code == _CUDA_OUT_OF_MEMORY:
        return FailureKind.DEFINITE, f"code {code} (cudaErrorMemoryAllocation)"
    if isinstance(code, int) and code in _CORRUPTING_CODES:
        return FailureKind.CONTEXT_CORRUPTED, f"code {code} ({_CORRUPTING_CODES[code][0]})"
    return None


def _judge_text(message: str) -> _Verdict | None:
    if spoken := _SPOKEN_BY_THE_RUNTIME.search(message):
        return FailureKind.CONTEXT_CORRUPTED, f'text "{spoken["text"]}"'
    for kind, phrases in _PHRASES.items():
        for phrase in phrases:
            if phrase in message:
                return kind, f'text "{phrase}"'
    if found := _ONEDNN_ALLOCATION.search(message):
        return FailureKind.PROBABLE, f'text "{found[0]}"'
    return None


def _torch_type(exc: BaseException, name: str) -> type | None:
    """Find torch's class `name` among the types of `exc`, whichever module of torch it claims to come from."""
    for base in type(exc).__mro__:
        if base.__name__ == name and base.__module__.partition(".")[0] == "torch":
            return base
    return None


def _message(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:  # noqa: BLE001 -- a workload's exception may fail at anything; that must not hide the failure
        return ""


def _first_line(exc: BaseException) -> str:
    lines = (line.strip() for line in _message(exc).splitlines())
    return next(filter(None, lines), type(exc).__name__)[:_TEXT_LIMIT_CHARS]
