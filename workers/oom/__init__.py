"""Classifies exceptions for the worker, and formats them as text: exception objects never leave the
worker.

Covers the way from an exception, with everything chained to it, to a `FailureKind` and its
evidence, and the formatting of tracebacks. Does not cover the reaction, nor errors that end the
process at once, such as a kill by the kernel. Never imports torch: it compares the names of types,
so it works before torch is loaded and without torch.

An exception is judged by its type, then its code, then its text; the first rule that matches
decides.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Literal

from workers.oom import texts
from workers.settings import FailureKind

#: Accepted number of probable out-of-memory errors in a row. Their texts (cuBLAS, cuDNN) can also
#: mean a bug of the workload, which smaller sizes do not cure.
MAX_PROBABLE_IN_A_ROW: Final = 2

_TEXT_LIMIT_CHARS: Final = 300
_TRACEBACK_LIMIT_CHARS: Final = 8192
_CUT: Final = "\n[…]\n"

#: Most links of a chain that are judged: a longer chain is a bug, and judging it must end.
_CHAIN_LIMIT: Final = 64

#: In order of severity, the most severe last.
_BY_SEVERITY: Final = (
    FailureKind.OTHER,
    FailureKind.PROBABLE,
    FailureKind.DEFINITE,
    FailureKind.CONTEXT_CORRUPTED,
)

_NO_RULE: Final = (FailureKind.OTHER, "no rule matched")

#: `cudaErrorMemoryAllocation`. Codes and the texts below are those of CUDA 13.0 (driver_types.h,
#: cudaGetErrorString); HIP uses the same numbers for out of memory, illegal address, assert and
#: launch failure.
_CUDA_OUT_OF_MEMORY: Final = 2

#: cudaError codes after which the device does no more work for this process, and the runtime's
#: texts. For those marked * NVIDIA says that the process must be terminated and relaunched; the
#: others mean a device, a driver or an MPS server that went away, where only a fresh process is
#: left to try. Absent on purpose: 219 (a graphics context was wrong) and 720 (a cooperative launch
#: was too large) are refused calls, not a broken device.
_CORRUPTING_CODES: Final[Mapping[int, str]] = {
    46: "CUDA-capable device(s) is/are busy or unavailable",
    100: "no CUDA-capable device is detected",
    101: "invalid device ordinal",
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
    226: "Invalid access of peer GPU memory over nvlink or a hardware error",  # *
    700: "an illegal memory access was encountered",  # *
    702: "the launch timed out and was terminated",  # *
    709: "context is destroyed",
    710: "device-side assert triggered",  # *
    714: "hardware stack error",  # *
    715: "an illegal instruction was encountered",  # *
    716: "misaligned address",  # *
    717: "operation not supported on global/shared address space",  # *
    718: "invalid program counter",  # *
    719: "unspecified launch failure",  # *
    721: "tensor memory not completely freed",  # *
    802: "system not yet initialized",
    803: "system has unsupported display driver / cuda driver combination",
    805: "MPS client failed to connect to the MPS control daemon or the MPS server",
    806: "the remote procedural call between the MPS server and the MPS client failed",
    807: "MPS server is not ready to accept new MPS client requests",
    808: "the hardware resources required to create MPS client have been exhausted",
    809: "the hardware resources required to support device connections have been exhausted",
    810: "the MPS client has been terminated by the server",  # *
    911: "an async error has occured in external entity outside of CUDA",  # *
    999: "unknown error",
}

#: The codes whose texts are distinctive and count anywhere in a message. The others, such as
#: "unknown error", count only after a prefix of the runtime.
_DISTINCTIVE_CODES: Final = (46, 100, 700, 702, 710, 715, 716, 719)


#: After these codes the card is fine: mostly an index or a label was too large.
_CODES_OF_PROGRAM_BUGS: Final = (700, 710, 715, 716, 717, 718)


def _any_of(codes: Iterable[int]) -> str:
    return "|".join(re.escape(_CORRUPTING_CODES[code]) for code in codes)


_OF_PROGRAM: Final = re.compile(_any_of(_CODES_OF_PROGRAM_BUGS))

#: What the text of a `RuntimeError` means; the first pattern that matches decides. Its group, if it
#: has one, is the evidence.
_TEXTS: Final = tuple(
    (kind, re.compile(pattern))
    for kind, *patterns in (
        (
            FailureKind.CONTEXT_CORRUPTED,
            (
                r"(?:CUDA(?: driver)? error|HIP error|Triton Error \[(?:CUDA|HIP)\]): "
                rf"({_any_of(_CORRUPTING_CODES)})"
            ),
            _any_of(_DISTINCTIVE_CODES),
            r"uncorrectable (?:ECC|NVLink)",
            r"GPU is lost|has fallen off the bus|device unavailable",
        ),
        (FailureKind.DEFINITE, *texts.CARD, *texts.HOST),
        (FailureKind.PROBABLE, *texts.PROBABLE),
    )
    for pattern in patterns
)


#: The refused request in the text of an out-of-memory: torch's caching allocator ("Tried to
#: allocate 20.00 GiB"), its CPU allocator ("you tried to allocate 400 bytes"), cudaMallocAsync
#: ("Requested : 1.00 GiB"), and NumPy.
_REQUEST: Final = re.compile(
    r"(?:tried to allocate|requested *:|unable to allocate) +([0-9.]+) ?([KMGTP]?i?B|bytes)",
    re.IGNORECASE,
)
_UNIT_BYTES: Final = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


#: errno of a full disk and of a user's full quota.
DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})

_LOG_TEXTS: Final = re.compile("|".join(texts.LOGS))

#: Texts about the PC's RAM and not a card's memory, if the worker has a card.
_HOST_TEXTS: Final = re.compile("|".join((*texts.HOST, *texts.HOST_LOGS)))

#: Errors of a parent process that had started the failed program.
_ERRORS_OF_PARENT: Final = re.compile(
    r"ChildFailedError|ProcessRaisedException|ProcessExitedException|CalledProcessError"
    r"|exited unexpectedly"
)
#: An assertion of a kernel, such as for a token or label that is too large. The next call may then
#: fail with a text of a lack of memory: CUBLAS_STATUS_NOT_INITIALIZED (pytorch/serve #1993).
_ASSERTED: Final = re.compile(r"\.cuh?:\d+: .*Assertion .* failed|device-side assert triggered")
#: Begins each traceback, also inside an error that reports one of another process: torch's loaders
#: and `spawn`, and the pools of Python.
_TRACEBACK: Final = "Traceback (most recent call last):"

#: Types that may report a lack of memory by their text, in such a traceback.
_TYPES_JUDGED_BY_TEXT: Final = ("RuntimeError", "SystemError", "OSError")

_CHAINED: Final = re.compile(
    r"During handling of the above exception|direct cause of the following exception"
)


def is_of_program(text: str) -> bool:
    """Return whether the text of a broken device means that the program misused it."""
    return _OF_PROGRAM.search(text) is not None


def judge_log(text: str) -> Literal["card", "host"] | None:
    """Return which memory a failed program lacked, by the end of its log; `None`: the log reports
    no lack of memory.

    If the program has no card, texts about the PC's RAM mean its cap.

    An out-of-memory does not count if the program survived it: another error follows that is
    neither chained to it nor from a parent process.
    """
    kinds = {FailureKind.DEFINITE}
    if _ASSERTED.search(text) is None:
        kinds.add(FailureKind.PROBABLE)
    patterns = [pattern for kind, pattern in _TEXTS if kind in kinds]
    patterns = [*patterns, _LOG_TEXTS, _HOST_TEXTS]
    found = [match for pattern in patterns for match in pattern.finditer(text)]
    if not found:
        return None
    last = max(found, key=re.Match.end)
    _, *later = text[last.end() :].split(_TRACEBACK)
    between = text[last.end() :].partition(_TRACEBACK)[0]
    if later and _CHAINED.search(between) is None and _ERRORS_OF_PARENT.search(later[-1]) is None:
        return None
    is_host = all(_HOST_TEXTS.search(match[0]) is not None for match in found)
    return "host" if is_host else "card"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The meaning of an exception.

    Holds strings only, so it keeps no frame and no tensor alive, and it can be pickled.
    """

    kind: FailureKind
    evidence: str
    """The rule that matched: `type torch.OutOfMemoryError`, `code 700 (an illegal memory …)`,
    `text "…"`.
    """
    text: str
    """First line of the message of the exception that decided, at most 300 characters; its type if
    the message is empty.
    """
    requested_bytes: int | None = None
    """Bytes that were refused, rounded as in the message; `None` if it does not say."""

    @property
    def is_out_of_memory(self) -> bool:
        """Whether memory ran out, for certain or probably."""
        return self.kind in {FailureKind.DEFINITE, FailureKind.PROBABLE}


def classify(exc: BaseException, handled: BaseException | None = None) -> Failure:
    """Judge `exc` and everything chained to it: causes, contexts and the members of groups.

    The most severe verdict of the chain counts (poisoned, definite, probable, other); of equal
    ones, that nearest to `exc`. Call it inside the handler, keep only its result, and leave the
    handler: the traceback holds the tensors of the failed step.

    Args:
        exc: The raised exception.
        handled: The exception that the caller was already handling; it is ignored as a context.
            Python chains the two, so a bug during the handling of an out-of-memory would look like
            one.
    """
    verdict = Failure(kind=_NO_RULE[0], evidence=_NO_RULE[1], text=_first_line(exc))
    for link in _chain(exc, handled):
        kind, evidence = _judge(link)
        if _BY_SEVERITY.index(kind) > _BY_SEVERITY.index(verdict.kind):
            verdict = Failure(
                kind=kind,
                evidence=evidence,
                text=_first_line(link),
                requested_bytes=_requested_bytes(_message(link)),
            )
    return verdict


def failure_of_workload(error: BaseException) -> Failure:
    """Judge an exception of the workload; call it inside the handler.

    A step may leave by `sys.exit()` or any other BaseException: that is an error of the workload,
    as a ValueError is.
    """
    if isinstance(error, Exception):
        return classify(error)
    name, text = type(error).__name__, str(error)  # the text of a SystemExit is a bare number
    return replace(classify(error), text=f"{name}: {text}" if text else name)


def traceback_text(exc: BaseException) -> str:
    """Format the traceback of `exc`, causes included, as text of at most 8192 characters.

    A longer text loses its middle: the first cause is at the top, and the last error at the bottom.
    Keeps neither frames nor the values in them.
    """
    try:
        text = "".join(traceback.TracebackException.from_exception(exc).format())
    except MemoryError:  # host memory ran out: report at least the type
        text = f"{type(exc).__name__} (no memory left to format its traceback)\n"
    if len(text) <= _TRACEBACK_LIMIT_CHARS:
        return text
    head_chars = _TRACEBACK_LIMIT_CHARS // 4
    tail_chars = _TRACEBACK_LIMIT_CHARS - head_chars - len(_CUT)
    return text[:head_chars] + _CUT + text[-tail_chars:]


def one_line(exc: BaseException) -> str:
    """Return type and message of an exception, as one line of at most 300 characters."""
    return f"{type(exc).__name__}: {' '.join(_message(exc).split())}"[:_TEXT_LIMIT_CHARS]


def drop_frames(exc: BaseException) -> None:
    """Clear the frames of all its tracebacks: a workload that keeps the exception must not keep its
    tensors.

    Afterwards a debugger no longer sees the variables of these frames. Running frames are not
    cleared.
    """
    for link in _chain(exc, None):
        traceback.clear_frames(link.__traceback__)


def place(exc: BaseException) -> str:
    """Return file and line of the user's code that raised `exc`: the deepest frame outside
    installed packages.
    """
    frames = traceback.extract_tb(exc.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "an unknown place"


def _chain(exc: BaseException, handled: BaseException | None) -> Iterator[BaseException]:
    """Yield `exc` and all exceptions chained to it, nearest first, each once."""
    waiting: deque[BaseException | None] = deque([exc])
    seen: set[int] = set()
    while waiting and len(seen) < _CHAIN_LIMIT:
        link = waiting.popleft()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if isinstance(link, BaseExceptionGroup):
            waiting.extend(link.exceptions)
        waiting.append(link.__cause__)
        if link.__context__ is not handled and not link.__suppress_context__:
            waiting.append(link.__context__)


def _judge(exc: BaseException) -> tuple[FailureKind, str]:
    if isinstance(exc, MemoryError):
        return FailureKind.DEFINITE, "type MemoryError"
    if (torch_type := _torch_type(exc, "OutOfMemoryError")) is not None:
        return FailureKind.DEFINITE, f"type {torch_type.__module__}.{torch_type.__name__}"
    if isinstance(exc, OSError) and exc.errno == errno.ENOMEM:
        return FailureKind.DEFINITE, f"code errno {errno.ENOMEM} (ENOMEM)"
    if _torch_type(exc, "AcceleratorError") is not None:
        code = getattr(exc, "error_code", None)
        if code == _CUDA_OUT_OF_MEMORY:
            return FailureKind.DEFINITE, f"code {code} (out of memory)"
        if isinstance(code, int) and code in _CORRUPTING_CODES:
            return FailureKind.CONTEXT_CORRUPTED, f"code {code} ({_CORRUPTING_CODES[code]})"
    text, *tracebacks = _message(exc).split(_TRACEBACK)
    found = [_judge_traceback(each) for each in tracebacks]
    # torch and its libraries raise these two types; in any other type such texts are about memory,
    # but do not mean a lack of it.
    if isinstance(exc, RuntimeError | SystemError):
        found.append(_judge_text(text))
    return max(found, key=lambda verdict: _BY_SEVERITY.index(verdict[0]), default=_NO_RULE)


def _judge_traceback(text: str) -> tuple[FailureKind, str]:
    """Judge the exception at the end of a traceback that another process has sent as text."""
    # The lines of its frames are indented; the others are the exception.
    error_text = "\n".join(line for line in text.splitlines() if line[:1].strip())
    name = error_text.partition("\n")[0].partition(":")[0]
    is_torch = name.startswith("torch.")
    if name.endswith("MemoryError") and (is_torch or not name.endswith("OutOfMemoryError")):
        return FailureKind.DEFINITE, f"type {name}"
    return _judge_text(error_text) if is_torch or name in _TYPES_JUDGED_BY_TEXT else _NO_RULE


def _judge_text(message: str) -> tuple[FailureKind, str]:
    for kind, pattern in _TEXTS:
        if match := pattern.search(message):
            return kind, f'text "{match[pattern.groups]}"'
    return _NO_RULE


def _requested_bytes(message: str) -> int | None:
    # 1.2.3, or more digits than a float has, is no request of any allocator.
    with suppress(ValueError, OverflowError):
        if match := _REQUEST.search(message):
            return int(float(match[1]) * _UNIT_BYTES.get(match[2][0].upper(), 1))
    return None


def _torch_type(exc: BaseException, name: str) -> type | None:
    """Return torch's class `name` from the types of `exc`, in whichever module of torch it is
    defined.
    """
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
