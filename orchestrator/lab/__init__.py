"""Experiments on a cluster: tuning, burn-in, injected faults. A run works without this folder."""
