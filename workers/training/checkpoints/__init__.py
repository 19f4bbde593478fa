"""Checkpoints of a training: copied to the host, written by one thread, verified when they are read."""
