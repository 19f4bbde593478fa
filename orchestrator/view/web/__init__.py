"""The web page of a run: a server of its own that reads the run folder. Never part of the head."""
