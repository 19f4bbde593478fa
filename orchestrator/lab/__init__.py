"""Experiments on a cluster: tuning, burning in, injected faults. A run works without this folder."""
