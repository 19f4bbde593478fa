"""Every exception known to mean something for the worker, and several that only look like it."""

from __future__ import annotations

import gc
import pickle
import textwrap
import weakref
from itertools import pairwise
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from workers.errors import ContextCorruptedError, IncompatibleError
from workers.oom import Failure, classify, traceback_text
from workers.settings import FailureKind

ROOT = Path(__file__).parents[2]

DEFINITE, PROBABLE = FailureKind.DEFINITE, FailureKind.PROBABLE
CONTEXT_CORRUPTED, OTHER = FailureKind.CONTEXT_CORRUPTED, FailureKind.OTHER

#: What torch appends to every CUDA error; it mentions a device-side assertion in passing.
CUDA_HINTS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)


def torch_class(name: str, module: str = "torch") -> type[RuntimeError]:
    """Make a class like torch's own, without torch."""
    return type(name, (RuntimeError,), {"__module__": module})


def accelerator_error(code: object, message: str = "CUDA error: anything") -> RuntimeError:
    error = torch_class("AcceleratorError")(message)
    error.error_code = code  # type: ignore[attr-defined]
    return error


def kind_of_text(message: str) -> FailureKind:
    return classify(RuntimeError(message)).kind


class TestText:
    @pytest.mark.parametrize(
        "message",
        [
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.67 GiB",
            "CUDA out of memory, without a full stop",
            "CUDA error: out of memory" + CUDA_HINTS,
            "CUDA driver error: out of memory",
            "Triton Error [CUDA]: CUDA_ERROR_OUT_OF_MEMORY",
            "HIP out of memory. Tried to allocate 20.00 MiB",
            "HIP error: out of memory",
            "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 6.10 GiB",
            "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
            "[enforce fail at alloc_cpu.cpp:75] data. DefaultCPUAllocator: not enough memory: you tried to allocate",
            "unable to mmap 1024 bytes from file <x>: Error code 12 (Cannot allocate memory)",
            "std::bad_alloc",
            "Failed to allocate a Tensor object",
        ],
    )
    def test_out_of_memory_is_definite(self, message: str) -> None:
        assert kind_of_text(message) is DEFINITE

    @pytest.mark.parametrize(
        "message",
        [
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
            "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
            "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
            "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
            "cuFFT error: CUFFT_ALLOC_FAILED",
            "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
            "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
            "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
            "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
            "GET was unable to find an engine to execute this computation",
            "could not create a primitive",
            "could not create a memory",
            "could not create a memory object",
            "!handles_.at(i) INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:300, please report a bug to PyTorch.",
            "CUDA driver error: device not ready",
        ],
    )
    def test_a_failed_allocation_below_torch_is_probable(self, message: str) -> None:
        assert kind_of_text(message) is PROBABLE

    @pytest.mark.parametrize(
        "message",
        [
            "CUDA error: an illegal memory access was encountered" + CUDA_HINTS,
            "CUDA error: device-side assert triggered" + CUDA_HINTS,
            "CUDA error: unspecified launch failure" + CUDA_HINTS,
            "CUDA error: misaligned address" + CUDA_HINTS,
            "CUDA error: uncorrectable ECC error encountered",
            "CUDA error: uncorrectable NVLink error detected during the execution",
            "CUDA error: the launch timed out and was terminated",
            "CUDA error: an illegal instruction was encountered",
            "CUDA error: hardware stack error",
            "CUDA error: invalid program counter",
            "CUDA error: operation not supported on global/shared address space",
            "CUDA error: context is destroyed",
            "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
            "CUDA error: no CUDA-capable device is detected",
            "CUDA error: invalid device ordinal",
            "CUDA error: unknown error" + CUDA_HINTS,
            "CUDA driver error: unknown error",
            "CUDA error: the MPS client has been terminated by the server",
            "HIP error: unspecified launch failure",
            "HIP error: unknown error",
            "Triton Error [CUDA]: context is destroyed",
            "NCCL error, last error: Cuda failure 700 'an illegal memory access was encountered'",
            "GPU is lost",
            "Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost. Reboot the system",
            "GPU 0 has fallen off the bus",
            "CUDA error: device unavailable",
        ],
    )
    def test_a_device_beyond_repair_is_poisoned(self, message: str) -> None:
        assert kind_of_text(message) is CONTEXT_CORRUPTED

    @pytest.mark.parametrize(
        "message",
        [
            "",
            "out of memory budget for this quarter",
            "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
            "CUDA error: invalid argument" + CUDA_HINTS,
            "CUDA error: too many resources requested for launch",
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
            "could not create a primitive descriptor for the matmul primitive. Run workload with environment variable",
            "could not create a memory descriptor",
            "the service answered: unknown error",
            "hardware stack error, says the printer",
            "ran out of memories to share",
        ],
    )
    def test_anything_else_is_the_workloads_own_error(self, message: str) -> None:
        assert kind_of_text(message) is OTHER

    @pytest.mark.parametrize("exception_type", [ValueError, Exception, AssertionError, KeyError, OSError])
    def test_text_counts_only_in_what_torch_raises(self, exception_type: type[Exception]) -> None:
        assert classify(exception_type("CUDA out of memory. Tried to allocate 2.00 GiB")).kind is OTHER
        assert classify(exception_type("CUDA error: device-side assert triggered")).kind is OTHER

    @pytest.mark.parametrize("exception_type", [RuntimeError, NotImplementedError, SystemError])
    def test_text_counts_in_the_whole_runtime_error_family(self, exception_type: type[Exception]) -> None:
        assert classify(exception_type("CUDA out of memory.")).kind is DEFINITE


class TestType:
    def test_pythons_own(self) -> None:
        assert classify(MemoryError()) == Failure(kind=DEFINITE, evidence="type MemoryError", text="MemoryError")

    def test_a_subclass_of_pythons_own(self) -> None:
        assert classify(type("ArrayMemoryError", (MemoryError,), {})("Unable to allocate 2 GiB")).kind is DEFINITE

    @pytest.mark.parametrize("module", ["torch", "torch.cuda", "torch._C"])
    def test_torchs_under_any_of_its_names(self, module: str) -> None:
        failure = classify(torch_class("OutOfMemoryError", module)("no words needed"))
        assert failure == Failure(kind=DEFINITE, evidence=f"type {module}.OutOfMemoryError", text="no words needed")

    def test_a_subclass_of_torchs(self) -> None:
        subclass = type("Mine", (torch_class("OutOfMemoryError"),), {"__module__": "mine"})
        assert classify(subclass("x")).evidence == "type torch.OutOfMemoryError"

    @pytest.mark.parametrize("module", ["torchlike", "accounting.torch", "mine"])
    def test_the_same_name_from_elsewhere_means_nothing(self, module: str) -> None:
        assert classify(torch_class("OutOfMemoryError", module)("of the quarter")).kind is OTHER

    def test_the_kernel_refusing_memory(self) -> None:
        assert classify(OSError(12, "Cannot allocate memory")).kind is DEFINITE
        assert classify(OSError(2, "No such file or directory")).kind is OTHER


class TestCode:
    def test_out_of_memory(self) -> None:
        failure = classify(accelerator_error(2))
        assert (failure.kind, failure.evidence) == (DEFINITE, "code 2 (cudaErrorMemoryAllocation)")

    @pytest.mark.parametrize(
        ("code", "name"),
        [
            (46, "cudaErrorDevicesUnavailable"),
            (100, "cudaErrorNoDevice"),
            (101, "cudaErrorInvalidDevice"),
            (214, "cudaErrorECCUncorrectable"),
            (220, "cudaErrorNvlinkUncorrectable"),
            (226, "cudaErrorContained"),
            (700, "cudaErrorIllegalAddress"),
            (702, "cudaErrorLaunchTimeout"),
            (709, "cudaErrorContextIsDestroyed"),
            (710, "cudaErrorAssert"),
            (714, "cudaErrorHardwareStackError"),
            (715, "cudaErrorIllegalInstruction"),
            (716, "cudaErrorMisalignedAddress"),
            (717, "cudaErrorInvalidAddressSpace"),
            (718, "cudaErrorInvalidPc"),
            (719, "cudaErrorLaunchFailure"),
            (721, "cudaErrorTensorMemoryLeak"),
            (802, "cudaErrorSystemNotReady"),
            (803, "cudaErrorSystemDriverMismatch"),
            (805, "cudaErrorMpsConnectionFailed"),
            (806, "cudaErrorMpsRpcFailure"),
            (807, "cudaErrorMpsServerNotReady"),
            (808, "cudaErrorMpsMaxClientsReached"),
            (809, "cudaErrorMpsMaxConnectionsReached"),
            (810, "cudaErrorMpsClientTerminated"),
            (911, "cudaErrorExternalDevice"),
            (999, "cudaErrorUnknown"),
        ],
    )
    def test_poisoned(self, code: int, name: str) -> None:
        failure = classify(accelerator_error(code))
        assert (failure.kind, failure.evidence) == (CONTEXT_CORRUPTED, f"code {code} ({name})")

    @pytest.mark.parametrize("code", [0, 1, 219, 701, 720, None, "700", [700]])
    def test_a_refused_call_or_nonsense_is_neither(self, code: object) -> None:
        assert classify(accelerator_error(code)).kind is OTHER

    def test_without_a_code_the_text_decides(self) -> None:
        assert classify(torch_class("AcceleratorError")("CUDA error: out of memory")).kind is DEFINITE

    def test_the_code_goes_before_the_text(self) -> None:
        assert classify(accelerator_error(719, "CUDA error: out of memory")).kind is CONTEXT_CORRUPTED

    def test_a_code_means_nothing_on_any_other_exception(self) -> None:
        error = RuntimeError("request failed")
        error.error_code = 2  # type: ignore[attr-defined]
        assert classify(error).kind is OTHER


OOM = RuntimeError("CUDA out of memory.")
ALLOC_FAILED = RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
ILLEGAL_ACCESS = RuntimeError("CUDA error: an illegal memory access was encountered")


def caused_by(cause: Exception, error: Exception | None = None) -> Exception:
    error = error or ValueError("wrapped")
    error.__cause__ = cause
    return error


class TestChain:
    def test_a_cause_counts(self) -> None:
        failure = classify(caused_by(caused_by(OOM)))
        assert (failure.kind, failure.text) == (DEFINITE, "CUDA out of memory.")

    def test_a_context_counts_unless_it_is_suppressed(self) -> None:
        error = ValueError("raised while handling")
        error.__context__ = OOM
        assert classify(error).kind is DEFINITE
        error.__suppress_context__ = True
        assert classify(error).kind is OTHER

    def test_the_members_of_groups_count_however_deep(self) -> None:
        group = ExceptionGroup("several", [ValueError("a"), ExceptionGroup("inner", [KeyError("b"), caused_by(OOM)])])
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
    def test_the_gravest_link_wins_wherever_it_stands(self, links: list[Exception], kind: FailureKind) -> None:
        copies = [type(link)(*link.args) for link in links]
        for outer, inner in pairwise(copies):
            outer.__cause__ = inner
        assert classify(copies[0]).kind is kind
        assert classify(ExceptionGroup("both", [type(link)(*link.args) for link in links])).kind is kind

    def test_of_equals_the_nearest_is_quoted(self) -> None:
        assert classify(caused_by(OOM, MemoryError("the nearest"))).text == "the nearest"

    def test_a_cycle_ends(self) -> None:
        one, two = ValueError("one"), ValueError("two")
        one.__cause__, two.__cause__ = two, one
        one.__context__ = one
        assert classify(one).kind is OTHER

    def test_an_endless_chain_ends(self) -> None:
        error: Exception = OOM
        for _ in range(10_000):
            error = caused_by(error)
        assert classify(error).kind is OTHER


class TestFailure:
    def test_it_survives_pickling(self) -> None:
        failure = classify(OOM)
        assert pickle.loads(pickle.dumps(failure)) == failure  # noqa: S301 -- our own bytes

    def test_the_text_is_one_short_line(self) -> None:
        assert classify(RuntimeError("\n\n  first \nsecond")).text == "first"
        assert classify(RuntimeError("x" * 1000)).text == "x" * 300
        assert classify(KeyError()).text == "KeyError"

    def test_an_exception_that_cannot_say_what_it_is_is_still_judged(self) -> None:
        class MuteError(RuntimeError):
            def __str__(self) -> str:
                raise ValueError("no")

        assert classify(MuteError()) == Failure(kind=OTHER, evidence="no rule matched", text="MuteError")

    @pytest.mark.parametrize("error_type", [IncompatibleError, ContextCorruptedError])
    def test_our_own_errors_survive_pickling(self, error_type: type[IncompatibleError | ContextCorruptedError]) -> None:
        copy = pickle.loads(pickle.dumps(error_type("The card is an RTX 3060.")))  # noqa: S301 -- our own bytes
        assert (type(copy), str(copy), copy.sentence) == (error_type, "The card is an RTX 3060.", copy.args[0])

    def test_only_a_poisoned_device_is_worth_another_process(self) -> None:
        assert not IncompatibleError.retryable
        assert ContextCorruptedError.retryable


class Tensor:
    """Stands for memory that a frame holds."""


def fail_holding(tensors: list[weakref.ref[Tensor]]) -> None:
    tensor = Tensor()
    tensors.append(weakref.ref(tensor))
    raise RuntimeError("second") from MemoryError("first")


class TestTraceback:
    def test_it_shows_the_whole_chain(self) -> None:
        try:
            fail_holding([])
        except RuntimeError as error:
            text = traceback_text(error)
        assert "MemoryError: first" in text
        assert "direct cause" in text
        assert text.endswith("RuntimeError: second\n")
        assert "fail_holding" in text

    def test_what_is_kept_holds_no_tensor(self) -> None:
        tensors: list[weakref.ref[Tensor]] = []
        gc.disable()  # what only the cycle collector frees would still be in the way of the next attempt
        try:
            try:
                fail_holding(tensors)
            except RuntimeError as error:
                kept = classify(error), traceback_text(error)
            assert kept
            assert tensors[0]() is None
        finally:
            gc.enable()

    @pytest.mark.parametrize("limit_chars", [0, 1, 5, 10, 100, 1000])
    def test_it_keeps_to_its_limit(self, limit_chars: int) -> None:
        text = traceback_text(RuntimeError("x" * 5000 + "end"), limit_chars)
        assert len(text) == limit_chars

    def test_a_long_one_loses_its_middle(self) -> None:
        text = traceback_text(RuntimeError("start" + "x" * 50_000 + "end"))
        assert len(text) == 8192
        assert text.startswith("RuntimeError: start")
        assert text.endswith("end\n")


def test_a_real_refusal_by_the_kernel_is_definite(fork_server: ForkServer) -> None:
    """RLIMIT_DATA makes the kernel refuse, torch raises whatever it raises, and the process goes on."""
    script = textwrap.dedent(
        """
        import resource
        import warnings

        warnings.simplefilter("ignore")
        import torch

        from workers.oom import classify

        def data_bytes():
            with open("/proc/self/status") as status:
                line = next(line for line in status if line.startswith("VmData"))
            return int(line.split()[1]) * 1024

        mib = 1 << 20
        torch.zeros(mib) @ torch.zeros(mib)
        limit = data_bytes() + 64 * mib
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        failure = None
        try:
            torch.empty(256 * mib, dtype=torch.uint8)
        except Exception as error:
            failure = classify(error)
        print(failure.kind, "|", failure.evidence)
        print(torch.ones(mib).sum().item())
        """
    )
    done = fork_server.run(script)
    assert done.returncode == 0, done.stderr
    verdict, still_alive = done.stdout.splitlines()
    assert verdict == 'definite | text "DefaultCPUAllocator: can\'t allocate memory"'
    assert still_alive == "1048576.0"
