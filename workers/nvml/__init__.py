"""Questions to NVML, and a fake NVML that answers by a script."""
