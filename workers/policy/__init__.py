"""Policies: events in, decisions out. No torch, no clock, no randomness, no I/O."""
