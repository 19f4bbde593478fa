"""Says why cards were not busy in a run, and which keys to change. Measures nothing."""
