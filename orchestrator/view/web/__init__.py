"""The web page of a run: a process separate from the head serves it, and reads the run folder."""
