"""Queries to NVML: memory, processes and sensors of a card."""
