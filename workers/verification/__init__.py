"""Whether a device's results are right: Freivalds' test, bitwise repeat, and when each is run."""
