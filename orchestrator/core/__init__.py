"""Decisions of the head: events in, decisions out. No clock, no randomness, no I/O, no Ray."""
