"""What a shell has set does not decide how a worker's cap is kept."""

from __future__ import annotations

from workers.host.cuda_environment import set_for_cuda


def test_other_allocators_are_put_aside_and_the_rest_stays() -> None:
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "HOME": "/"}
    set_for_cuda(environment)
    assert environment == {"HOME": "/", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TORCH_CUBLAS_WORKSPACE_CACHE": "1"}


def test_what_somebody_chose_stays() -> None:
    chosen = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "TORCH_CUBLAS_WORKSPACE_CACHE": "0"}
    environment = dict(chosen)
    set_for_cuda(environment)
    assert environment == chosen
