"""Runs a program that is not changed under a memory cap: `python -m workers.capped`."""
