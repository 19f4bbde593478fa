"""The machine around the card: platform, Python, Ray, memory, disk, processor, MPS. Pure: facts in, findings out."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.doctor.finding import Finding, dotted, fail, ok, skip, versions, warn
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

#: Their powersave follows the load; that of the other drivers pins the lowest clock (kernel.org, intel_pstate.rst).
_CLEVER_DRIVERS = ("intel_pstate", "amd-pstate-epp")


def check_host(facts: MachineFacts, *, workers: int, compute_share_mode: str) -> Iterator[Finding]:
    """Yield what there is to say about one machine apart from its cards and its environment variables.

    Args:
        facts: Of the machine.
        workers: How many are planned on it; 0 if that is not known.
        compute_share_mode: As in cluster.yaml.
    """
    yield _platform(facts)
    yield _python(facts)
    yield _ray(facts)
    yield _ram(facts, workers)
    yield _shm(facts)
    yield _governor(facts)
    yield _mps(facts, compute_share_mode)


def _platform(facts: MachineFacts) -> Finding:
    if facts.is_wsl:
        return warn(
            "platform",
            f"WSL2 (kernel {facts.kernel}): no MPS, no memory per process, and a full card spills into the PC's memory "
            f"instead of failing",
            hint="leave a part of the card to Windows (memory_fraction), as `init` does; for long runs start Linux",
        )
    if facts.system != "linux":
        return fail("platform", f"{facts.system}: workers need Linux", hint="on Windows, WSL2 will do")
    return ok("platform", f"Linux {facts.kernel}")


def _python(facts: MachineFacts) -> Finding:
    if versions(facts.python) < _LEAST_PYTHON:
        return fail("python", f"{facts.python} is too old", fix=f"make setup PYTHON=python{dotted(_LEAST_PYTHON)}")
    return ok("python", facts.python)


def _ray(facts: MachineFacts) -> Finding:
    if facts.ray is None:
        return fail("ray", "is not installed in this Python", fix="make setup")
    if versions(facts.ray) < _LEAST_RAY:
        found = f"{facts.ray} is too old; {dotted(_LEAST_RAY)} or newer is needed, the same on every PC"
        return fail("ray", found, fix="make setup")
    return ok("ray", facts.ray)


def _ram(facts: MachineFacts, workers: int) -> Finding:
    found = f"{facts.ram_available_bytes / GIB:.1f} of {facts.ram_total_bytes / GIB:.1f} GiB free"
    need_bytes = max(2, workers) * _WORKER_RAM_BYTES
    if facts.ram_available_bytes < need_bytes:
        planned = f"{workers} workers take" if workers > 1 else "a few workers take"
        hint = f"{planned} about {need_bytes / GIB:.0f} GiB; end other programs, or plan fewer workers"
        return warn("ram", found, hint=hint, fix="ps aux --sort=-rss | head")
    return ok("ram", found)


def _shm(facts: MachineFacts) -> Finding:
    if facts.shm_total_bytes is None:
        return skip("shm", "there is no /dev/shm here")
    found = f"Ray's shared memory holds {facts.shm_total_bytes / GIB:.2f} GiB"
    if facts.shm_total_bytes < _SMALL_SHM_BYTES:
        return warn(
            "shm",
            f"{found} (/dev/shm), so that its object store goes to the disk",
            hint="in a container: start it with --shm-size=2g",
            fix="sudo mount -o remount,size=2G /dev/shm",
        )
    return ok("shm", found)


def check_disk(free_bytes: int | None) -> Finding:
    """Return whether the disk has room for run folders; only that of the machine where `run` is typed gets them."""
    if free_bytes is None:
        return skip("disk", "the free space of the run folders' disk is unknown")
    found = f"{free_bytes / GIB:.1f} GiB free where run folders go"
    hint = "or choose another disk: --set run.dir=/some/where"
    if free_bytes < _NO_DISK_BYTES:
        return fail("disk", f"{found}: a run could not be recorded", hint=hint, fix="du -xh --max-depth=2 ~ | sort -h")
    if free_bytes < _LITTLE_DISK_BYTES:
        return warn("disk", f"{found}; a long run takes up to 1 GiB", hint=hint, fix="du -xh --max-depth=2 ~ | sort -h")
    return ok("disk", found)


def _governor(facts: MachineFacts) -> Finding:
    if not facts.cpu_governors:
        return skip("cpu_governor", "the kernel does not report it (a virtual machine, or WSL2)")
    named = " and ".join(facts.cpu_governors)
    if "powersave" in facts.cpu_governors and facts.cpu_scaling_driver not in _CLEVER_DRIVERS:
        return warn(
            "cpu_governor",
            f"{named} holds the cores at their lowest clock; workers feed their card more slowly",
            fix="sudo cpupower frequency-set -g schedutil",
        )
    return ok("cpu_governor", named)


def _mps(facts: MachineFacts, compute_share_mode: str) -> Finding:
    wanted = compute_share_mode == "mps"
    if facts.mps_daemon:
        found = "its control daemon runs; a fatal error of one worker ends every worker on that card"
        return ok("mps", found) if wanted else ok("mps", f"{found}; cluster.yaml does not ask for it")
    if not wanted:
        return skip("mps", "not asked for (compute_share_mode is not mps)")
    if facts.is_wsl:
        return fail("mps", "cluster.yaml asks for it, and it cannot run under WSL2", hint="compute_share_mode: duty")
    if not facts.visible_cards:
        return skip("mps", "no card")
    return warn(
        "mps",
        "no control daemon runs; a run starts one of its own, or pauses its workers instead if that is not installed",
        fix="command -v nvidia-cuda-mps-control",
    )
