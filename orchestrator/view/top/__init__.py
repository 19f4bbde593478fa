"""`top`: a run on the whole terminal, followed from any terminal, or shown as it ended."""
