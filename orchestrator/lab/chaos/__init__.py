"""`run --chaos`: injected faults of workers and nodes, and what became of each."""
