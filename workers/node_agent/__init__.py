"""What is set on a node for a run, and put back afterwards."""
