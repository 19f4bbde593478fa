"""The engine of one slot: runs steps, recovers from out-of-memory, and reports its status."""
