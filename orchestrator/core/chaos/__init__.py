"""Injected faults, `run --chaos`: what was asked for, when what is struck, and what became of it.

Pure.
"""
