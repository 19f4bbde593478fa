"""One worker: runs slices of steps, survives out-of-memory, reports."""
