"""`report --html`: a run in one file, the page of `web` with its data frozen."""
