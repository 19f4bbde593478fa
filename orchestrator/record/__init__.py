"""The files in a run folder: how they are written and read back."""
