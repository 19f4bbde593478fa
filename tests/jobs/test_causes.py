"""Each way in which a user's program ends has the right cause."""

from __future__ import annotations

import signal

import pytest

from orchestrator.jobs.causes import cause_of, cause_of_failure
from workers import oom
from workers.messages import Cause

TORCH = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB
"""
ASSERTED = (
    "Indexing.cu:1146: indexSelectLargeIndex: block: [170,0,0], thread: [95,0,0] Assertion "
    "`srcIndex < srcSelectDimSize` failed.\nTraceback (most recent call last):\n"
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`\n"
)
JAX = "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.\n"
TENSORFLOW = (
    "ResourceExhaustedError: OOM when allocating tensor with shape[64,1024] and type float\n"
)
NUMPY = "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array with shape (1000000000,)\n"
SURVIVED = (
    f"{TORCH}skipping this batch\nTraceback (most recent call last):\nValueError: bad label\n"
)
TRACE = "Traceback (most recent call last):\n"
CHAINED = (
    f"{TORCH}\nDuring handling of the above exception, another exception occurred:\n\n"
    "Traceback (most recent call last):\nAttributeError: no such thing\n"
)


#: The last output of a program, its exit code (negative: its signal), and the cause of its end.
WAYS: list[tuple[str, int, Cause]] = [
    ("", 0, Cause.DONE),
    ("", 1, Cause.EXCEPTION),
    ("usage: t.py\nt.py: error: unrecognized arguments: --lrr\n", 2, Cause.BAD_CONFIG),
    ("python: can't open file '/a/b.py': [Errno 2] No such file", 2, Cause.BAD_CONFIG),
    ("", 75, Cause.PARKED),
    ("", 127, Cause.NOT_STARTED),
    ("", 137, Cause.KILLED),
    ("", 139, Cause.EXCEPTION),
    ("", -signal.SIGKILL, Cause.KILLED),
    ("", -signal.SIGSEGV, Cause.EXCEPTION),
    ("", -signal.SIGTERM, Cause.KILLED),
    (TORCH, 1, Cause.OUT_OF_MEMORY),
    (CHAINED, 1, Cause.OUT_OF_MEMORY),
    (SURVIVED, 1, Cause.EXCEPTION),
    (ASSERTED, 1, Cause.EXCEPTION),
    (JAX, 1, Cause.OUT_OF_MEMORY),
    (TENSORFLOW, 1, Cause.OUT_OF_MEMORY),
    (NUMPY, 1, Cause.OUT_OF_MEMORY),
    ("what():  std::bad_alloc\n", -signal.SIGABRT, Cause.OUT_OF_MEMORY),
    ("OSError: [Errno 28] No space left on device\n", 1, Cause.DISK_FULL),
    ("Loss is nan, stopping training\n", 1, Cause.NAN_LOSS),
    ("{'loss': nan, 'step': 7}\n", 1, Cause.NAN_LOSS),
    (f"{TRACE}ModuleNotFoundError: No module named 'x'\n", 1, Cause.BAD_CONFIG),
    ("CUDA error: uncorrectable ECC error encountered\n", 1, Cause.DRIVER),
    ("Unable to determine: GPU is lost\n", 1, Cause.DRIVER),
    ("Error 804: forward compatibility was attempted on non supported HW\n", 1, Cause.DRIVER),
    ("CUDA error: device-side assert triggered\n", 1, Cause.EXCEPTION),
]


@pytest.mark.parametrize(("text", "status", "cause"), WAYS)
def test_cause_of_each_way_to_end(text: str, status: int, cause: Cause) -> None:
    has_failed = status != 0 and oom.judge_log(text) is not None
    assert cause_of(status, text, [Cause.OUT_OF_MEMORY] * has_failed) is cause


@pytest.mark.parametrize(
    ("status", "seen", "cause"),
    [
        (-signal.SIGTERM, Cause.PARKED, Cause.PARKED),
        (-signal.SIGKILL, Cause.TIME_LIMIT, Cause.TIME_LIMIT),
        (-signal.SIGKILL, Cause.HOST_MEMORY, Cause.HOST_MEMORY),
        (1, Cause.DISK_FULL, Cause.DISK_FULL),
        (1, Cause.NAN_LOSS, Cause.NAN_LOSS),
    ],
)
def test_what_its_pc_has_seen_goes_before_its_signal(
    status: int, seen: Cause, cause: Cause
) -> None:
    assert cause_of(status, "", [seen]) is cause


@pytest.mark.parametrize(
    ("failure", "error", "cause"),
    [
        (Cause.DIED, None, Cause.DIED),
        (Cause.HOST_MEMORY, None, Cause.HOST_MEMORY),
        (Cause.DRIVER, None, Cause.DRIVER),
        (Cause.NOT_STARTED, TORCH, Cause.NOT_STARTED),
        (Cause.BAD_CONFIG, TORCH, Cause.BAD_CONFIG),
        (Cause.EXCEPTION, None, Cause.EXCEPTION),
        (Cause.EXCEPTION, "ValueError: bad label", Cause.EXCEPTION),
        (Cause.EXCEPTION, "ValueError: loss is nan", Cause.NAN_LOSS),
        (Cause.EXCEPTION, "OSError: [Errno 28] No space left on device", Cause.DISK_FULL),
        (Cause.EXCEPTION, TORCH, Cause.OUT_OF_MEMORY),
    ],
)
def test_cause_of_a_training_given_up(failure: Cause, error: str | None, cause: Cause) -> None:
    assert cause_of_failure(failure, error) is cause
