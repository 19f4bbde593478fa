"""Runs a program of the user as it is, in place of an engine, and watches it."""
