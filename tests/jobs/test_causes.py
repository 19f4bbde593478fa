"""Each way in which a program of the user ends has the right cause, and the right consequence."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.jobs.causes import cause_of, cause_of_failure, is_final
from orchestrator.jobs.model import Job, JobState, Standing
from workers import oom
from workers.messages import Cause, Ending

TORCH = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB
"""
CUBLAS = (
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n"
)
CUDA = (
    "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported\n"
)
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
CHAINED = (
    f"{TORCH}\nDuring handling of the above exception, another exception occurred:\n\n"
    "Traceback (most recent call last):\nAttributeError: no such thing\n"
)


def ending(text: str = "", *, on_card: bool = True, **how: Any) -> Ending:
    """What the worker says of a program that ended so, judged by the words of its log as there."""
    how = {"exit_code": None if "signal" in how else 1, **how}
    words = oom.judge_log(text) if how["exit_code"] != 0 else None
    on_host = words == "host" and on_card
    judged = {
        "out_of_memory": words is not None and not on_host,
        "host_memory": on_host,
    }
    return Ending(**{"text": text, **judged, **how})


WAYS: list[tuple[str, Ending, Cause]] = [
    ("0", ending(exit_code=0), Cause.DONE),
    ("1", ending(), Cause.EXCEPTION),
    (
        "2 of argparse",
        ending("usage: t.py\nt.py: error: unrecognized arguments: --lrr\n", exit_code=2),
        Cause.BAD_CONFIG,
    ),
    (
        "2 of python",
        ending("python: can't open file '/a/b.py': [Errno 2] No such file", exit_code=2),
        Cause.BAD_CONFIG,
    ),
    ("75", ending(exit_code=75), Cause.PARKED),
    ("127", ending(exit_code=127), Cause.NOT_STARTED),
    ("137", ending(exit_code=137), Cause.KILLED),
    ("139", ending(exit_code=139), Cause.EXCEPTION),
    ("KILL", ending(signal=signal.SIGKILL), Cause.KILLED),
    ("SEGV", ending(signal=signal.SIGSEGV), Cause.EXCEPTION),
    ("TERM", ending(signal=signal.SIGTERM), Cause.KILLED),
    ("TERM as asked", ending(signal=signal.SIGTERM, was_asked=True), Cause.PARKED),
    ("KILL after its time", ending(signal=signal.SIGKILL, time_limit=True), Cause.TIME_LIMIT),
    ("KILL by the kernel", ending(signal=signal.SIGKILL, host_memory=True), Cause.HOST_MEMORY),
    ("torch", ending(TORCH), Cause.OUT_OF_MEMORY),
    ("torch, then another of it", ending(CHAINED), Cause.OUT_OF_MEMORY),
    ("torch, survived", ending(SURVIVED), Cause.EXCEPTION),
    ("CUDA", ending(CUDA), Cause.OUT_OF_MEMORY),
    ("cuBLAS", ending(CUBLAS), Cause.OUT_OF_MEMORY),
    ("cuBLAS after an assertion", ending(ASSERTED), Cause.EXCEPTION),
    ("JAX", ending(JAX), Cause.OUT_OF_MEMORY),
    ("TensorFlow", ending(TENSORFLOW), Cause.OUT_OF_MEMORY),
    ("NumPy under a cap", ending(NUMPY, on_card=False), Cause.OUT_OF_MEMORY),
    ("NumPy beside a card", ending(NUMPY), Cause.HOST_MEMORY),
    (
        "bad_alloc",
        ending("what():  std::bad_alloc\n", on_card=False, signal=6),
        Cause.OUT_OF_MEMORY,
    ),
    ("disk", ending("OSError: [Errno 28] No space left on device\n"), Cause.DISK_FULL),
    ("disk, seen", ending(disk_full=True), Cause.DISK_FULL),
    ("NaN", ending("Loss is nan, stopping training\n"), Cause.NAN_LOSS),
    ("NaN in a line", ending("{'loss': nan, 'step': 7}\n"), Cause.NAN_LOSS),
    ("NaN in its results", ending(nan_loss=True), Cause.NAN_LOSS),
    (
        "a module",
        ending("Traceback (most recent call last):\nModuleNotFoundError: No module named 'x'\n"),
        Cause.BAD_CONFIG,
    ),
    ("ECC", ending("CUDA error: uncorrectable ECC error encountered\n"), Cause.DRIVER),
    ("off the bus", ending("Unable to determine: GPU is lost\n"), Cause.DRIVER),
    (
        "after an update of the driver",
        ending("Error 804: forward compatibility was attempted on non supported HW\n"),
        Cause.DRIVER,
    ),
    ("an index on the card", ending("CUDA error: device-side assert triggered\n"), Cause.EXCEPTION),
    ("no such folder", ending("cannot be started", started=False), Cause.NOT_STARTED),
]


@pytest.mark.parametrize(("how", "cause"), [way[1:] for way in WAYS], ids=[way[0] for way in WAYS])
def test_cause_of_each_way_to_end(how: Ending, cause: Cause) -> None:
    assert cause_of(how) is cause


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


STANDING = Standing(job=Job(name="a", id="1"), state=JobState.RUNNING, reason="", since_s=0.0)


@pytest.mark.parametrize(
    ("text", "step", "final"),
    [
        ("RuntimeError at 0x7f01 in batch 18", 500, True),
        ("RuntimeError at 0x7f01 in batch 18", 700, False),
        ("RuntimeError at 0x7f01 in batch 18", None, False),
        ("another", 500, False),
    ],
)
def test_same_exception_at_the_same_step(text: str, step: int | None, final: bool) -> None:
    before = replace(STANDING, last_error="RuntimeError at 0x7f99 in batch 17", step=500)
    assert is_final(Cause.EXCEPTION, before, text, step) is final
