"""Keeps one program: starts it, reports how it ended, and ends all of its processes."""
