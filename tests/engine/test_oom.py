"""The classification of all known exceptions, and of several that only look similar."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper

from workers.oom import Failure, classify, traceback_text
from workers.settings import FailureKind

DEFINITE, PROBABLE = FailureKind.DEFINITE, FailureKind.PROBABLE
CONTEXT_CORRUPTED, OTHER = FailureKind.CONTEXT_CORRUPTED, FailureKind.OTHER

#: The text that torch appends to every CUDA error, which mentions device-side assertions.
CUDA_HINTS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)


def torch_class(name: str, module: str = "torch") -> type[RuntimeError]:
    """Make a class like torch's own, without torch."""
    return type(name, (RuntimeError,), {"__module__": module})


def accelerator_error(
    code: object, message: str = "CUDA error: anything", of: str = "torch"
) -> RuntimeError:
    error = torch_class("AcceleratorError", of)(message)
    error.error_code = code  # type: ignore[attr-defined]
    return error


#: Texts of torch and the libraries below it, and a few sentences that only look similar.
TEXTS = {
    DEFINITE: [
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.67 GiB",
        "CUDA error: out of memory" + CUDA_HINTS,
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: CUDA_ERROR_OUT_OF_MEMORY",
        "Triton Error [CUDA]: out of memory",  # pytorch/pytorch issue 134893
        "HIP out of memory. Tried to allocate 20.00 MiB",
        "HIP error: out of memory",
        "MPS backend out of memory (MPS allocated: 8.00 GiB, max allowed: 9.07 GiB)",
        "FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1024 (0)MB",
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 6.10 GiB",
        "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
        "[enforce fail at alloc_cpu.cpp:75] data. DefaultCPUAllocator: not enough memory: you tried to allocate",
        "unable to mmap 1024 bytes from file <x>: Error code 12 (Cannot allocate memory)",
        "std::bad_alloc",
        "Failed to allocate a Tensor object",
    ],
    PROBABLE: [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        # aten/src/ATen/native/cudnn/Conv_v8.cpp: OutOfMemoryError of each plan is swallowed before
        # this is raised.
        "GET was unable to find an engine to execute this computation",
        # aten/src/ATen/native/cudnn/Conv_v7.cpp, if no algorithm gets its workspace.
        "Unable to find a valid cuDNN algorithm to run convolution",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",  # the forum's usual answer: the card is full
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasGemmEx( handle, opa, opb, m, n, k)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        "could not create a primitive",
        "could not create a memory",
        "!handles_.at(i) INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:300, please report a bug to PyTorch.",
        "CUDA driver error: device not ready",
    ],
    CONTEXT_CORRUPTED: [
        "CUDA error: an illegal memory access was encountered" + CUDA_HINTS,
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "CUDA error: unknown error" + CUDA_HINTS,
        "CUDA driver error: unknown error",
        "CUDA error: the MPS client has been terminated by the server",
        "Triton Error [CUDA]: context is destroyed",
        "NCCL error, last error: Cuda failure 700 'an illegal memory access was encountered'",
        "Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost. Reboot the system",
        "GPU 0 has fallen off the bus",
        "CUDA error: device unavailable",
    ],
    OTHER: [
        "",
        "out of memory budget for this quarter",
        "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
        "CUDA error: invalid argument" + CUDA_HINTS,
        "CUDA error: too many resources requested for launch",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
        "could not create a primitive descriptor for the matmul primitive. Run workload with environment variable",
        "the service answered: unknown error",
        "hardware stack error, says the printer",
    ],
}

#: Texts that name the refused request, and its size in bytes.
REQUESTS = {
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 23.69 GiB": 20
    * 2**30,
    "CUDA out of memory. Tried to allocate 512.00 MiB (GPU 0; 7.79 GiB total capacity": 512 * 2**20,
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes. Error code 12": 400,
    "Allocation on device 0 would exceed allowed memory. (out of memory)\nRequested               : 1.00 GiB": 2
    ** 30,
    "Unable to allocate 7.45 GiB for an array with shape (1000000000,)": int(7.45 * 2**30),
    "CUDA out of memory.": None,
    "tried to allocate 1.2.3 GiB": None,
}


class TestText:
    @pytest.mark.parametrize(
        ("kind", "message"), [(kind, text) for kind, texts in TEXTS.items() for text in texts]
    )
    def test_it_decides_where_neither_type_nor_code_does(
        self, kind: FailureKind, message: str
    ) -> None:
        assert classify(RuntimeError(message)).kind is kind

    @pytest.mark.parametrize(
        ("exception_type", "kind"),
        [
            *(
                (other, OTHER)
                for other in (ValueError, Exception, AssertionError, KeyError, OSError)
            ),
            *((of_torch, DEFINITE) for of_torch in (NotImplementedError, SystemError)),
        ],
    )
    def test_it_counts_only_in_the_family_of_what_torch_raises(
        self, exception_type: type[Exception], kind: FailureKind
    ) -> None:
        assert (
            classify(exception_type("CUDA out of memory. Tried to allocate 2.00 GiB")).kind is kind
        )

    @pytest.mark.parametrize(("message", "requested_bytes"), REQUESTS.items())
    def test_what_was_refused_stands_in_it(self, message: str, requested_bytes: int | None) -> None:
        assert classify(MemoryError(message)).requested_bytes == requested_bytes


class OfTwoError(Exception):
    """An exception that torch cannot recreate from a single text."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(name, count)


def numpy_array() -> None:
    np.ones(2**60, np.int8)


def torch_tensor() -> None:
    torch.ones(2**60, dtype=torch.int8)


def mapped_memory() -> None:
    raise OSError(12, "Cannot allocate memory")


def chained() -> None:
    try:
        bytearray(2**60)
    except MemoryError as error:
        raise OfTwoError("row", 3) from error


def words_of_a_bug() -> None:
    raise ValueError("ask for less: MemoryError and CUDA out of memory are near")


def words_of_two() -> None:
    raise OfTwoError("CUDA out of memory", 3)


def of_a_loader(work: Callable[[], None]) -> Exception:
    """Return the exception that a `DataLoader` raises after its process has raised."""
    try:
        work()
    except Exception:  # noqa: BLE001 - what any process may raise
        wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(Exception, match="Caught") as raised:
        wrapper.reraise()
    return raised.value


def of_a_pool(work: Callable[[], None]) -> Exception:
    """Return the exception that a pool raises after one of its processes has raised."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - what any process may raise
        sent = pickle.dumps(ExceptionWithTraceback(error, error.__traceback__))
    got = pickle.loads(sent)  # noqa: S301 - made here
    assert isinstance(got, Exception)
    return got


@pytest.mark.parametrize("way", [of_a_loader, of_a_pool])
@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (numpy_array, DEFINITE),
        (torch_tensor, DEFINITE),
        (mapped_memory, DEFINITE),
        (chained, DEFINITE),
        (words_of_a_bug, OTHER),
        (words_of_two, OTHER),
    ],
)
def test_what_another_process_raised_is_judged_alike(
    way: Callable[[Callable[[], None]], Exception], work: Callable[[], None], kind: FailureKind
) -> None:
    assert classify(way(work)).kind is kind


TORCHS = torch_class("OutOfMemoryError")


@pytest.mark.parametrize(
    ("error", "kind", "evidence"),
    [
        (MemoryError(), DEFINITE, "type MemoryError"),
        (type("ArrayMemoryError", (MemoryError,), {})("Unable to allocate 2 GiB"), DEFINITE,
         "type MemoryError"),
        (TORCHS("no words needed"), DEFINITE, "type torch.OutOfMemoryError"),
        (torch_class("OutOfMemoryError", "torch.cuda")(), DEFINITE,
         "type torch.cuda.OutOfMemoryError"),
        (torch_class("OutOfMemoryError", "torch._C")(), DEFINITE, "type torch._C.OutOfMemoryError"),
        (type("Mine", (TORCHS,), {"__module__": "mine"})("x"), DEFINITE,
         "type torch.OutOfMemoryError"),
        # The same name from another module means nothing.
        (torch_class("OutOfMemoryError", "torchlike")("of the quarter"), OTHER, "no rule matched"),
        (torch_class("OutOfMemoryError", "accounting.torch")("of the quarter"), OTHER,
         "no rule matched"),
        (OSError(12, "Cannot allocate memory"), DEFINITE, "code errno 12 (ENOMEM)"),
        (OSError(2, "No such file or directory"), OTHER, "no rule matched"),
        (accelerator_error(2), DEFINITE, "code 2 (out of memory)"),
        (accelerator_error(46), CONTEXT_CORRUPTED, "code 46 (CUDA-capable device(s) is/are busy or unavailable)"),
        (accelerator_error(999), CONTEXT_CORRUPTED, "code 999 (unknown error)"),
        # Refused calls, invalid codes, and the code of another library.
        *((accelerator_error(code), OTHER, "no rule matched") for code in (0, 219, None, "700", [700])),
        (accelerator_error(2, of="requests"), OTHER, "no rule matched"),
        # The code has priority; without a code the text decides.
        (accelerator_error(719, "CUDA error: out of memory"), CONTEXT_CORRUPTED,
         "code 719 (unspecified launch failure)"),
        (torch_class("AcceleratorError")("HIP error: out of memory"), DEFINITE,
         'text "HIP error: out of memory"'),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)  # fmt: skip
def test_type_code_and_text_decide_in_this_order(
    error: Exception, kind: FailureKind, evidence: str
) -> None:
    failure = classify(error)
    assert (failure.kind, failure.evidence) == (kind, evidence)
    assert failure.text in {str(error), type(error).__name__}


OOM = RuntimeError("CUDA out of memory.")
ALLOC_FAILED = RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
ILLEGAL_ACCESS = RuntimeError("CUDA error: an illegal memory access was encountered")


def caused_by(cause: Exception, error: Exception | None = None) -> Exception:
    error = error or ValueError("wrapped")
    error.__cause__ = cause
    return error


class TestChain:
    def test_a_context_counts_unless_it_is_suppressed(self) -> None:
        error = ValueError("raised while handling")
        error.__context__ = OOM
        assert classify(error).kind is DEFINITE
        error.__suppress_context__ = True
        assert classify(error).kind is OTHER

    def test_what_was_handled_already_is_no_context(self) -> None:
        error = caused_by(KeyError("its own"))
        error.__cause__.__context__ = OOM
        assert classify(error, OOM).kind is OTHER
        assert classify(error, ALLOC_FAILED).kind is DEFINITE
        assert classify(caused_by(OOM), OOM).kind is DEFINITE, "it was named as the cause"

    def test_the_members_of_groups_count_however_deep(self) -> None:
        group = ExceptionGroup(
            "several", [ValueError("a"), ExceptionGroup("inner", [KeyError("b"), caused_by(OOM)])]
        )
        assert classify(group).kind is DEFINITE

    @pytest.mark.parametrize(
        ("links", "kind"),
        [
            ([OOM, ILLEGAL_ACCESS], CONTEXT_CORRUPTED),
            ([ILLEGAL_ACCESS, OOM], CONTEXT_CORRUPTED),
            ([ALLOC_FAILED, ILLEGAL_ACCESS], CONTEXT_CORRUPTED),
            ([ALLOC_FAILED, OOM], DEFINITE),
            ([OOM, ALLOC_FAILED], DEFINITE),
            ([ValueError("x"), ALLOC_FAILED], PROBABLE),
        ],
    )
    def test_the_gravest_link_wins_wherever_it_stands(
        self, links: list[Exception], kind: FailureKind
    ) -> None:
        copies = [type(link)(*link.args) for link in links]
        for outer, inner in pairwise(copies):
            outer.__cause__ = inner
        assert classify(copies[0]).kind is kind
        assert (
            classify(ExceptionGroup("both", [type(link)(*link.args) for link in links])).kind
            is kind
        )

    def test_a_cycle_and_an_endless_chain_end(self) -> None:
        one, two = ValueError("one"), ValueError("two")
        one.__cause__, two.__cause__, one.__context__ = two, one, one
        assert classify(one).kind is OTHER
        error: Exception = OOM
        for _ in range(10_000):
            error = caused_by(error)
        assert classify(error).kind is OTHER


class TestFailure:
    def test_the_text_is_one_short_line(self) -> None:
        assert classify(RuntimeError("\n\n  first \nsecond")).text == "first"
        assert classify(RuntimeError("x" * 1000)).text == "x" * 300
        assert classify(KeyError()).text == "KeyError"

    def test_an_exception_that_cannot_say_what_it_is_is_still_judged(self) -> None:
        class MuteError(RuntimeError):
            def __str__(self) -> str:
                raise ValueError("no")

        assert classify(MuteError()) == Failure(
            kind=OTHER, evidence="no rule matched", text="MuteError"
        )


def test_a_long_traceback_loses_its_middle() -> None:
    text = traceback_text(RuntimeError("start" + "x" * 50_000 + "end"))
    assert len(text) == 8192
    assert text.startswith("RuntimeError: start")
    assert text.endswith("end\n")
