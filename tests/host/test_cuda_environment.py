"""What a shell has set does not decide how a worker's cap is kept."""

from __future__ import annotations

from workers.host.cuda_environment import set_for_cuda, workspace_bytes, workspace_of


def test_what_somebody_chose_stays() -> None:
    chosen = {
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
        "TORCH_CUBLAS_WORKSPACE_CACHE": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    }
    environment = dict(chosen)
    set_for_cuda(environment)
    assert environment == chosen


def test_a_deterministic_training_has_its_workspace() -> None:
    """Torch refuses to compute deterministically with any other, and cuBLAS reads it with its first product."""
    environment: dict[str, str] = {}
    set_for_cuda(environment, workspace_of({"deterministic": True}))
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert workspace_bytes(":4096:8") == 32 * 2**20
    assert workspace_bytes(":4096:2:16:8") == 8 * 2**20 + 128 * 2**10
