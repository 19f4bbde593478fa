"""Runs an unmodified program under a memory cap: `python -m workers.capped`."""
