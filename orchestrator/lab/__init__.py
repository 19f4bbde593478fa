"""Experiments on a cluster: tuning, burning in, advice. A run works without this folder."""
