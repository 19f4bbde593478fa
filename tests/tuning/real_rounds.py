"""Real rounds."""

EQUAL_ARMS = (0.0, 0.01)
ROUNDS = 60
