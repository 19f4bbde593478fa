"""One machine: its cards (`checks_card`), platform, memory, processor, MPS, variables. Pure: facts
in, findings out.

Not looked at are variables that workers set for themselves, as for the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from orchestrator.doctor.checks_card import card_checks
from orchestrator.doctor.finding import Finding, dotted, fail, named, ok, skip, versions, warn
from workers.host.facts import MachineFacts
from workers.units import GIB, MIB

#: As in pyproject.toml.
_LEAST_PYTHON = (3, 11)
_LEAST_RAY = (2, 56)

#: A raylet of a rehearsal takes 80 MiB, that of `ray start` as much as it can.
_SMALL_SHM_BYTES = 1 * GIB
#: RAM of a worker with a card: torch's CUDA libraries and some reserve.
_WORKER_RAM_BYTES = 1 * GIB
_LITTLE_DISK_BYTES = 1 * GIB
_NO_DISK_BYTES = 64 * MIB

#: Their powersave follows the load; that of the other drivers pins the lowest clock (kernel.org,
#: intel_pstate.rst).
_CLEVER_DRIVERS = ("intel_pstate", "amd-pstate-epp")

#: Variables of old guides: which values are meant (none: any), and what is wrong with them.
_OLD_ADVICE = {
    "PYTORCH_CUDA_MEMCHECK": (
        (),
        "a flag of PyTorch's own test suite; does nothing here (use compute-sanitizer)",
    ),
    "TORCH_USE_CUDA_DSA": ((), "a setting for building PyTorch; does nothing at run time"),
    "CUDA_LAUNCH_BLOCKING": (
        ("1", "true", "TRUE"),
        "each kernel waits for the one before; slow, for debugging only",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        ("1",),
        "switches torch's allocator off, and every cap with it; workers of a run ignore it",
    ),
    "NVIDIA_TF32_OVERRIDE": (
        (),
        (
            "0 forbids TF32 to every program, other values mean nothing; say it in cluster.yaml: "
            "workload.dtype: tf32"
        ),
    ),
}


def check_machine(facts: MachineFacts, *, workers: int, mps: bool) -> list[Finding]:
    """Return what there is to say about one machine, on which so many workers are planned.

    0 if that is not known.
    """
    around: dict[str, Finding | Iterable[Finding]] = {
        "platform": _platform(facts),
        "python": _python(facts),
        "ray": _ray(facts),
        "ram": _ram(facts, workers),
        "shm": _shm(facts),
        "cpu_governor": _governor(facts),
        "mps": _mps(facts, wanted=mps),
        "variables": _bogus(facts),
    }
    return named({**card_checks(facts), **around})


def _platform(facts: MachineFacts) -> Finding:
    if facts.is_wsl:
        return warn(
            f"WSL2 (kernel {facts.kernel}): no MPS, no memory per process, and a full card spills "
            "into the PC's memory "
            f"instead of failing",
            hint="leave a part of the card to Windows (memory_fraction), as `init` does; for long "
            "runs start Linux",
        )
    if facts.system != "linux":
        return fail(f"{facts.system}: workers need Linux", hint="on Windows, WSL2 will do")
    return ok(f"Linux {facts.kernel}")


def _python(facts: MachineFacts) -> Finding:
    if versions(facts.python) < _LEAST_PYTHON:
        return fail(
            f"{facts.python} is too old", fix=f"make setup PYTHON=python{dotted(_LEAST_PYTHON)}"
        )
    return ok(facts.python)


def _ray(facts: MachineFacts) -> Finding:
    if facts.ray is None:
        return fail("is not installed in this Python", fix="make setup")
    if versions(facts.ray) < _LEAST_RAY:
        found = (
            f"{facts.ray} is too old; {dotted(_LEAST_RAY)} or newer is needed, the same on every PC"
        )
        return fail(found, fix="make setup")
    return ok(facts.ray)


def _ram(facts: MachineFacts, workers: int) -> Finding:
    found = f"{facts.ram_available_bytes / GIB:.1f} of {facts.ram_total_bytes / GIB:.1f} GiB free"
    need_bytes = max(2, workers) * _WORKER_RAM_BYTES
    if facts.ram_available_bytes < need_bytes:
        planned = f"{workers} workers take" if workers > 1 else "a few workers take"
        hint = (
            f"{planned} about {need_bytes / GIB:.0f} GiB; end other programs, or plan fewer workers"
        )
        return warn(found, hint=hint, fix="ps aux --sort=-rss | head")
    return ok(found)


def _shm(facts: MachineFacts) -> Finding:
    if facts.shm_total_bytes is None:
        return skip("there is no /dev/shm here")
    found = f"Ray's shared memory holds {facts.shm_total_bytes / GIB:.2f} GiB"
    if facts.shm_total_bytes < _SMALL_SHM_BYTES:
        return warn(
            f"{found} (/dev/shm), so that its object store goes to the disk",
            hint="in a container: start it with --shm-size=2g",
            fix="sudo mount -o remount,size=2G /dev/shm",
        )
    return ok(found)


def check_disk(free_bytes: int | None) -> Finding:
    """Return whether the disk has room for run folders.

    Only that of the machine where `run` is typed gets them.
    """
    if free_bytes is None:
        return skip("the free space of the run folders' disk is unknown")
    found = f"{free_bytes / GIB:.1f} GiB free where run folders go"
    hint = "or choose another disk: --set run.dir=/some/where"
    if free_bytes < _NO_DISK_BYTES:
        return fail(
            f"{found}: a run could not be recorded",
            hint=hint,
            fix="du -xh --max-depth=2 ~ | sort -h",
        )
    if free_bytes < _LITTLE_DISK_BYTES:
        return warn(
            f"{found}; a long run takes up to 1 GiB",
            hint=hint,
            fix="du -xh --max-depth=2 ~ | sort -h",
        )
    return ok(found)


def _governor(facts: MachineFacts) -> Finding:
    if not facts.cpu_governors:
        return skip("the kernel does not report it (a virtual machine, or WSL2)")
    governors = " and ".join(facts.cpu_governors)
    if "powersave" in facts.cpu_governors and facts.cpu_scaling_driver not in _CLEVER_DRIVERS:
        return warn(
            f"{governors} holds the cores at their lowest clock; workers feed their card more "
            "slowly",
            fix="sudo cpupower frequency-set -g schedutil",
        )
    return ok(governors)


def _mps(facts: MachineFacts, *, wanted: bool) -> Finding:
    if facts.mps_daemon:
        found = (
            "its control daemon runs; a fatal error of one worker ends every worker on that card"
        )
        return ok(found) if wanted else ok(f"{found}; cluster.yaml does not ask for it")
    if not wanted:
        return skip("not asked for (workers.mps is false)")
    if facts.is_wsl:
        return fail(
            "cluster.yaml asks for it, and it cannot run under WSL2",
            hint="workers.mps: false",
        )
    if not facts.visible_cards:
        return skip("no card")
    return fail(
        "cluster.yaml asks for it, and no control daemon runs", fix="nvidia-cuda-mps-control -d"
    )


def _bogus(facts: MachineFacts) -> Iterator[Finding]:
    found = False
    for name, (values, words) in _OLD_ADVICE.items():
        value = facts.setting(name)
        if value is not None and (not values or value in values):
            found = True
            yield warn(f"{name}={value}: {words}", fix=f"unset {name}")
    if not found:
        yield ok("none of those that old guides recommend and that do harm or nothing")
