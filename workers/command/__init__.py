"""Prepares a user's program to run in a slot in place of an engine, and reads its results."""
