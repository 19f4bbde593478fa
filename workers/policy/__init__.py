"""Policies: how large the next part of a step is. No torch, no clock, no randomness, no I/O."""
