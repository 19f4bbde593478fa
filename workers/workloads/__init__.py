"""Workloads: what a worker computes, and how size and batch become tensors."""
