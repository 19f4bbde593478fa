"""Keeps one program: starts it, tells how it ended, and leaves nothing of it behind."""
