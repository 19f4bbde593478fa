"""The decisions of the head about slots, without clock, randomness, I/O or Ray."""
