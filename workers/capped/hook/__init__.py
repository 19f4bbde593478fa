"""Modules that a capped interpreter imports at its start; first folder of its PYTHONPATH."""
